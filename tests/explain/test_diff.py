"""Two logs of one workload: equal stories compare equal, and the first other decision is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from replay_life import OPERATIONS, Life, Operations, key, random_life, written

import kvsm
from examples import examples
from kvsm import events as ev
from kvsm.cli import main
from kvsm.events import OffloadingEvent
from kvsm.explain.other_future import OtherChoices, fork
from kvsm.explain.two_logs import _FIGURES, LogDiff, diff


def difference(good: Path, bad: Path) -> LogDiff:
    with kvsm.open(good) as one, kvsm.open(bad) as other:
        return diff(one, other)


@settings(max_examples=examples(25))
@given(OPERATIONS, OPERATIONS)
def test_what_is_not_decided_does_not_part_two_logs(operations: Operations, others: Operations) -> None:
    """Other times, other numbers of events, reports that are rejected, flushes: the stories are the same."""
    noise = [("misreport", 10**6, 0), ("engine_waits", 0, 0)]
    # The number of an event names another transfer in a log with other events.
    operations = [one for one in operations if one[0] != "misreport"]
    with TemporaryDirectory() as scratch:
        good, bad = Path(scratch) / "good", Path(scratch) / "bad"
        Life(good).drive(operations).close()
        noisy = Life(bad)
        for number, operation in enumerate(operations):
            noisy.drive([noise[number % 2], operation] if others else [operation])
        noisy.close()
        found = difference(good, bad)
        assert found.same, found.partings
        assert (found.settings, found.figures) == ([], [])


def _renamed(life: Life, directory: Path, rename: Callable[[OffloadingEvent], OffloadingEvent]) -> Path:
    return written(directory, life, [rename(event) for event in life.events])


def _other_keys(event: OffloadingEvent) -> OffloadingEvent:
    """The same event of a process whose block hashes start from another value."""

    def other(one: bytes) -> bytes:
        return b"other" + one

    fields = {}
    if hasattr(event, "keys"):
        fields["keys"] = tuple(map(other, event.keys))
    if getattr(event, "missed", None) is not None:
        fields["missed"] = other(event.missed)  # type: ignore[attr-defined]
    return msgspec.structs.replace(event, **fields)


def test_logs_that_share_no_key_are_aligned_by_who_stored_it(tmp_path: Path) -> None:
    life = random_life(2, 200, tmp_path / "good")
    life.close()
    other = _renamed(life, tmp_path / "bad", _other_keys)
    found = difference(tmp_path / "good", other)
    assert found.keys_by_owner
    assert found.same, found.partings


def _suffixed(event: OffloadingEvent) -> OffloadingEvent:
    """The same event under vLLM's server, which makes a name of its own for each request."""
    fields = {}
    if hasattr(event, "request"):
        fields["request"] = f"{event.request}-0badcafe"
    for names in ("owners", "offers"):
        if hasattr(event, names):
            fields[names] = tuple((f"{name}-0badcafe", *rest) for name, *rest in getattr(event, names))
    return msgspec.structs.replace(event, **fields)


def test_the_suffix_of_vllm_does_not_part_two_logs(tmp_path: Path) -> None:
    life = random_life(2, 200, tmp_path / "good")
    life.close()
    found = difference(tmp_path / "good", _renamed(life, tmp_path / "bad", _suffixed))
    assert found.same, found.partings


def _parted_by_a_failed_store(scratch: Path) -> tuple[Path, Path, int]:
    """`r2`'s store is good in the first log and fails in the second, so `r3` hits and misses."""
    life = Life(scratch / "good", host_blocks=4, workers=1, defer_ticks=0)
    life.stored("r0", [key(0)], [0])
    store = life.stored("r2", [key(2)], [2])
    life.core.match("r3", [key(2)])
    life.core.finish("r3")
    life.close()
    fork(scratch / "good", store, OtherChoices(fail=(store,)), scratch / "bad")
    return scratch / "good", scratch / "bad", store


def test_the_first_parting_is_the_first_other_decision(tmp_path: Path) -> None:
    """Its consequences follow: first what happened to the store, then what the later request missed."""
    good, bad, store = _parted_by_a_failed_store(tmp_path)
    first, *others = difference(good, bad).partings
    assert first.good is None
    assert first.bad is not None
    assert first.bad.event == store + 2
    assert first.about in (f"key {key(2).hex()}", "request r2")
    [lookup] = [parting for parting in others if parting.about == "request r3"]
    assert lookup.good is not None
    assert lookup.bad is not None
    assert lookup.good.text == "has some blocks on the device and 1 on the host"
    assert (
        lookup.bad.text == "has some blocks on the device and 0 on the host; its prefix stops: store failed"
    )
    assert lookup.bad.key == key(2).hex()
    assert lookup.bad.cause is not None
    assert f"transfer {store}" in lookup.bad.cause


def test_settings_and_figures_that_differ_are_told(tmp_path: Path) -> None:
    """A smaller pool evicts more."""
    for name, slots in (("good", 12), ("bad", 6)):
        random_life(4, 300, tmp_path / name, host_blocks=slots).close()
    found = difference(tmp_path / "good", tmp_path / "bad")
    assert [(one.name, one.good, one.bad) for one in found.settings] == [("host_blocks", 12, 6)]
    evicted = {one.name: (one.good, one.bad) for one in found.figures}["blocks evicted"]
    assert evicted[0] < evicted[1]
    assert {one.name for one in found.figures} <= set(_FIGURES)


