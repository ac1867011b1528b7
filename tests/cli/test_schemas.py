"""The JSON that `--json` prints has a name, and matches the schema of this name in docs/schemas/."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import jsonschema
import museum.search
import pytest
from click.testing import CliRunner
from comparisons import comparison
from json_schemas import file_name
from lamps import Lamps, lamps, without_invariants
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from places import ROOT
from planted_bugs import free_slots_under_copies
from replay_life import after_reset, scene, story_life, written
from served_logs import served
from toy_checks import Commit

from kvsm.check.scopes.models import MODELS
from kvsm.check.walks.failures import SavedFailure
from kvsm.check.worlds.world import Finding
from kvsm.cli import COMMANDS, main
from kvsm.cli.copy_paths import CopyPathsAnswer, PathRange
from kvsm.cli.schemas import SCHEMAS
from kvsm.cli.vllm_fuzz import VllmFuzzAnswer, VllmFuzzFinding
from kvsm.copies import HostPool, KeptPool
from kvsm.identity import PoolIdentity
from kvsm.properties import Property
from kvsm.vllm.installation_check import EngineCheck, InstallationCheck

FOLDER = ROOT / "docs" / "schemas"

ANSWERS: Mapping[str, Sequence[str]] = {
    "kvsm.run/1": (
        "run --json --requests 60 --block-bytes 64 --copies simulated --log NEW",
        "run --json --requests 9 --block-bytes 64 --disk-blocks 99 --disk-dir DISK --log TIERS",
    ),
    "kvsm.logs/1": ("logs LOGS --json", "logs LOGS --json --max-bytes 0"),
    "kvsm.pools/1": ("pools POOLS --json", "pools POOLS --json --remove"),
    "kvsm.copy-paths/1": ("copy-paths --json", "copy-paths --measure --json"),
    "kvsm.report/1": (
        "report LOG --json",
        "report BROKEN --json",
        "report BROKEN --no-verify --json",
        "report TIERS --json",
    ),
    "kvsm.replay/1": ("replay LOG --json", "replay LOG --json --at 5"),
    "kvsm.verify/1": ("verify LOG --json", "verify BROKEN --json", "verify TIERS --json"),
    "kvsm.show/1": ("show LOG --json --block 0", "show LOG --json --transfer 3"),
    "kvsm.query/1": ("query LOG 'SELECT * FROM lookups' --json", "query LOG --named long-waits --json"),
    "kvsm.query-list/1": ("query --list --json",),
    "kvsm.spans/1": ("spans LOG --json",),
    "kvsm.export/1": ("export LOG --parquet NEW --json",),
    "kvsm.redact/1": ("export LOG --redact NEW --json",),
    "kvsm.tail/1": ("tail LOG --json", "tail LOG --json --no-follow -n 1"),
    "kvsm.top/1": ("top LOG --json", "top LOG --json --once"),
    "kvsm.repro/1": ("repro BROKEN --json --output TEST",),
    "kvsm.diff/1": ("diff SERVED SERVED --json", "diff SERVED LOG --json"),
    "kvsm.fork/1": ("fork SERVED --at 40 --policy arc -o FORKED --json",),
    "kvsm.unavoidable/1": ("fork BROKEN --unavoidable --json",),
    "kvsm.timeline/1": ("timeline LOG -o PAGE --json",),
    "kvsm.whatif/1": ("whatif SERVED --json --policy lru,arc",),
    "kvsm.why/1": ("why LOG r4 --json", "why LOG --json --key 00000001", "why LOG --json --block 0"),
    "kvsm.check/1": ("check --json --jobs 1", "check --json --jobs 1 -b hasty=1"),
    "kvsm.check-list/1": ("check --list --json",),
    "kvsm.any-size/1": ("check --any-size --json --jobs 1 --solver z3",),
    "kvsm.fuzz/1": ("fuzz --json --runs 1 --jobs 1 --seed 1 --log FAILURE",),
    "kvsm.fuzz-replay/1": ("fuzz --json --replay FAILURE",),
    "kvsm.museum/1": ("museum --json",),
    "kvsm.museum-list/1": ("museum --list --json",),
    "kvsm.vllm-check/1": ("vllm-check --json",),
    "kvsm.vllm-fuzz/1": ("vllm-fuzz --connector KvsmConnector --json",),
    "kvsm.conform/1": ("conform own_world:BrokenShelf --json --seconds 0 --seed 1",),
    "kvsm.bench-vllm/1": ("bench vllm --json",),
}
"""Ways to each answer, in this order. LOG is a good log, BROKEN one that breaks a property, SERVED one of the
serving engine; NEW, FORKED, FAILURE, DISK and TIERS are directories to make, POOLS one with a host pool, and
PAGE and TEST are files to make."""

MAKERS = {"TIERS": ANSWERS["kvsm.run/1"][1], "FAILURE": ANSWERS["kvsm.fuzz/1"][0]}
"""How what others read is made. Each test makes its own: another worker may run the test of the maker."""

INSTALLED = InstallationCheck(
    version="0.32.0",
    tested=True,
    platform="cpu",
    ranks=1,
    interface=(),
    engines=(EngineCheck(name="without kvsm"), EngineCheck(name="KvsmConnector", wrong=("no log",))),
)


PATHS = CopyPathsAnswer(
    device="NVIDIA H200",
    driver_version=13000,
    file="copy-paths.json",
    is_measured=True,
    store_thread_blocks=None,
    load_thread_blocks=2,
    stores=[PathRange(fragment_bytes=1024, from_count=1, to_count=None, path="batch", otherwise=["kernel"])],
    loads=[],
)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield each command that is not a group, with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def has_json(command: click.Command) -> bool:
    return any("--json" in one.opts for one in command.params)


def tagged(kind: type) -> Iterator[type]:
    """Yield all subclasses of this struct whose tag field is "schema"."""
    for one in kind.__subclasses__():
        if one.__struct_config__.tag_field == "schema":
            yield one
        yield from tagged(one)


def test_each_answer_is_registered_under_its_name() -> None:
    """`kvsm.VERB/N`: the tag of the struct, and its only name."""
    for one in COMMANDS.values():
        import_module(f"kvsm.cli.{one.room}")
    assert {one.__struct_config__.tag: one for one in SCHEMAS.values()} == SCHEMAS
    ours = {one for one in tagged(import_module("msgspec").Struct) if one.__module__.startswith("kvsm.")}
    assert ours == {*SCHEMAS.values()}
    assert all(re.fullmatch(r"kvsm\.[a-z]+(-[a-z]+)*/[1-9]", name) for name in SCHEMAS)


def test_each_command_that_prints_json_is_tried_here() -> None:
    """Each name of JSON that a command can print is tried."""
    assert {*ANSWERS} == {*SCHEMAS}
    tried = {way for ways in ANSWERS.values() for way in ways}
    for words, command in commands(main):
        assert has_json(command) == any(f"{way} ".startswith(f"{words} ") for way in tried), words


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the logs and directories for the words in capitals that must exist before any command."""
    place = tmp_path_factory.mktemp("schemas")
    story_life(place / "log")
    life = scene()
    broken = written(place / "broken", life, [*life.events, *after_reset(life)])
    kept = KeptPool(PoolIdentity.of({"model": "m"}))
    (place / "pools").mkdir()
    HostPool(4, 64, path=place / "pools" / "engine0-rank0", keep=kept).close()
    return {
        "LOG": str(place / "log"),
        "LOGS": str(place),
        "POOLS": str(place / "pools"),
        "BROKEN": str(broken),
        "SERVED": str(served(place / "served", requests=30)),
    }


