"""The files that GitHub reads, and those for contributors: their forms, and what they name, exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from check_links import places
from places import ROOT

from kvsm.cli import main

TEXTS = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "CHANGELOG.md",
    ".github/pull_request_template.md",
)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FILES = [*TEXTS, *(str(path.relative_to(ROOT)) for path in (*WORKFLOWS, *FORMS))]
REPOSITORY = "https://github.com/kvsm/kvsm/"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def loaded(path: Path) -> Any:
    """The content of a file. GitHub reads YAML 1.2, in which "on" is no boolean."""
    return yaml.safe_load(re.sub(r"^on:", '"on":', path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def schema(name: str) -> Any:
    """A schema of SchemaStore, as check-jsonschema installs it."""
    vendored = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / f"{name}.json"
    return json.loads(vendored.read_text(encoding="utf-8"))


def test_each_address_in_the_repository_leads_somewhere() -> None:
    """GitHub shows these files where a relative link has no place. `specs/check_links.py` follows relative
    links."""
    address = rf"{REPOSITORY}blob/main/([^)#\s]*)(?:#([\w-]*))?"
    links = [found for name in FILES for found in re.findall(address, text_of(name))]
    assert len(links) >= 3
    for target, anchor in links:
        assert (ROOT / target).exists(), target
        assert not anchor or anchor in places(ROOT / target), f"{target}#{anchor}"


def options_of(words: list[str]) -> set[str] | None:
    """The options of a command of kvsm; None: there is no such command."""
    command: click.Command = main
    context = click.Context(main)
    for word in words:
        found = command.get_command(context, word) if isinstance(command, click.Group) else None
        if found is None:
            break
        command = found
    return None if command is main else {opt for one in command.params for opt in one.opts}


@pytest.mark.parametrize("name", FILES)
def test_each_command_of_kvsm_exists(name: str) -> None:
    """With each of its options, as far as they stand in the same piece of code."""
    code = re.findall(r"`([^`]+)`", text_of(name)) + re.findall(r"^ *(kvsm .*)$", text_of(name), re.MULTILINE)
    calls = [found for piece in code for found in re.findall(r"(?:^|&& |/)kvsm ([a-z][^&|#]*)", piece)]
    for call in calls:
        known = options_of(call.split())
        assert known is not None, f"kvsm {call}"
        assert set(re.findall(r"(?<!\S)--[a-z-]+", call)) <= known, f"kvsm {call}"


def test_commands_are_found_in_the_texts() -> None:
    assert options_of(["vllm-chek"]) is None
    assert "--redact" in (options_of(["export", "DIR"]) or ())
    assert "kvsm export" in text_of("SECURITY.md")
    assert "kvsm repro" in text_of("CONTRIBUTING.md")


def scripts_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w/])\.ci/\w+", text))


@pytest.mark.parametrize("name", FILES)
def test_each_script_of_ci_exists(name: str) -> None:
    for script in scripts_in(text_of(name)):
        assert os.access(ROOT / script, os.X_OK), script


def test_the_nightly_run_tells_an_index_that_does_not_answer_from_a_change_of_vllm(tmp_path: Path) -> None:
    """Exit code 1 would say that vLLM has changed."""
    python = tmp_path / "python3"
    python.write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"\nprintf "#!/bin/sh\\nexit 1\\n" > "$3/bin/pip"\nchmod +x "$3/bin/pip"\n'
    )
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    environment.pop("GITHUB_STEP_SUMMARY", None)
    ended = subprocess.run([ROOT / ".ci/nightly"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "the package index names no version of vLLM" in ended.stdout
    assert "search: no environment with kvsm and its tests could be made" in ended.stdout


@pytest.mark.parametrize("arguments", [["0.33.0"], ["search", "0"], ["search", "1.5"]], ids=" ".join)
def test_the_nightly_run_refuses_unusable_arguments(arguments: list[str]) -> None:
    ended = subprocess.run([ROOT / ".ci/nightly", *arguments], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"'{arguments[-1]}'" in ended.stderr


def runs_on(day: str, share: str) -> set[int]:
    """Which of 1,000 slow tests run on a day."""
    asked = "from examples import runs_today; print(*(n for n in range(1000) if runs_today(f'test_{n}')))"
    chosen = {"KVSM_SEED": day, "KVSM_SLOW_SHARE": share}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"), **chosen}
    return {*map(int, subprocess.check_output([sys.executable, "-c", asked], env=environment).split())}


def test_each_day_draws_its_share_of_the_slow_tests() -> None:
    """A seed names the day, so the same tests run again with it."""
    first, again, next_day = runs_on("20261129", "10"), runs_on("20261129", "10"), runs_on("20261130", "10")
    assert 60 < len(first) < 140
    assert first == again
    assert len(first & next_day) < 40
    assert len(runs_on("20261129", "1")) == 1000


def test_only_slow_tests_are_left_out() -> None:
    """Of this file's neighbour: it has fast tests and slow ones."""
    counts = []
    for share in ("1", "1000000"):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-qq",
            "-m",
            "slow or not slow",
            "-p",
            "no:xdist",
        ]
        environment = {**os.environ, "KVSM_SLOW_SHARE": share}
        done = subprocess.run(
            [*command, "tests/house/test_kv_event_router.py"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        counts.append(int(done.stdout.split(": ")[1]))
    assert 0 < counts[1] < counts[0]


def test_a_search_tries_all_cases_of_slow_tests_instead_of_those_of_the_day() -> None:
    asked = 'from examples import drawn_today, of_today; print(of_today("abc", 3), drawn_today("abc", 1))'
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"), "KVSM_EVERY": "1"}
    command = [sys.executable, "-c", asked]
    assert subprocess.check_output(command, env=environment, text=True) == "abc abc\n"


@pytest.mark.parametrize("script", ["nightly", "run", "vllm", "wheels", "workflows"])
def test_a_script_of_ci_has_no_syntax_error(script: str) -> None:
    checked = subprocess.run(
        ["bash", "-n", ROOT / ".ci" / script], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_one_that_github_accepts(path: Path) -> None:
    """`.ci/workflows` also checks its expressions, with actionlint."""
    jsonschema.validate(loaded(path), schema("github-workflows"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_only_calls_a_script_of_ci(path: Path) -> None:
    """What a workflow checks, everybody can check. It has no rights to write, and ends."""
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 350
        own = [step["run"] for step in job["steps"] if "run" in step]
        assert [run for run in own if not scripts_in(run) and "safe.directory" not in run] == []
        assert any(map(scripts_in, own))
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert [one for one in used if not re.search(r"@[0-9a-f]{40}$", one)] == []


def test_the_three_workflows_call_their_scripts() -> None:
    called = {path.stem: scripts_in(path.read_text(encoding="utf-8")) for path in WORKFLOWS}
    assert called == {
        "nightly": {".ci/nightly"},
        "test": {".ci/run", ".ci/workflows"},
        "wheels": {".ci/wheels"},
    }


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_github_accepts(path: Path) -> None:
    kind = "github-issue-config" if path.stem == "config" else "github-issue-forms"
    jsonschema.validate(loaded(path), schema(kind))


def test_a_bug_is_reported_with_a_redacted_log() -> None:
    fields = {one.get("id"): one for one in loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")["body"]}
    assert fields["log"]["validations"]["required"]
    assert "kvsm export DIR --redact" in fields["log"]["attributes"]["description"]


def test_the_citation_is_of_this_version() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    jsonschema.validate(citation, schema("citation-file-format"))
    project = text_of("pyproject.toml").split("[project]")[1].split("\n[")[0]
    assert re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1] == citation["version"]  # type: ignore[index]
    assert f'license = "{citation["license"]}"' in project
    assert f"## {citation['version']}" in text_of("CHANGELOG.md")


def test_each_hook_runs_a_tool_of_the_test_extra() -> None:
    hooks = loaded(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    extra = text_of("pyproject.toml").split("\ntest = [")[1].split("]\n")[0]
    tools = [re.match(r"python -m (\w+)", hook["entry"])[1] for hook in hooks]  # type: ignore[index]
    assert tools == ["ruff", "ruff", "mypy"]
    assert all(f'"{tool}>=' in extra for tool in tools)
    assert {hook["language"] for hook in hooks} == {"system"}


def test_the_changelog_is_short_and_for_its_readers() -> None:
    text = text_of("CHANGELOG.md")
    assert len(text.splitlines()) < 120
    assert re.findall(r"^### (.+)$", text.split("\n## ")[1], re.MULTILINE) == [
        "For an operator of vLLM",
        "For the developer of an engine",
        "For the owner of a CI",
        "For the engineer on call",
        "Compatibility",
        "Known gaps",
    ]
