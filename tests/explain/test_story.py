"""The lives of blocks, keys, requests and transfers, with causes, and why a request missed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_life import (
    CONFIGS,
    OPERATIONS,
    Life,
    Operations,
    key,
    offered_life,
    random_life,
    scene,
    story_life,
)

from examples import examples
from kvsm.core.log import LogReader
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import LogError
from kvsm.events import SkipReason
from kvsm.explain.story import (
    BlockLife,
    KeyLife,
    RequestLife,
    Story,
    StoryLine,
    TransferLife,
    Trust,
    tell,
)
from kvsm.explain.story.names import full_name, key_pattern
from kvsm.ids import render_key

# Stories.


def told(lines: Sequence[StoryLine]) -> list[str]:
    return [f"{one.event} {one.text} [{one.before} -> {one.after}]" for one in lines]


STORED, EVICTED = "STORED(copies=0, pins=0)", "EVICTED(copies=0, pins=0)"


def test_the_life_of_a_block(tmp_path: Path) -> None:
    """The story names the requests that stored and read the block, and the store that evicted it."""
    story_life(tmp_path / "log")
    assert told(list(tell(tmp_path / "log", BlockLife(0))))[:8] == [
        "3 allocated for key 000000010000..0000, from device block 11, by store 3 of request r1 "
        "[FREE(copies=0, pins=0) -> ALLOCATED(copies=0, pins=0)]",
        "4 submitted: store 3 of request r1 [ALLOCATED(copies=0, pins=0) -> STORING(copies=1, pins=0)]",
        "5 worker 0 reports store 3 of request r1: good; the last one: stored, and can be matched "
        f"[STORING(copies=1, pins=0) -> {STORED}]",
        f"8 request r2 matches it (block 1 of 1) [{STORED} -> STORED(copies=0, pins=1)]",
        "9 load 9 of request r2 will read it into device block 15 "
        "[STORED(copies=0, pins=1) -> LOADING(copies=1, pins=0)]",
        "10 submitted: load 9 of request r2 [LOADING(copies=1, pins=0) -> LOADING(copies=1, pins=0)]",
        f"11 worker 0 reports load 9 of request r2: good; the last one: loaded "
        f"[LOADING(copies=1, pins=0) -> {STORED}]",
        f"14 key 000000010000..0000 evicted to make room for store 15 of request r3 [{STORED} -> {EVICTED}]",
    ]


def test_the_life_of_a_key(tmp_path: Path) -> None:
    """Stored, matched, evicted for another request, and missed by a third, with the reason."""
    story_life(tmp_path / "log")
    lines = told(list(tell(tmp_path / "log", KeyLife("00000001"))))
    assert [line.split()[0] for line in lines] == ["3", "4", "5", "8", "9", "10", "11", "14", "18"]
    assert lines[0].endswith("[not on the host -> slot 0 ALLOCATED(copies=0, pins=0)]")
    assert lines[-2].endswith(f"[slot 0 {STORED} -> not on the host]")
    assert lines[-1] == (
        "18 request r4 matches nothing (of 1 block asked, the host serves 0); it misses key "
        "000000010000..0000: "
        "evicted at event 14 to make room for store 15 of request r3 [not on the host -> not on the host]"
    )


def test_the_life_of_a_request(tmp_path: Path) -> None:
    """From its first match to its release, and why it missed a key."""
    story_life(tmp_path / "log")
    assert told(list(tell(tmp_path / "log", RequestLife("r2")))) == [
        "8 request r2 matches slot 0 (of 2 blocks asked, the host serves 1); it misses key "
        "000000070000..0000: "
        "never stored [not there -> MATCHED]",
        "9 load 9 of request r2 is planned: slot 0 to device block 15 [MATCHED -> LOADING]",
        "10 submitted: load 9 of request r2 [LOADING -> LOADING]",
        "11 worker 0 reports load 9 of request r2: good; the last one: loaded [LOADING -> RUNNING]",
        "12 request r2 finishes [RUNNING -> RELEASED]",
    ]
    assert told(list(tell(tmp_path / "log", RequestLife("r3"))))[:2] == [
        "14 slots 1, 0 (2), keys 000000020000..0000 to 000000010000..0000 (2), evicted to make "
        "room for store 15 of "
        "request r3 [not there -> not there]",
        "15 store 15 of request r3 is planned: keys 000000030000..0000 to 000000040000..0000 (2), "
        "device blocks 13..14 (2) to slots 1, 0 (2) [not there -> not there]",
    ]
    assert told(list(tell(tmp_path / "log", RequestLife("r4")))) == [
        "18 request r4 matches nothing (of 1 block asked, the host serves 0); it misses key "
        "000000010000..0000: "
        "evicted at event 14 to make room for store 15 of request r3 [not there -> RUNNING]",
        "19 request r4 is aborted [RUNNING -> RELEASED]",
    ]


def test_a_request_offers_again_what_a_store_failed_to_keep(tmp_path: Path) -> None:
    life = Life(tmp_path / "log", workers=1)
    life.core.arrive("r1")
    job = life.core.prepare_store("r1", [key(0), key(1)], [0, 1]).job
    assert job is not None
    life.core.advance([("r1", (2,), (2,))])
    life.core.submit([job.transfer])
    life.core.report(job.transfer, 0, False)
    life.core.advance([("r1", (0,), (2,))])
    life.close()
    *_, last = tell(tmp_path / "log", RequestLife("r1"))
    assert last.text == "request r1: the store of block 0 failed; it is to be offered again"


def test_the_life_of_a_transfer(tmp_path: Path) -> None:
    """From what made room for it to the report that ended it."""
    story_life(tmp_path / "log")
    lines = told(list(tell(tmp_path / "log", TransferLife(15))))
    assert [line.split(" [")[1] for line in lines] == [
        "not planned -> not planned]",
        "not planned -> PLANNED]",
        "PLANNED -> SUBMITTED]",
        "SUBMITTED -> COMPLETED]",
    ]


def test_how_far_the_blocks_of_a_request_were_stored(tmp_path: Path) -> None:
    """Its cursors by group, why a block was not stored, and its stores."""
    offered_life(tmp_path / "log")
    lines = told(list(tell(tmp_path / "log", RequestLife("r0"))))
    assert lines == [
        "2 request r0 arrives [not there -> NEW]",
        "5 offered by request r0, not stored: keys 000000000000..0000 to 000000010000..0000 (2) "
        "(offered too seldom) "
        "[NEW -> NEW]",
        "6 request r0: blocks 0..1 of group 0 offered, and not settled yet; "
        "block 0 of group 1 offered, and not settled yet [NEW -> NEW]",
        "8 store 8 of request r0 is planned: keys 000000000000..0000 to 000000010000..0000 (2), "
        "device blocks 0..3 (4) to slots 0..1 (2) [NEW -> NEW]",
        "9 submitted: store 8 of request r0 [NEW -> NEW]",
        "10 worker 0 reports store 8 of request r0: good; the last one: stored, and can be matched "
        "[NEW -> NEW]",
        "11 request r0: blocks 0..1 of group 0 settled; block 0 of group 1 settled; "
        "block 1 of group 1 offered, and not settled yet [NEW -> NEW]",
        "12 store 12 of request r0 is planned: key 000000020000..0000, device blocks 4..5 (2) to slot 2 "
        "[NEW -> NEW]",
        "13 submitted: store 12 of request r0 [NEW -> NEW]",
        "15 worker 0 reports store 12 of request r0: good; the last one: stored, and can be matched "
        "[NEW -> NEW]",
        "16 request r0 is preempted; its blocks are offered again [NEW -> NEW]",
        "39 request r0 finishes [NEW -> RELEASED]",
    ]
    texts = [line.text for line in tell(tmp_path / "log", RequestLife("r1"))]
    assert texts[1:3] == [
        "offered by request r1, not stored: key 000000090000..0000 (offered too seldom)",
        "request r1: block 0 offered, and not settled yet",
    ]
    assert "reset: epoch 1 begins; the blocks of request r1 are offered again" in texts
    skipped = (
        "offered by request r1, not stored: key 000000000000..0000 (brought by a load of an older epoch)"
    )
    assert skipped in texts


def test_which_part_of_a_block_is_loaded(tmp_path: Path) -> None:
    """With two device blocks a slot: both of one slot, and the second one of another."""
    offered_life(tmp_path / "log")
    texts = [[line.text for line in tell(tmp_path / "log", BlockLife(slot))] for slot in (0, 1)]
    assert (
        "allocated for key 000000010000..0000, from device blocks 2..3 (2), by store 8 of request r0"
        in texts[1]
    )
    assert "load 18 of request r1 will read parts 0..1 (2) of it into device blocks 6..7 (2)" in texts[0]
    assert "load 18 of request r1 will read part 1 of it into device block 8" in texts[1]
    planned = next(line.text for line in tell(tmp_path / "log", TransferLife(18)))
    assert planned == (
        "load 18 of request r1 is planned: parts 0..1, 3 (3) of slots 0..1 (2) to device blocks 6..8 (3)"
    )


def test_what_a_lost_transfer_takes_with_it(tmp_path: Path) -> None:
    """A lost store retires its slots, a lost load also its device blocks."""
    offered_life(tmp_path / "log")
    ends = [list(tell(tmp_path / "log", TransferLife(id)))[-1] for id in (27, 35)]
    assert told(ends) == [
        "30 store 27 of request r2 is given up: a worker has not reported since tick 1; "
        "its slots are never used again [SUBMITTED -> LOST]",
        "38 load 35 of request r3 is given up: a worker has not reported since tick 2; "
        "its slots and device blocks are never used again [SUBMITTED -> LOST]",
    ]


def test_a_rank_that_the_configuration_lacks_is_told(tmp_path: Path) -> None:
    """Its reports look late: with one worker, the first report has ended the transfer."""
    life = Life(tmp_path / "log", host_blocks=3, workers=1)
    job = life.core.store((("r1", 1),), [key(1)], [1]).job
    assert job is not None
    life.ended(job)
    life.core.report(job.transfer, 1, True)
    life.close()
    assert list(tell(tmp_path / "log", TransferLife(job.transfer)))[-1].text == (
        f"a report of worker 1 on transfer {job.transfer} is rejected: no such worker; "
        "the configuration has 1 worker"
    )


def test_a_store_is_told_to_each_of_its_owners(tmp_path: Path) -> None:
    """With its own keys. An eviction names the store that it made room for, and the owners."""
    life = Life(tmp_path / "log", host_blocks=3, workers=1, defer_ticks=0)
    first = life.core.store((("r1", 1), ("r2", 2)), [key(1), key(2), key(3)], [1, 2, 3]).job
    life.core.store((("r2", 1), ("r1", 1)), [key(1), key(4)], [7, 3])
    life.ended(first)
    life.ended(life.core.store((), [key(5)], [5]).job)
    life.core.store((("r4", 1), ("r5", 1)), [key(6), key(7)], [6, 7])
    life.close()
    texts = {
        name: [line.text for line in tell(tmp_path / "log", RequestLife(name))] for name in ("r1", "r2", "r5")
    }
    assert texts["r1"][0].startswith(
        "store 2 of requests r1, r2 (request r1: key 000000010000..0000) is planned"
    )
    assert texts["r2"][0].startswith(
        "store 2 of requests r1, r2 (request r2: keys 000000020000..0000 to 000000030000..0000 "
        "(2)) is planned"
    )
    assert (
        texts["r1"][1] == "offered by request r1, not stored: key 000000040000..0000 (device block in flight)"
    )
    assert texts["r2"][1] == "offered by request r2, not stored: key 000000010000..0000 (key in flight)"
    assert [line.text for line in tell(tmp_path / "log", KeyLife(key(3).hex()))][-1] == (
        "key 000000030000..0000 evicted to make room for store 8 of no request"
    )
    assert texts["r5"][0].endswith("evicted to make room for store 12 of requests r4, r5")


def why_missed(life: Life, wanted: bytes, log: Path) -> str:
    """The reason that a new request is given for missing a key."""
    life.core.match("asker", [wanted])
    life.flush()
    (line,) = tell(log, RequestLife("asker"))
    return line.text.split(": ", 1)[1]


def test_a_copy_that_failed_is_told_with_the_error_of_its_worker(tmp_path: Path) -> None:
    """The error may hold what a terminal acts on; the line leaves it to the output to show it harmless."""
    life = scene(log=tmp_path / "log")
    store = life.core.ledger.seq - 1
    life.core.report(store, 0, False, "CUDA error 719")
    life.flush()
    told_last = list(tell(tmp_path / "log", TransferLife(store)))[-1].text
    assert f"worker 0 reports store {store} of request r2: failed (CUDA error 719); the last" in told_last


def test_a_request_is_found_as_its_client_knows_it(tmp_path: Path) -> None:
    """vLLM's server appends a hyphen and some characters to a client's name. Other names begin alike."""
    life = scene(log=tmp_path / "log")
    life.core.match("cmpl-4-0a1b2c3d", [key(2)])
    life.core.match("cmpl-42", [key(2)])
    life.flush()
    assert full_name(LogReader(tmp_path / "log"), "cmpl-4") == "cmpl-4-0a1b2c3d"


def test_a_request_is_not_told_the_story_of_one_whose_id_goes_on(tmp_path: Path) -> None:
    """`r1` and `r1-2` are two requests, and each part of a story means one of them."""
    life = Life(tmp_path / "log", host_blocks=8, workers=1)
    core = life.core
    for name in ("r1", "r1-2"):
        core.arrive(name)
    core.skip((("r1", 1), ("r1-2", 1)), [key(1), key(2)], SkipReason.DRAINING)
    core.advance([("r1", (0,), (2,)), ("r1-2", (0,), (1,))])
    life.ended(core.store((("r1", 1), ("r1-2", 1)), [key(1), key(2)], [1, 2]).job)
    core.match("r1-2", [key(5)])
    core.finish("r1-2")
    life.close()
    lines = told(list(tell(tmp_path / "log", RequestLife("r1"))))
    assert lines[1:3] == [
        f"4 offered by request r1, not stored: key 000000010000..0000 ({SkipReason.DRAINING}) [NEW -> NEW]",
        "5 request r1: blocks 0..1 offered, and not settled yet [NEW -> NEW]",
    ]
    assert not any("RELEASED" in line or "matches nothing" in line for line in lines)


def test_all_that_a_request_shares_with_others_is_told(tmp_path: Path) -> None:
    """Its part of a store, its cursors and its end."""
    life = Life(tmp_path / "log", host_blocks=8, workers=1)
    name, core = "cmpl-4-0a1b2c3d", life.core
    core.arrive(name)
    core.skip(((name, 1), ("other", 1)), [key(1), key(2)], SkipReason.DRAINING)
    core.advance([(name, (0,), (2,))])
    life.ended(core.store(((name, 1), ("other", 1)), [key(1), key(2)], [1, 2]).job)
    core.reset()
    core.advance([(name, (1,), (2,))])
    core.preempt(name)
    core.finish(name)
    life.close()
    lines = told(list(tell(tmp_path / "log", RequestLife(name))))
    assert len(lines) == 10
    assert lines[-1].endswith("-> RELEASED]")


def test_a_miss_because_the_store_is_in_flight(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log")
    store = life.core.ledger.seq - 1
    assert why_missed(life, key(2), tmp_path / "log") == f"store {store} of request r2 is still in flight"


def test_a_miss_because_the_store_failed(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log")
    store = life.core.ledger.seq - 1
    life.core.report(store, 0, False)
    expected = f"store {store} of request r2 failed at event {life.core.ledger.seq}"
    assert why_missed(life, key(2), tmp_path / "log") == expected


def test_a_miss_because_of_an_older_epoch(tmp_path: Path) -> None:
    """What was loaded before a reset is not stored after it."""
    life = scene(log=tmp_path / "log")
    life.ended(life.core.prepare_load("r1", [9, 10]))
    life.core.reset()
    reset = life.core.ledger.seq
    assert life.core.prepare_store("r1", [key(0)], [9]).job is None
    assert why_missed(life, key(0), tmp_path / "log") == (
        f"reset at event {reset}; offered at event {reset + 1} and skipped "
        "(brought by a load of an older epoch) since"
    )


def test_a_miss_because_a_load_failed(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log")
    load = life.ended(life.core.prepare_load("r1", [9, 10]), good=False)
    expected = f"load {load} of request r1 failed at event {life.core.ledger.seq}"
    assert why_missed(life, key(0), tmp_path / "log") == expected


def test_a_miss_because_of_a_reset_and_the_pool_being_full_since(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log", host_blocks=4)
    life.core.reset()
    reset = life.core.ledger.seq
    assert life.core.prepare_store("r5", [key(8), key(9), key(0)], [8, 9, 10]).deferred == (2,)
    skipped = life.core.ledger.seq - 1
    assert why_missed(life, key(0), tmp_path / "log") == (
        f"reset at event {reset}; offered at event {skipped} and skipped (pool full) since"
    )


def test_a_miss_because_the_transfer_was_cancelled_or_lost(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log", host_blocks=8)
    plan = life.core.prepare_store("r6", [key(6)], [6]).job
    assert plan is not None
    life.core.cancel(plan.transfer)
    cancelled = life.core.ledger.seq
    life.core.lose(cancelled - 3)
    life.core.match("other", [key(2)])
    life.flush()
    (line,) = tell(tmp_path / "log", RequestLife("other"))
    assert line.text.endswith(f": store {cancelled - 3} of request r2 was lost at event {cancelled + 1}")
    assert why_missed(life, key(6), tmp_path / "log") == (
        f"store {plan.transfer} of request r6 was cancelled at event {cancelled}"
    )


def test_a_miss_of_what_was_before_the_log_is_not_called_never(tmp_path: Path) -> None:
    """A log that begins with a snapshot has no earlier events."""
    life = random_life(10, 800, tmp_path / "log", writer={"segment_bytes": 2000, "max_bytes": 10000})
    # Asking writes to the log, and retention may drop another segment then: look at the oldest afterwards.
    answer = why_missed(life, key(999), tmp_path / "log")
    oldest = LogReader(tmp_path / "log").head.seq + 1
    assert oldest > 1
    assert answer.startswith(f"not stored since event {oldest}")


@settings(deadline=None, max_examples=examples(40))
@given(OPERATIONS, CONFIGS)
def test_every_story_is_a_chain_of_states(operations: Operations, config: dict[str, Any]) -> None:
    """Each line begins in the state in which the line before it ended, so no event is left out."""
    with TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        Life(log, **config).drive(operations).drain().close()
        for target in (*map(BlockLife, range(4)), RequestLife("r1"), KeyLife("000003e8")):
            lines = list(tell(log, target))
            for earlier, later in pairwise(lines):
                if earlier.after != "RELEASED":
                    assert later.before == earlier.after, (target, earlier, later)


def test_groups_of_a_hybrid_model_are_told_apart(tmp_path: Path) -> None:
    """Keys of two KV cache groups share the hash. What is shown of each finds this key alone."""
    hash_of_block = bytes(range(32))
    full, sliding = hash_of_block + group_suffix(0), hash_of_block + group_suffix(1)
    assert (render_key(full), render_key(sliding)) == ("000102030405..0000", "000102030405..0001")
    life = Life(tmp_path / "log", workers=1)
    life.stored("r1", [full, sliding], [1, 2])
    life.close()
    for slot, one in enumerate((full, sliding)):
        planned, *_ = tell(tmp_path / "log", KeyLife(render_key(one)))
        assert f"key {render_key(one)}, from device block {slot + 1}," in planned.text
    both, *_ = tell(tmp_path / "log", KeyLife("000102030405.."))
    assert both.after.count("ALLOCATED") == 2


@given(st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=40))
def test_a_key_is_found_by_what_is_shown_of_it(one: bytes, other: bytes) -> None:
    """And another key only if it is shown alike."""
    pattern = key_pattern(render_key(one))
    assert pattern.fits(one)
    assert not pattern.fits(other) or render_key(other) == render_key(one) or len(one) < 10


def test_a_request_is_told_that_what_it_waits_for_was_submitted(tmp_path: Path) -> None:
    """The transfer is another request's, so its owners do not name the one that waits."""
    life = Life(tmp_path / "log", workers=1)
    plan = life.core.prepare_store("r1", [key(1)], [1]).job
    assert plan is not None
    life.core.match("r2", [key(1)])
    life.core.submit([plan.transfer])
    life.close()
    *_, line = tell(tmp_path / "log", RequestLife("r2"))
    assert line.text == f"submitted: store {plan.transfer} of request r1"


