"""`kvsm vllm-check` and `kvsm bench vllm`, as far as they can be tested without vLLM."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from comparisons import comparison
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from kvsm import vllm as plugin
from kvsm.cli import main
from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import LogWriter, WholeState
from kvsm.core.offloader import Offloader
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.vllm import bench, installation_check, versions
from kvsm.vllm import vllm_plugin as vllms_plugin
from kvsm.vllm.bench import Bench
from kvsm.vllm.extra_config import ConnectorOptions, RecordingOptions
from kvsm.vllm.installation_check import EngineCheck, InstallationCheck, judged, misfits, missing_names
from kvsm.vllm.trial import Trial, TrialFailed, TrialOutcome

DOCS = ROOT / "docs"
DOCUMENT = (DOCS / "vllm.md").read_text()


def kvsm(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


# Without vLLM.


@pytest.mark.parametrize("command", [["vllm-check"], ["bench", "vllm"]], ids=" ".join)
def test_without_vllm_it_is_one_line_and_exit_code_2(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_DISTRIBUTIONS", ("a-distribution-that-nobody-has",))
    result = kvsm(*command)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvsm: vLLM is not installed here; pip install vllm")
    assert result.stderr.count("\n") == 1


def test_help_needs_no_vllm() -> None:
    """One process for all three commands: it imports once."""
    script = (
        "import sys; sys.modules['vllm'] = None; from kvsm.cli import main\n"
        "for words in ['vllm-check'], ['bench'], ['bench', 'vllm']:\n"
        "    assert main([*words, '--help'], standalone_mode=False) == 0"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("Usage: ") == 3


def test_a_conversation_that_lacks_a_turn_is_refused() -> None:
    result = kvsm("bench", "vllm", "--requests", "10", "--turns", "4")
    assert result.exit_code == 2
    assert "requests is 10, which is not a multiple of the 4 turns" in result.stderr


# Does vLLM call kvsm as kvsm expects?


class Theirs:
    """A stub for a class of vLLM's interface."""

    def store(self, blocks: list[int], wait: bool = False) -> None: ...

    @classmethod
    def layout(cls, config: object) -> str:  # noqa: ARG003 (it is compared, not called)
        return ""


Theirs.__module__ = "vllm.interface"


def test_what_fits_is_good() -> None:
    class Ours(Theirs):
        def store(self, blocks: list[int], wait: bool = False, retries: int = 0) -> None: ...

        @classmethod
        def layout(cls, config: object) -> str:  # noqa: ARG003
            return "LBHNC"

        def _helper(self) -> None: ...

    assert misfits(Ours) == []


def test_a_method_that_vllm_does_not_know_is_told() -> None:
    class Ours(Theirs):
        def restore_kv_caches(self) -> None:
            """A method of a newer vLLM, which is not required."""

        def load(self) -> None: ...

    assert misfits(Ours) == ["vLLM does not call Ours.load, which kvsm needs"]


def test_a_method_that_takes_too_little_is_told() -> None:
    class Ours(Theirs):
        def store(self, blocks: list[int]) -> None: ...  # type: ignore[override]

    assert misfits(Ours) == ["Ours.store takes (self, blocks); vLLM gives (self, blocks, wait)"]


def test_a_method_that_takes_another_argument_is_told() -> None:
    class Ours(Theirs):
        def store(self, blocks: list[int], wait: bool, retries: int) -> None: ...  # type: ignore[override]

    assert misfits(Ours) == [
        "Ours.store takes (self, blocks, wait, retries); vLLM gives (self, blocks, wait)"
    ]


def test_a_method_that_vllm_needs_is_told() -> None:
    class Ours(Theirs):
        __abstractmethods__ = frozenset({"forget"})

    assert misfits(Ours) == ["Ours lacks forget, which vLLM needs"]


