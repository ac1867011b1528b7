"""A saved failure, or a schedule of a corpus, runs no code of its choice, and writes nowhere that it chooses.

The connector of a world of vLLM is code by its name, and its options name more code, and directories.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import split
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from examples import examples
from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.check.walks import option_trust
from kvsm.check.walks.failures import SavedFailure
from kvsm.check.walks.option_trust import TEXTS, allowing, fields_with_text, refuse_named, structs_in
from kvsm.check.walks.targets import _ALL, TARGETS, OwnWorldOptions, draw_case
from kvsm.check.walks.walk import random_of
from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.hand_over_options import HandOverWorldOptions
from kvsm.check.worlds.serving_world import ServingOptions
from kvsm.cli import main
from kvsm.cli.fuzz_targets import replay_command
from kvsm.core.policies import POLICIES
from kvsm.errors import ConfigError
from kvsm.properties import Property


def test_each_field_that_can_hold_text_is_in_the_table() -> None:
    """Of the options of every target, and of what is in them. A new field must be judged: add it to TEXTS."""
    kinds = [*[target.options for target in _ALL.values()], OwnWorldOptions]
    found = {struct: set(fields_with_text(struct)) for kind in kinds for struct in structs_in(kind)}
    assert {struct: fields for struct, fields in found.items() if fields} == {
        struct: set(fields) for struct, fields in TEXTS.items()
    }
    assert len(found) > len(TEXTS)


class Inner(msgspec.Struct, frozen=True):
    """Options inside of options."""

    where: str = "/tmp"
    size: int = 1


class NewOptions(msgspec.Struct, frozen=True):
    """Options of a new target."""

    module: str = ""
    data: bytes = b""
    more: dict[str, int] = {}
    anything: Any = None
    size: int | None = None
    parts: tuple[Inner, ...] = (Inner(),)


def test_a_field_that_nobody_has_judged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one in a struct inside. What the table says of one struct is not said of another one."""
    assert fields_with_text(NewOptions) == ["module", "data", "more", "anything"]
    assert structs_in(NewOptions) == [NewOptions, Inner]
    with pytest.raises(
        ConfigError, match=r"its module is '', which names something that kvsm has not judged"
    ):
        refuse_named(NewOptions(), {})
    judged: Mapping[Any, Any] = {NewOptions: dict.fromkeys(fields_with_text(NewOptions))}
    monkeypatch.setattr(option_trust, "TEXTS", judged)
    with pytest.raises(ConfigError, match=r"its where is '/tmp'"):
        refuse_named(NewOptions(), {})


def test_what_targets_draw_themselves_needs_no_leave() -> None:
    for target in TARGETS:
        for run in range(examples(20, least=4)):
            options = draw_case(target, random_of(3, run)).options
            refuse_named(options, {})
            assert allowing(options) == ""


@pytest.mark.parametrize("kind", [CoreOptions, ServingOptions, HandOverWorldOptions])
def test_a_policy_of_another_package_counts_only_if_the_user_gives_it(kind: Any) -> None:
    options = kind(policy="sharp:Edge")
    for given in ({}, {"policy": ["sharp:Other"]}, {"connector": ["sharp:Edge"]}):
        with pytest.raises(ConfigError, match="--allow-policy sharp:Edge"):
            refuse_named(options, given)
    refuse_named(options, {"policy": ["a:B", "sharp:Edge"]})
    assert allowing(options) == " --allow-policy sharp:Edge"
    assert all(allowing(kind(policy=policy)) == "" for policy in POLICIES)


@pytest.mark.parametrize(
    ("connector", "extra", "option"),
    [
        ("sharp_module:Connector", {}, "--connector sharp_module:Connector"),
        ("OffloadingConnector", {}, "--connector OffloadingConnector"),
        ("KvsmConnector", {"event_log": "/home/me"}, """--config '{"event_log":"/home/me"}'"""),
        (
            "KvsmConnector",
            {"policy": "sharp_module:Policy"},
            """--config '{"policy":"sharp_module:Policy"}'""",
        ),
        ("KvsmConnector", {"blocks_per_chunk": 2}, """--config '{"blocks_per_chunk":2}'"""),
    ],
)
def test_a_connector_and_its_options_count_only_if_the_user_gives_them(
    connector: str, extra: dict[str, Any], option: str
) -> None:
    options = EngineShape(connector=connector, extra=extra)
    for given in ({}, {"connector": ["other:Connector"], "extra": [{"event_log": "/tmp"}]}):
        with pytest.raises(ConfigError) as refusal:
            refuse_named(options, given)
        assert str(refusal.value).endswith(f"if you trust it, allow that: {option}")
    refuse_named(options, {"connector": [connector], "extra": [extra]})
    assert allowing(options) == f" {option}"


def save(directory: Path, target: str, options: dict[str, Any]) -> None:
    failure = {"target": target, "options": options, "actions": [], "property_id": "S1", "message": "m"}
    (directory / "actions.json").write_text(json.dumps({**failure, **COUNTS}))


COUNTS = {"seed": 0, "run": 0, "found": 0, "reruns": 0}
SHARP = "from pathlib import Path\nPath(__file__).with_name('it-ran').touch()\nclass Connector: pass\n"


def kvsm(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_saved_failure_imports_no_connector_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the connector nor in its options: the refusal comes before anything is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sharp_module.py").write_text(SHARP)
    for shape in (
        {"connector": "sharp_module:Connector"},
        {"extra": {"policy": "sharp_module:Connector"}},
        {"connector": "OffloadingConnector", "extra": {"spec_module_path": "sharp_module"}},
        {
            "connector": "MultiConnector",
            "extra": {"connectors": [{"kv_connector": "sharp_module:Connector"}]},
        },
    ):
        save(tmp_path, "vllm", shape)
        result = kvsm("fuzz", "--replay", tmp_path)
        assert result.exit_code == 2
        assert "if you trust it, allow that: " in result.stderr
        assert not (tmp_path / "it-ran").exists()
        assert "sharp_module" not in sys.modules
        assert "vllm" not in sys.modules or "vllm" not in result.stderr.split("names")[0]


def test_replay_says_which_options_do_not_belong_to_a_failure(tmp_path: Path) -> None:
    save(tmp_path, "core", {})
    assert "it has no connector" in kvsm("fuzz", "--replay", tmp_path, "--connector", "X").stderr
    assert "it has no extra" in kvsm("fuzz", "--replay", tmp_path, "--config", '{"a": 1}').stderr
    assert "not JSON" in kvsm("fuzz", "--replay", tmp_path, "--config", "{").stderr
    assert "give an object" in kvsm("fuzz", "--replay", tmp_path, "--config", "[1]").stderr
    assert "go with --replay alone" in kvsm("fuzz", "--runs", 1, "--connector", "X").stderr


def test_the_printed_command_allows_what_the_failure_names(tmp_path: Path) -> None:
    """It is copied to a shell, whatever a connector's options hold."""
    extra = {"event_log": "/tmp/a b", "quote": "it's"}
    options = msgspec.to_builtins(EngineShape(connector="my.module:Mine", extra=extra))
    failure = SavedFailure(
        target="vllm", options=options, actions=(), property=Property.CONSERVATION, message="m", **COUNTS
    )
    words = split(replay_command(failure, tmp_path))
    assert words[:4] == ["kvsm", "fuzz", "--replay", str(tmp_path)]
    given = dict(zip(words[4::2], words[5::2]))
    assert given["--connector"] == "my.module:Mine"
    refuse_named(
        failure.case().options,
        {"connector": [given["--connector"]], "extra": [json.loads(given["--config"])]},
    )
