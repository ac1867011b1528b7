"""The contracts of `specs/contracts` are proved, can fail, and are about the real code.

CrossHair proves what is plain ints. Where the code works on packed words or numpy arrays, the contract is
about a plain reference, and here the two are enumerated side by side.
"""

from __future__ import annotations

from itertools import permutations, product
from unittest.mock import patch

import numpy as np
import pytest
from contracts import block, lease, prove, request, transfer, words
from contracts.bugs import BUGS, Bug, forgetful, rewritten
from contracts.runs import merged
from contracts.steps import by_rows
from contracts.tables import PAIRS

from kvsm.copies.pairs import merge_runs
from kvsm.core.ledger import HANDLERS, Ledger
from kvsm.core.ledger.transfers import worker_reported
from kvsm.errors import InvalidEvent
from kvsm.events import OffloadConfig, StorePlanned, TransfersSubmitted, WorkerReported
from kvsm.states import MACHINES, Machine
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.machine import UndefinedStep
from kvsm.states.request import REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS, TransferState
from kvsm.states.words import Codec

CONTRACTS = prove.contracts()
CODECS = {codec.machine.name: codec for codec in (BLOCK_WORDS, TRANSFER_WORDS, LEASE_WORDS, REQUEST_WORDS)}
FAST_PAIR = "lease_compiled"


# Proofs.


QUICK_CONTRACTS = (
    "block.only_what_nobody_holds_is_reused",
    "transfer.it_ends_at_the_last_report",
    "lease.a_writer_is_alone",
    "request.a_load_finds_its_request",
    "tables.lease_compiled",
    "words.unpacking_gives_back_what_was_packed",
    "runs.a_run_copies_its_pairs",
    "paths.an_amount_has_one_cell",
    "tokens.only_the_prompt_is_stored_if_asked",
    "matching.a_hit_is_the_longest_that_is_served",
)
"""One contract of each file that is soon proved, and its first bug. The slow suite has the others."""


def test_every_file_has_a_quick_contract() -> None:
    assert [name.partition(".")[0] for name in QUICK_CONTRACTS] == list(prove.MODULES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK_CONTRACTS else pytest.mark.slow) for name in CONTRACTS],
)
def test_contract_is_confirmed(name: str) -> None:
    assert prove.doubts(CONTRACTS[name]) == []


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair, marks=[] if pair[0].__name__ == FAST_PAIR else pytest.mark.slow, id=pair[0].__name__
        )
        for pair in PAIRS
    ],
)
def test_compiled_table_equals_its_rows(pair: tuple[prove.Function, prove.Function]) -> None:
    """The smallest table in the fast suite, the others in the slow one."""
    assert prove.differences(*pair) == []


QUICK_BUGS = {bug.contract: bug for bug in reversed(BUGS) if bug.contract in QUICK_CONTRACTS}


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            bug,
            marks=[] if bug in QUICK_BUGS.values() else pytest.mark.slow,
            id=f"{bug.contract}: {bug.what}",
        )
        for bug in BUGS
    ],
)
def test_seeded_bug_is_refuted(bug: Bug) -> None:
    with bug.planted():
        assert prove.counterexample(CONTRACTS[bug.contract]) is not None


def test_every_contract_has_a_seeded_bug() -> None:
    assert {bug.contract for bug in BUGS} == set(CONTRACTS)


def test_every_machine_has_its_pair_and_its_contracts() -> None:
    assert {first.__name__ for first, _ in PAIRS} == {f"{name}_compiled" for name in MACHINES}
    assert {name.partition(".")[0] for name in CONTRACTS} >= set(MACHINES)


def test_a_difference_of_two_tables_is_found() -> None:
    pair = next(pair for pair in PAIRS if pair[0].__name__ == FAST_PAIR)
    with patch("kvsm.states.machine.Arc.admits", forgetful):
        assert prove.differences(*pair)


# The prover itself: what is not proved is not taken for proved.