@pytest.fixture
def places(logs: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the values of all words in capitals."""
    made = ("NEW", "FORKED", "FAILURE", "DISK", "TIERS", "PAGE")
    return {
        **logs,
        **{name: str(tmp_path / name.lower()) for name in made},
        "TEST": str(tmp_path / "test_repro.py"),
    }


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plant a bug for the walk, choose a small model, and replace slow searches by made results."""
    free_slots_under_copies(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the process of `kvsm conform`
    monkeypatch.setattr(Lamps, "made", [without_invariants(lamps(size)) for size in (1, 2)])
    found = museum.search.SearchResult(
        id="B19", checker="core", finding=Finding(Property.LEGAL_CALLS, "refused"), trace=(("arrive", 1),)
    )
    clean = museum.search.SearchResult(id=museum.search.CLEAN)
    monkeypatch.setattr("kvsm.cli.museum.search_all", lambda *_, **__: [found, clean])
    monkeypatch.setattr("kvsm.explain.otel_export.collector", lambda *_: InMemorySpanExporter())
    monkeypatch.setattr("kvsm.cli.copy_paths._answer", lambda *_: PATHS)
    monkeypatch.setattr("kvsm.cli.vllm.check_installation", lambda *_: INSTALLED)
    monkeypatch.setattr("kvsm.cli.vllm.compare", lambda *_, **__: comparison())
    monkeypatch.setattr(import_module("kvsm.cli.vllm_fuzz").Hunt, "run", lambda *_, **__: hunted())
    with patch.dict(MODELS, {"commit": Commit(), "lamps": Lamps()}, clear=True):
        yield


def hunted() -> VllmFuzzAnswer:
    """Return an answer as from a walk of a connector with findings."""
    failure = SavedFailure(
        target="vllm",
        options={"connector": "KvsmConnector"},
        actions=(("settle",),),
        property=Property.PROGRESS,
        message="it goes on",
        seed=1,
        run=2,
        found=3,
        reruns=4,
    )
    return VllmFuzzAnswer(
        connector="KvsmConnector",
        version="0.32.0",
        seed=1,
        runs=2,
        operations=3,
        seconds=4.0,
        interrupted=False,
        findings=(VllmFuzzFinding(failure, 1, "found/1"),),
    )


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("name", ANSWERS)
def test_json_is_what_its_schema_says(name: str, places: dict[str, str]) -> None:
    """Each line is an object whose first key is its schema's name, and the schema in docs/ accepts it."""
    check = jsonschema.Draft202012Validator(strict(read_schema(name)))
    for word, maker in MAKERS.items():
        if maker not in ANSWERS[name] and any(word in way.split() for way in ANSWERS[name]):
            printed(maker, places)
    for way in ANSWERS[name]:
        for line in printed(way, places).splitlines():
            told = json.loads(line)
            assert next(iter(told.items())) == ("schema", name), way
            check.validate(told)


def printed(way: str, places: Mapping[str, str]) -> str:
    result = CliRunner().invoke(main, [places.get(word, word) for word in shlex.split(way)])
    assert result.stdout, (way, result.output)
    return result.stdout


def read_schema(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / file_name(name)).read_bytes())


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without additional fields: else a field that it lacks would pass unnoticed."""
    for one in (schema, *schema["$defs"].values()):
        if "properties" in one:
            one["additionalProperties"] = False
    return schema


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_schema_tells_who_prints_it(name: str) -> None:
    schema = read_schema(name)
    assert re.match(r"What `kvsm [^`]+ --json` prints: ", schema["description"])
    assert schema["properties"]["schema"] == {"enum": [name]}


def test_a_field_has_the_description_of_its_struct() -> None:
    """Each line of a struct's docstring becomes the description of the field that it names."""
    schema = read_schema("kvsm.show/1")
    assert "before" not in schema["description"]
    told = "the state of the thing; equal if the event is only a cause."
    assert [schema["properties"][name]["description"] for name in ("before", "after")] == [told, told]