# The command.


def test_the_command_says_where_two_logs_part(tmp_path: Path) -> None:
    good, bad, store = _parted_by_a_failed_store(tmp_path)
    result = CliRunner().invoke(main, ["diff", str(good), str(bad)])
    assert result.exit_code == 1
    assert "They differ here first:" in result.output
    assert f"(event {store + 2}," in result.output
    assert CliRunner().invoke(main, ["diff", str(good), str(good)]).exit_code == 0


def test_json_is_the_difference(tmp_path: Path) -> None:
    good, bad, _ = _parted_by_a_failed_store(tmp_path)
    result = CliRunner().invoke(main, ["diff", str(good), str(bad), "--json"])
    assert json.loads(result.stdout)["schema"] == "kvsm.diff/1"
    assert msgspec.json.decode(result.stdout, type=LogDiff) == difference(good, bad)


def test_a_fork_says_where_the_futures_part(tmp_path: Path) -> None:
    good, _, store = _parted_by_a_failed_store(tmp_path)
    command = ["fork", str(good), "--at", str(store), "--late", f"{store}:50", "-o", str(tmp_path / "late")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "the first other event is" in result.output
    assert "request r3" in result.output
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 2
    assert "holds a log already" in again.output


def test_a_fork_without_another_choice_says_that_nothing_parts(tmp_path: Path) -> None:
    good, _, store = _parted_by_a_failed_store(tmp_path)
    result = CliRunner().invoke(main, ["fork", str(good), "--at", str(store), "-o", str(tmp_path / "same")])
    assert "event for event" in result.output
    assert "have the same story in both logs" in result.output


@pytest.mark.parametrize("late", ["7", "a:b", "7:", ":7"])
def test_a_late_report_that_cannot_be_read_is_one_line(late: str, tmp_path: Path) -> None:
    good, _, _ = _parted_by_a_failed_store(tmp_path)
    result = CliRunner().invoke(main, ["fork", str(good), "--at", "2", "--late", late])
    assert result.exit_code == 2
    assert "is not TRANSFER:EVENTS" in result.output
    assert len(result.output.splitlines()) == 1


def test_names_of_a_log_are_data(tmp_path: Path) -> None:
    """A request's name with terminal escapes is shown harmless."""
    life = Life(tmp_path / "good", host_blocks=4, workers=1)
    life.core.arrive("r\x1b[31m\n' OR 1=1 --")
    life.close()
    Life(tmp_path / "bad", host_blocks=4, workers=1).close()
    result = CliRunner().invoke(main, ["diff", str(tmp_path / "good"), str(tmp_path / "bad")])
    assert result.exit_code == 1
    assert "\x1b" not in result.output
    assert "request r\\x1b[31m\\n' OR 1=1 --" in result.output


def test_the_store_of_no_request_has_a_story(tmp_path: Path) -> None:
    """A lazy store belongs to no request; its keys are compared nonetheless."""
    for name, count in (("good", 1), ("bad", 2)):
        life = Life(tmp_path / name, workers=1)
        life.core.store((), [key(one) for one in range(count)], list(range(count)))
        life.close()
    found = difference(tmp_path / "good", tmp_path / "bad")
    assert [(parting.about, parting.others) for parting in found.partings] == [(f"key {key(1).hex()}", 0)]


def test_things_that_part_in_the_same_events_are_told_once(tmp_path: Path) -> None:
    for name, count in (("good", 1), ("bad", 4)):
        life = Life(tmp_path / name, workers=1)
        life.core.store((), [key(one) for one in range(count)], list(range(count)))
        life.close()
    found = difference(tmp_path / "good", tmp_path / "bad")
    assert found.parted == 3
    assert [parting.others for parting in found.partings] == [2]


def test_each_kind_of_event_is_in_a_story_or_left_out_on_purpose() -> None:
    """A new kind of event must be looked at: is it a decision that two runs share?"""
    told = {
        *(ev.RequestArrived, ev.RequestFinished, ev.RequestPreempted, ev.HitMatched, ev.LoadPlanned),
        *(ev.StorePlanned, ev.StoreSkipped, ev.BlocksEvicted, ev.CacheReset, ev.Restarted),
        *(ev.WorkerReported, ev.TransferLost, ev.TransferCancelled),
    }
    timing = {ev.RequestDeferred, ev.TransfersSubmitted, ev.ReportRejected, ev.FlushRequested, ev.Ticked}
    bookkeeping = {
        *(
            ev.LogOpened,
            ev.RequestAdmitted,
            ev.HitReleased,
            ev.KeysRecalled,
            ev.BlocksTouched,
            ev.StepEnded,
            ev.BlocksOffered,
        ),
        *(ev.OffersCounted, ev.BlocksRewritten, ev.HintAnswered, ev.TimesMeasured, ev.SlowHitFound),
    }
    assert told | timing | bookkeeping == set(ev.KINDS)