def test_names_that_vllm_lacks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports inside functions count too: a missing one would fail only when the function is called."""
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    there = types.ModuleType("vllm.there")
    monkeypatch.setitem(sys.modules, "vllm.there", there)
    monkeypatch.setattr(there, "Good", object, raising=False)
    (tmp_path / "room.py").write_text(
        "from vllm.there import Good, Gone\n\ndef later():\n    from vllm.nowhere import Thing\n"
    )
    assert missing_names(tmp_path) == [
        "vLLM has no vllm.there.Gone, which room needs",
        "vLLM has no vllm.nowhere.Thing, which room needs",
    ]


# What an engine must do.

PLAIN_OUTCOME = TrialOutcome(
    tokens=[[1, 2], [3, 4]], cached_tokens=[0, 0], prompt_tokens=400, seconds=1.0, metrics={}
)
GOOD = EngineCheck(
    name="KvsmConnector", cached_tokens=2304, blocks_stored=72, blocks_loaded=72, log_verifies=True
)


def test_same_tokens_and_loaded_blocks_are_good() -> None:
    assert judged(GOOD, PLAIN_OUTCOME, PLAIN_OUTCOME).wrong == ()


@pytest.mark.parametrize("tokens", [[[1, 2], [3, 5]], [[1, 2]]], ids=["another token", "a request less"])
def test_other_tokens_are_wrong(tokens: list[list[int]]) -> None:
    """Correct bytes (S15), as far as tokens show it."""
    outcome = msgspec.structs.replace(PLAIN_OUTCOME, tokens=tokens)
    found = judged(GOOD, PLAIN_OUTCOME, outcome)
    assert found.other_tokens == 1
    assert found.wrong == ("1 of 2 requests got other tokens than without kvsm",)


def test_blocks_that_do_not_come_back_are_wrong() -> None:
    idle = msgspec.structs.replace(GOOD, cached_tokens=0, blocks_loaded=0)
    assert judged(idle, PLAIN_OUTCOME, PLAIN_OUTCOME).wrong == (
        "0 blocks were loaded (72 were stored), but the prompts repeat 72",
        "0 prompt tokens came from a cache; without kvsm it is 0",
    )


@pytest.mark.parametrize(("good", "wrong"), [(True, ()), (False, ("failed stores: 1",))])
def test_copies_that_failed_are_wrong(tmp_path: Path, good: bool, wrong: tuple[str, ...]) -> None:
    """Tokens do not show it, because failed blocks are recomputed."""
    config = OffloadConfig(host_blocks=4, device_blocks=4)
    log = LogWriter(tmp_path / "log", config=config, snapshot=lambda: WholeState(snapshot(core.ledger)))
    core = Offloader(config, log)
    job = core.prepare_store("r", [b"k" * 36], [0]).job
    assert job is not None
    core.submit([job.transfer])
    core.report(job.transfer, 0, good)
    log.close()
    found = installation_check._read_log(GOOD, tmp_path, kept=False)
    assert found.wrong == wrong
    assert found.blocks_stored == int(good)
    assert found.log is None


def _runs(monkeypatch: pytest.MonkeyPatch, *answers: TrialOutcome | TrialFailed) -> None:
    """Replace engines by stubs with these answers, in an installation whose interface is complete."""
    left = list(answers)

    def run(trial: Trial) -> TrialOutcome:  # noqa: ARG001 (the real one's signature)
        answer = left.pop(0)
        if isinstance(answer, TrialFailed):
            raise answer
        return answer

    monkeypatch.setattr(installation_check, "run_trial", run)
    monkeypatch.setattr(installation_check, "installed", lambda: "0.99.0")
    monkeypatch.setattr(installation_check, "why_not_loaded", lambda: "no plugin")
    monkeypatch.setattr(installation_check, "_look", lambda: ([], ["vLLM has a new method: prefetch"], "cpu"))


def test_vllm_that_does_not_serve_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2: this is not kvsm's fault."""
    _runs(monkeypatch, TrialFailed("no memory"))
    result = kvsm("vllm-check")
    assert result.exit_code == 2
    assert result.stderr.endswith("kvsm: no memory\n")


def test_kvsm_that_does_not_serve_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1. One engine that fails does not hide the others."""
    _runs(monkeypatch, PLAIN_OUTCOME, TrialFailed("no such method"), PLAIN_OUTCOME)
    monkeypatch.setattr(installation_check, "why_not_loaded", lambda: "")
    result = kvsm("vllm-check")
    assert result.exit_code == 1
    assert "WRONG: KvsmConnector: no such method\n" in result.stdout
    assert "WRONG: KVSM_OFFLOAD=1: no event log in " in result.stdout
    assert "NEW: vLLM has a new method: prefetch\n" in result.stdout
    assert "vLLM 0.99.0 on cpu (not tested; tested: " in result.stdout
    assert result.stdout.endswith("kvsm does not work with this vLLM\n")


def test_report_as_json_says_whether_it_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    _runs(monkeypatch, PLAIN_OUTCOME, TrialFailed("no such method"))
    result = kvsm("vllm-check", "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert facts["good"] is False
    assert facts["news"] == ["vLLM has a new method: prefetch"]
    assert [one["wrong"] for one in facts["engines"]] == [[], ["no such method"]]


def test_the_short_start_is_checked_where_vllm_loads_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """This engine's options name no connector: variable and `--kv-offloading-size` choose it."""
    trials = []

    def run(trial: Trial) -> TrialOutcome:
        trials.append(trial)
        return PLAIN_OUTCOME

    _runs(monkeypatch)
    monkeypatch.setattr(installation_check, "run_trial", run)
    monkeypatch.setattr(installation_check, "why_not_loaded", lambda: "")
    result = kvsm("vllm-check")
    assert "WRONG: KVSM_OFFLOAD=1: no event log in " in result.stdout
    assert "NOTE" not in result.stdout
    short = trials[-1]
    assert short.environment == {"KVSM_OFFLOAD": "1"}
    assert short.engine["kv_offloading_size"] == 1 / 16
    assert short.kv_transfer is not None
    assert short.kv_transfer.keys() == {"kv_connector_extra_config"}
    assert all("kv_offloading_size" not in one.engine for one in trials[:-1])


