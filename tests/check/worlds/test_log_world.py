"""The world of a log on a failing disk: lost syncs, and a defect that a fresh seed has found."""

from __future__ import annotations

import pytest

from kvsm.check.worlds.log_world import FailingLogWorld, LogWorldOptions
from kvsm.check.worlds.world import Action
from kvsm.core.log import frames, reader
from kvsm.errors import PropertyBroken

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
