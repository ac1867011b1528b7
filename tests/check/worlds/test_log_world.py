"""The world of a log on a failing disk: lost syncs, and a defect that a fresh seed has found."""

from __future__ import annotations

from random import Random

import pytest
from planted_bugs import plant

from kvsm.check.walks.walk import walk
from kvsm.check.worlds.log_world import FailingLogWorld, LogWorldOptions, draw_log_options
from kvsm.check.worlds.world import Action
from kvsm.core.log import continued, frames, reader
from kvsm.core.log.retention import Retention
from kvsm.core.log.segment_file import SegmentFile
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.properties import Property

LIMITED = LogWorldOptions(on_failure="continue", segment_bytes=200, max_bytes=12_000, long_lives=True)
SYNCED = LogWorldOptions()


def test_the_next_process_writes_again_what_a_failed_sync_may_have_dropped() -> None:
    """Events are state (S10).

    A sync fails, the process is killed before it marks the log, the next process continues the log, and then
    the power is lost.
    """
    for which in range(8):
        world = FailingLogWorld(SYNCED)
        for action in (("append", 900), ("fail_sync", which), ("flush",), ("sync",), ("kill",), ("start",)):
            assert world.do(action), action
        assert world.do(("lose_power", 0))
        assert world.describe()["events"] == "1"


def test_a_new_life_cuts_the_torn_end_before_a_segment_without_events() -> None:
    """Events are state (S10).

    The power is lost while a segment follows whose events are not durable. Its predecessor ends in zeros. The
    new life replaces the segment without events. Until it cut these zeros, too, the log read as damaged.
    """
    actions: tuple[Action, ...] = (
        ("append", 900),
        ("flush",),
        ("open",),
        ("flush",),
        ("append", 20),
        ("sync",),
        ("flush",),
    )
    for which in range(100):
        world = FailingLogWorld(LogWorldOptions(on_failure="continue", segment_bytes=200))
        for action in (*actions, ("lose_power", which), ("start",)):
            assert world.do(action), action
        assert world.do(("close",))


def test_a_finding_names_no_directory_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the same seed writes the same failure."""
    monkeypatch.setattr(frames, "decode_mark", lambda _data: None)
    monkeypatch.setattr(reader, "decode_mark", lambda _data: None)
    messages = set()
    for _ in range(2):
        world = FailingLogWorld(LogWorldOptions())
        with pytest.raises(PropertyBroken) as caught:
            world.do(("kill",))
        messages.add(caught.value.message)
    assert len(messages) == 1
    assert "log-1/00000000000000000001.kvsm" in messages.pop()


def test_a_segment_that_is_deleted_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are state (S10): no segment is deleted before the next one is durable."""
    plant(monkeypatch, Retention._delete_oldest, "self.segments[-1].sync_name()", "pass")
    assert "is deleted, but the name of" in _found_by_walk(Property.EVENTS_ARE_STATE)


def test_a_new_life_that_does_not_sync_names_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are state (S10): the newest segment of a killed process may lack a durable name."""
    monkeypatch.setattr(continued, "sync_directory", lambda _path: None)
    assert "is deleted, but the name of" in _found_by_walk(Property.EVENTS_ARE_STATE)


def _found_by_walk(expected: Property) -> str:
    """Return the message of what a walk finds."""
    failure = walk(lambda _random: FailingLogWorld(LIMITED), 2, runs=20).failure
    assert failure is not None
    assert failure.finding.property is expected
    return failure.finding.message


def test_a_segment_whose_name_is_never_synced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress (S9): an idle engine's events become durable."""
    monkeypatch.setattr(SegmentFile, "is_durable_to", lambda segment, offset: segment.synced.offset == offset)
    world = FailingLogWorld(LogWorldOptions(segment_bytes=200))
    for action in (("append", 900), ("flush",), ("open",), ("sync",), ("flush",)):
        assert world.do(action), action
    with pytest.raises(PropertyBroken, match="event 1 is not durable after"):
        world.do(("rest",))


def test_old_segments_are_deleted_within_a_limit_of_bytes() -> None:
    for limited in (False, True):
        world = FailingLogWorld(LIMITED if limited else LogWorldOptions(segment_bytes=200))
        for _ in range(40):
            assert world.do(("append", 300))
            assert world.do(("rest",))
        first = min(path.name for path in world._log.iterdir())
        assert (first != "00000000000000000001.kvsm") == limited
        for action in (("lose_power", 0), ("start",), ("close",)):
            assert world.do(action), action


def test_the_least_limit_holds_the_events_between_two_flushes() -> None:
    """Progress (S9): the writer stops only for a fault of the disk."""
    for segment_bytes in (200, 2_000, 20_000):
        options = LogWorldOptions(segment_bytes=segment_bytes, max_bytes=8_000 + 2 * segment_bytes)
        world, random = FailingLogWorld(options), Random(segment_bytes)
        for _ in range(300):
            world.do(random.choice((*[("append", 300)] * 4, ("flush",), ("sync",), ("open",))))
        assert world.do(("close",))


def test_a_limit_that_holds_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_bytes is 8399; it must be 8,400 or more, or null"):
        LogWorldOptions(segment_bytes=200, max_bytes=8_399)


def test_each_kind_of_log_is_drawn() -> None:
    drawn = [draw_log_options(Random(seed)) for seed in range(200)]
    kinds = {(options.max_bytes is not None, options.long_lives) for options in drawn}
    assert kinds == {(limited, long) for limited in (False, True) for long in (False, True)}