def test_a_plugin_that_vllm_does_not_load_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that names the connector works nevertheless."""
    _runs(monkeypatch, PLAIN_OUTCOME, PLAIN_OUTCOME)
    result = kvsm("vllm-check")
    assert "NOTE: KVSM_OFFLOAD=1 has no effect: no plugin\n" in result.stdout
    assert "WRONG: KVSM_OFFLOAD" not in result.stdout


@pytest.mark.parametrize(
    ("installed", "allowed", "reason"),
    [
        (True, None, ""),
        (True, "lora,kvsm", ""),
        (True, "lora", "VLLM_PLUGINS is 'lora', and does not name kvsm"),
        (True, "", "VLLM_PLUGINS is '', and does not name kvsm"),
        (False, "kvsm", "vLLM does not find kvsm's plugin: install kvsm with pip in the environment of vLLM"),
    ],
)
def test_why_vllm_does_not_load_the_plugin(
    installed: bool, allowed: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = EntryPoint("kvsm", "kvsm.vllm.vllm_plugin:load", "vllm.general_plugins")
    monkeypatch.setattr(vllms_plugin, "entry_points", lambda group: [found] * installed)  # noqa: ARG005
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert vllms_plugin.why_not_loaded() == reason


@pytest.mark.parametrize("kept", ["file", "file/below"])
def test_logs_that_cannot_be_kept_are_bad_input(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is about the option, not about an engine that does not start."""
    (tmp_path / "file").touch()
    _runs(monkeypatch)
    result = kvsm("vllm-check", "--keep-log", str(tmp_path / kept))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_what_is_missing_in_vllm_is_wrong() -> None:
    report = InstallationCheck(
        version="0.32.0", tested=True, platform="cpu", ranks=1, interface=("no such name",), engines=()
    )
    assert report.wrong == ["no such name"]


# The benchmark.


@given(
    turns=st.integers(1, 8),
    conversations=st.integers(1, 50),
    turn=st.integers(1, 600),
    answer=st.integers(1, 64),
)
def test_what_runs_fits_the_device_and_the_host_holds_a_round(
    turns: int, conversations: int, turn: int, answer: int
) -> None:
    """Otherwise the benchmark would measure preemptions, or a host pool that is too small."""
    made = Bench(requests=turns * conversations, turns=turns, turn_tokens=turn, answer_tokens=answer)
    assert made.conversation_blocks * bench.BLOCK_TOKENS >= made.conversation_tokens
    assert made.device_blocks > bench._RUNNING * made.conversation_blocks
    assert made.host_bytes >= made.conversations * made.conversation_blocks * bench._BLOCK_BYTES
    if made.conversations >= 2 * bench._RUNNING:
        assert made.device_blocks <= made.conversations * made.conversation_blocks // 2 + 1


def test_a_page_gives_medians_and_ratios_of_the_same_round() -> None:
    text = bench.page(comparison())
    assert "| KvsmConnector | 20.0 (1.2 .. 20.0) | 2.00 (0.50 .. 4.00) | 50% (50 .. 50) | 0 |" in text
    assert (
        "| KvsmConnector | 10 (10 .. 10) | 0 (0 .. 0) | 5,000 (5,000 .. 80,000) | 100.0 (100.0 .. 100.0) | "
        in text
    )
    assert (
        "    kvsm bench vllm --requests 100 --turns 4 --turn-tokens 192 --answer-tokens 16 --rounds 3\n"
        in text
    )