def unmet(count: int) -> int:
    """
    pre: count > 0 and count < 0
    post: _ == count + 1
    """
    return count


def crashes(count: int) -> int:
    """
    pre: count >= 0
    post: True
    """
    return 1 // count


def beyond_the_prover(word: int) -> int:
    """
    pre: 0 <= word < 1 << 31
    post: _ == word
    """
    return (word & 0xFFFF0000) | (word & 0xFFFF)


@pytest.mark.parametrize("function", [unmet, crashes, beyond_the_prover])
def test_what_is_not_confirmed_is_doubted(function: prove.Function) -> None:
    with patch.object(prove, "SECONDS", 0.4):
        assert prove.doubts(function)


def test_an_answer_that_is_missing_is_doubted() -> None:
    with patch.object(prove, "answers", lambda _: iter(())):
        assert prove.doubts(unmet) == ["0 answers to 1 postconditions"]


def test_a_crash_is_no_counterexample() -> None:
    assert prove.counterexample(crashes) is None


# The invariants begin somewhere: what a thing is at first is sound.


def test_initial_states_are_sound() -> None:
    assert block.sound(MACHINES["block"].initial, 0, 0)
    assert lease.sound(MACHINES["lease"].initial, 0)
    assert request.sound(MACHINES["request"].initial, 0)
    most = OffloadConfig(host_blocks=1, device_blocks=1, workers=transfer.WORKERS_LIMIT)
    for workers in (1, 2, most.workers):
        assert transfer.sound(TransferState.PLANNED, workers, 0)


def test_contracts_know_the_limits_of_the_counters() -> None:
    limits = {name: [counter.limit for counter in machine.counters] for name, machine in MACHINES.items()}
    assert limits == {
        "block": [block.COPIES_LIMIT, block.PINS_LIMIT],
        "transfer": [transfer.WORKERS_LIMIT, transfer.WORKERS_LIMIT],
        "lease": [lease.READERS_LIMIT],
        "request": [1],
    }


# Packed words: the hot path's form of a state and its counters.


def check_packing(codec: Codec, state: int, first: np.ndarray, second: np.ndarray) -> None:
    """`encode` equals `words.packed`, and `decode` is its inverse, for whole arrays of counts."""
    counts = (first, second)[: len(codec.limits)]
    word = codec.encode(state, counts)  # type: ignore[arg-type]
    assert (word == words.packed(state, first, second, codec.limits[0] + 1)).all()  # type: ignore[arg-type]
    decoded_state, decoded = codec.decode(word)
    assert (decoded_state == state).all()  # type: ignore[attr-defined]
    assert all((a == b).all() for a, b in zip(decoded, counts, strict=True))  # type: ignore[attr-defined]