# Times.


def test_each_line_tells_when_it_was_and_how_long_after_the_last(tmp_path: Path) -> None:
    """So that it can be laid beside the engine's own log, and a wait is seen."""
    now = [1_000_000_000]
    life = Life(tmp_path / "log", workers=1, defer_ticks=9, clock_ns=lambda: now[0])
    core = life.core
    core.arrive("r1")
    now[0] += 2_000_000_000
    plan = core.prepare_store("r0", [key(1)], [1]).job
    assert plan is not None
    core.submit([plan.transfer])
    core.match("r1", [key(1)])
    for _ in range(3):
        core.tick()
        core.end_step()
    now[0] += 610_000_000
    core.report(plan.transfer, 0, True)
    now[0] += 5
    core.end_step()
    life.kill()
    story = Story(tmp_path / "log", RequestLife("r1"), Trust())
    lines = [(one.kind, one.after_start_ns, one.gap_steps, one.gap_ns, one.waited) for one in story]
    assert lines == [
        ("RequestArrived", 0, 0, 0, False),
        ("RequestDeferred", 2_000_000_000, 0, 2_000_000_000, False),
        ("WorkerReported", 2_610_000_000, 3, 610_000_000, True),
    ]
    end = story.end()
    assert end is not None
    assert (end.kind, end.text) == ("", "the log ends here, and request r1 has not ended")
    assert (end.after_start_ns, end.before, end.after) == (2_610_000_005, "NEW", "NEW")


def test_a_life_that_is_over_has_no_line_for_the_end_of_the_log(tmp_path: Path) -> None:
    story_life(tmp_path / "log")
    for life in (RequestLife("r2"), TransferLife(15), BlockLife(0), KeyLife("00000003")):
        story = Story(tmp_path / "log", life, Trust())
        assert list(story)
        assert story.end() is None


def test_a_slot_that_the_pool_does_not_have_is_refused(tmp_path: Path) -> None:
    story_life(tmp_path / "log")
    with pytest.raises(LogError, match="there is no slot 2; the pool has 2"):
        list(tell(tmp_path / "log", BlockLife(2)))