def test_a_page_of_a_disk_tier_says_how_small_the_host_is() -> None:
    found = comparison()
    renamed = msgspec.structs.replace(found.contestants[1], name=bench.SMALL_AND_DISK)
    text = bench.page(msgspec.structs.replace(found, contestants=(found.contestants[0], renamed)))
    assert " --rounds 3 --disk DIR\n" in text
    assert "A host tenth is a host pool of a tenth of what all conversations of a round need." in text


def test_engines_that_choose_are_not_compared_above_a_disk(tmp_path: Path) -> None:
    result = kvsm("bench", "vllm", "--choosing", "--disk", str(tmp_path))
    assert result.exit_code == 2
    assert "--choosing and --disk compare different engines; give one of them" in result.stderr


def test_a_page_of_choosing_engines_has_the_command_that_made_it() -> None:
    found = comparison()
    choosing = [msgspec.structs.replace(found.contestants[1], name=name) for name in bench.CHOOSING]
    page = bench.page(
        msgspec.structs.replace(
            found,
            bench=Bench(requests=100, rounds=3, host_percent=25),
            contestants=(*found.contestants, *choosing),
        )
    )
    assert " --rounds 3 --host-percent 25 --choosing\n" in page
    assert "| KvsmConnector, both | 20.0 (1.2 .. 20.0) |" in page


def test_a_page_that_cannot_be_written_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the engines run, which takes minutes."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("kvsm.cli.vllm.compare", None)
    result = kvsm("bench", "vllm", "--output", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert "--output: cannot write" in result.stderr
    assert result.stderr.count("\n") == 1


# The documents.


@pytest.mark.parametrize(
    ("kind", "document", "has_tests"),
    [
        (ConnectorOptions, "vllm.md", True),
        (RecordingOptions, "vllm-recording.md", False),
    ],
)
def test_the_documents_list_the_options(kind: type[msgspec.Struct], document: str, has_tests: bool) -> None:
    """Names, defaults and descriptions are those of the code."""
    text = (
        (DOCS / document).read_text().replace("[policies.md](policies.md)", "`kvsm.core.policies.POLICIES`")
    )
    test = r" `test_\S+` \|" if has_tests else ""
    rows = re.findall(rf"^\| `([a-z_]+)` \| (none|required|`[^`]+`) \| (.+) \|{test}$", text, re.MULTILINE)
    documented = {name: (default, meaning) for name, default, meaning in rows}
    descriptions = _descriptions(kind)
    assert documented == {
        field.name: (_default(field), descriptions[field.name]) for field in msgspec.structs.fields(kind)
    }


def _descriptions(kind: type) -> dict[str, str]:
    """Return the description of each field from the docstrings of a class and its bases."""
    found = {}
    for base in kind.__mro__:
        # Since Python 3.13 a docstring has no indentation.
        text_of_class = inspect.cleandoc(base.__doc__ or "")
        for name, text in re.findall(r"^(\w+): (.+(?:\n    .+)*)", text_of_class, re.MULTILINE):
            found[name] = re.sub(r"\s+", " ", text[0].upper() + text[1:])
    return found


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    return "none" if field.default is None else f"`{str(field.default).lower()}`"


def test_documented_versions_are_the_tested_ones() -> None:
    assert f"Tested with vLLM {' and '.join(versions.TESTED)}." in DOCUMENT


def test_documented_flags_are_json_that_kvsm_takes() -> None:
    """All flags in the document and in the README."""
    readme = (ROOT / "README.md").read_text()
    flags = re.findall(r"--kv-transfer-config[ \\\n]+'(.+?)'", DOCUMENT + readme, re.DOTALL)
    assert len(flags) >= 3
    for flag in flags:
        transfer = json.loads(flag)
        extra = transfer["kv_connector_extra_config"]
        if "kv_connector" not in transfer:
            extra["cpu_bytes_to_use"] = 1  # from --kv-offloading-size
        msgspec.convert(extra, ConnectorOptions)


def test_a_vllm_that_lacks_a_name_is_told_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """At start-up, and with advice instead of a bare traceback."""

    def lacking(_room: str) -> None:
        raise ImportError("cannot import name 'SupportsHMA' from 'vllm.v1.base'", name="vllm.v1.base")

    monkeypatch.setattr(plugin, "import_module", lacking)
    monkeypatch.setattr(plugin, "installed", lambda: "0.99.0")
    with pytest.raises(ConfigError, match=r"KvsmConnector .* vLLM 0\.99\.0 .*SupportsHMA.* vllm-check"):
        _ = plugin.KvsmConnector