def ranges(codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """All values of the first counter and of the second; [0] for a counter that is absent."""
    limits = (*codec.limits, 0)[:2]
    return np.arange(limits[0] + 1), np.arange(limits[1] + 1)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_words_are_packed_as_proved(codec: Codec) -> None:
    """Rule 10: the whole range of each counter, with the least and the greatest values of the other."""
    first, second = ranges(codec)
    for state in codec.machine.states:
        for other in {0, 1, int(second[-1]) // 2, int(second[-1])} & set(second.tolist()):
            check_packing(codec, state, first, np.full_like(first, other))
        for other in {0, 1, int(first[-1]) // 2, int(first[-1])}:
            check_packing(codec, state, np.full_like(second, other), second)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_all_words_are_packed_as_proved(codec: Codec) -> None:
    """The same for every possible word: a billion for a block."""
    first, second = ranges(codec)
    for state in codec.machine.states:
        for some in np.array_split(first, max(1, len(first) * len(second) >> 21)):
            grid = np.meshgrid(some, second, indexing="ij")
            check_packing(codec, state, grid[0], grid[1])


def telling_counts(machine: Machine, place: int) -> list[int]:
    """The counts around every end of every range. No guard tells apart the counts between two of them."""
    limit = machine.counters[place].limit
    ends = {
        end
        for by_state in machine.dense
        for arcs in by_state
        for arc in arcs
        for end in (0, limit, *arc.ranges[place])
    }
    return sorted({n for end in ends for n in (end - 1, end, end + 1) if 0 <= n <= limit})


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_memo_of_words_steps_as_the_rows_read(codec: Codec) -> None:
    """What the hot path looks up equals the rows, refusals included."""
    machine = codec.machine
    counts = [telling_counts(machine, place) for place in range(len(machine.counters))]
    for state, trigger, *held in product(machine.states, machine.triggers, *counts):
        read = by_rows(machine, state, tuple(held), trigger)
        try:
            looked_up = codec.next[trigger][codec.encode(state, tuple(held))]
        except UndefinedStep:
            assert read is None
        else:
            assert read is not None
            assert looked_up == codec.encode(read[0], read[1:])


# Runs: numpy against the plain reference.


def small_jobs() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All jobs of one to three of four host blocks, in any order, and of four in a row, with any device
    blocks."""
    return [
        (devices, hosts)
        for count in range(1, 4)
        for hosts in permutations(range(4), count)
        for devices in product(range(4), repeat=count)
    ] + [(devices, (0, 1, 2, 3)) for devices in product(range(5), repeat=4)]


def check_runs(devices: tuple[int, ...], hosts: tuple[int, ...]) -> None:
    found = merge_runs(np.array(devices), np.array(hosts))
    expected = merged(sorted(zip(devices, hosts), key=lambda pair: pair[1]))
    assert list(zip(*(side.tolist() for side in found))) == expected


def test_runs_are_merged_as_proved() -> None:
    """Correct bytes (S15): `merge_runs` gives the runs of the reference, for every small job."""
    for devices, hosts in small_jobs():
        check_runs(devices, hosts)


def test_a_wrong_merge_of_runs_is_seen() -> None:
    wrong = rewritten(merge_runs, "(device_blocks[1:] - device_blocks[:-1] != 1) | ", "")
    with patch(f"{__name__}.merge_runs", wrong), pytest.raises(AssertionError):
        test_runs_are_merged_as_proved()


# Reports: the ledger counts each worker once.


def check_reports(reports: tuple[tuple[int, bool], ...], workers: int) -> None:
    """Publish after commit (S2), stale reports change nothing (S5), failure is not success (S6): a store
    ends exactly at its last worker's first report; a second one is refused.
    """
    ledger = Ledger(OffloadConfig(host_blocks=1, device_blocks=1, workers=workers))
    ledger.apply(StorePlanned(1, 0, 0, (), (b"key",), (0,), (0,)))
    ledger.apply(TransfersSubmitted(2, 0, 0, (1,)))
    heard: dict[int, bool] = {}
    for worker, good in reports:
        event = WorkerReported(ledger.seq + 1, 0, 0, 1, worker, good)
        if worker in heard or len(heard) == workers:
            with pytest.raises(InvalidEvent):
                ledger.apply(event)
            continue
        heard[worker] = good
        ended = ledger.apply(event)
        assert (ended is not None) == (len(heard) == workers)
    assert ledger.readable(0) == (len(heard) == workers and all(heard.values()))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_reports_are_counted_once_for_each_worker(workers: int) -> None:
    """Every sequence of good and bad reports, one report longer than there are workers."""
    one = list(product(range(workers), (True, False)))
    for reports in product(one, repeat=workers + 1):
        check_reports(reports, workers)


def test_a_report_that_counts_twice_is_seen() -> None:
    wrong = rewritten(worker_reported, "or transfer.reported >> event.worker & 1", "")
    with patch.dict(HANDLERS, {WorkerReported: wrong}), pytest.raises(pytest.fail.Exception):
        test_reports_are_counted_once_for_each_worker(2)
