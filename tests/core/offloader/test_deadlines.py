"""`TransferDeadlines`: when the time of a transfer is up, against the rule applied to each transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvsm.events import Direction
from kvsm.vllm.deadlines import TransferDeadlines

TIMEOUT_S = 10.0

Act = tuple[str, Any]


class Rig:
    """Deadlines with a clock, and a record of all that happened."""

    def __init__(self, most_steps: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        self.now = 0.0
        self.deadlines = TransferDeadlines(timeout_s, most_steps, lambda: self.now)
        self.submitted_at: dict[int, float] = {}
        self.direction: dict[int, Direction] = {}
        self.ended_at: dict[int, float] = {}
        self.live: list[int] = []

    def begin(self, direction: Direction) -> int:
        transfer = len(self.submitted_at) + 1
        self.submitted_at[transfer], self.direction[transfer] = self.now, direction
        self.live.append(transfer)
        self.deadlines.began(transfer, direction)
        return transfer

    def end(self, transfer: int) -> None:
        self.live.remove(transfer)
        self.ended_at[transfer] = self.now
        self.deadlines.ended(transfer)

    def step(self) -> list[int]:
        given_up = self.deadlines.overdue()
        for transfer in given_up:
            self.live.remove(transfer)
        return given_up

    def steps(self, times: int = 3) -> list[int]:
        return [transfer for _ in range(times) for transfer in self.step()]

    def overdue(self) -> list[int]:
        """The rule: since its submission, and since the last end of an earlier transfer of its direction."""
        found = []
        for transfer in self.live:
            earlier = [
                ended
                for other, ended in self.ended_at.items()
                if other < transfer and self.direction[other] is self.direction[transfer]
            ]
            began = max([self.submitted_at[transfer], *earlier])
            if self.now - began >= TIMEOUT_S:
                found.append(transfer)
        return found


ACTS: st.SearchStrategy[Sequence[Act]] = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(Direction)),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("pass"), st.sampled_from([1.0, 3.0, 7.0, 25.0])),
        st.tuples(st.just("steps"), st.just(0)),
    ),
    max_size=60,
)


@given(ACTS)
def test_a_transfer_is_given_up_when_it_is_overdue_and_only_then(acts: Sequence[Act]) -> None:
    """Progress (S9): with enough steps, exactly the overdue ones are given up, each direction in order."""
    rig = Rig()
    for kind, value in acts:
        if kind == "begin":
            rig.begin(value)
        elif kind == "end" and rig.live:
            rig.end(rig.live[value % len(rig.live)])
        elif kind == "pass":
            rig.now += value
        elif kind == "steps":
            expected = rig.overdue()
            assert sorted(rig.steps()) == expected
            assert rig.overdue() == []


def test_a_queue_that_moves_loses_nothing() -> None:
    """A hundred stores queue, and one ends every nine seconds: the last one is fifteen minutes old then."""
    rig = Rig()
    stores = [rig.begin(Direction.STORE) for _ in range(100)]
    for store in stores:
        rig.now += 9
        assert rig.steps() == []
        rig.end(store)


def test_what_overtakes_a_lost_transfer_does_not_save_it() -> None:
    rig = Rig()
    lost = rig.begin(Direction.LOAD)
    for _ in range(12):
        rig.now += 1
        rig.end(rig.begin(Direction.LOAD))
    assert rig.steps() == [lost]


def test_a_rank_that_reports_nothing_more_loses_all_at_once() -> None:
    rig = Rig()
    silent = [rig.begin(direction) for direction in Direction for _ in range(50)]
    rig.now += TIMEOUT_S
    assert rig.step() == []
    assert sorted(rig.step()) == silent


def test_steps_in_flight_may_still_bring_the_report() -> None:
    """The engine stood still. The report comes with the output of a step, while more steps are scheduled."""
    rig = Rig(most_steps=2)
    late = rig.begin(Direction.LOAD)
    rig.now += 100 * TIMEOUT_S
    assert rig.steps(2) == []
    rig.end(late)
    assert rig.steps(9) == []
    lost = rig.begin(Direction.LOAD)
    rig.now += TIMEOUT_S
    assert (rig.steps(2), rig.step()) == ([], [lost])


def test_the_steps_of_one_overdue_transfer_do_not_count_for_the_next() -> None:
    """The queue has moved, or is empty, since they were counted."""
    rig = Rig(most_steps=2)
    first, second = rig.begin(Direction.LOAD), rig.begin(Direction.LOAD)
    rig.now += TIMEOUT_S
    assert rig.steps(2) == []
    rig.end(first)
    assert rig.step() == []
    rig.now += TIMEOUT_S
    assert rig.steps(2) == []
    rig.end(second)
    third = rig.begin(Direction.LOAD)
    rig.now += TIMEOUT_S
    assert (rig.steps(2), rig.step()) == ([], [third])


def test_without_a_bound_nothing_is_kept() -> None:
    rig = Rig(timeout_s=0)
    rig.begin(Direction.STORE)
    rig.now += 1e9
    assert rig.steps() == []
    assert not any(queue.submitted_at for queue in rig.deadlines._queues.values())
