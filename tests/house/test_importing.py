"""Blocks that come to the host from elsewhere than the device: planned, evicted for, reported and told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from core_life import begin_store, keys, kinds, new_core, store
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsm
from examples import examples
from kvsm.cli import main
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.log import LogReader
from kvsm.core.log.frames import segment_paths
from kvsm.core.offloader import LookupResult, Offloader
from kvsm.errors import InvalidEvent, WrongArgument
from kvsm.events import OffloadConfig, SkipReason, StorePlanned
from kvsm.explain.metrics import Metrics
from kvsm.explain.story import BlockLife, RequestLife, Story, TransferLife, Trust
from kvsm.ids import to_list
from kvsm.testing import assert_at_rest, assert_replays, assert_sound, assert_verifies
from kvsm.tiers.hand_over.leases import LeaseEnd

SOURCE = "engine p-1"


def import_all(core: Offloader, names: list[bytes], good: bool = True) -> tuple[bytes, ...]:
    """Import these keys for request r, to the end. Returns the keys that were copied."""
    prepared = core.import_blocks((("r", len(names)),), names, SOURCE)
    if prepared.job is not None:
        core.submit([prepared.job.transfer])
        for worker in range(core.config.workers):
            core.report(prepared.job.transfer, worker, good)
    return prepared.keys


def test_an_import_is_readable_when_every_rank_has_copied_it_and_not_before() -> None:
    """Publish after commit (S2)."""
    core, log = new_core(workers=2)
    job = core.import_blocks((("r", 3),), keys(3), SOURCE).job
    assert job is not None
    assert (to_list(job.device_blocks), to_list(job.host_blocks)) == ([], [0, 1, 2])
    core.submit([job.transfer])
    core.complete_store(job.transfer, 1)
    assert core.lookup(keys(1)[0]) is LookupResult.HIT_PENDING
    core.complete_store(job.transfer, 0)
    assert core.match("r", keys(3)).hits == 3
    core.finish("r")
    assert_at_rest(core.ledger)
    assert_verifies(log)


def test_what_the_host_has_is_not_imported_and_not_evicted_for_the_rest() -> None:
    """No doubled store (S13): a resident key is touched, and one that is being stored is left alone."""
    core, _ = new_core(host_blocks=4)
    store(core, "q", keys(2))
    begin_store(core, "q", keys(1, "flying"), 5)
    wanted = [*keys(2), *keys(1, "flying"), *keys(3, "new")]
    assert import_all(core, wanted) == (keys(1, "new")[0],)
    assert core.lookup(keys(1)[0]) is LookupResult.HIT


def test_an_import_without_room_brings_a_shorter_prefix_and_says_so() -> None:
    core, log = new_core(host_blocks=2)
    assert import_all(core, keys(5)) == tuple(keys(2))
    assert log[-1].kind == "WorkerReported"
    skipped = [event for event in log if event.kind == "StoreSkipped"]
    assert [(event.reason, event.keys) for event in skipped] == [(SkipReason.POOL_FULL, tuple(keys(5)[2:]))]


def test_an_import_evicts_what_the_policy_chooses() -> None:
    core, log = new_core(host_blocks=2)
    store(core, "q", keys(2, "old"))
    assert import_all(core, keys(1)) == tuple(keys(1))
    assert kinds(log)[-4:] == ["BlocksEvicted", "StorePlanned", "TransfersSubmitted", "WorkerReported"]


def test_a_failed_import_leaves_nothing() -> None:
    """Failure is not success (S6)."""
    core, log = new_core()
    import_all(core, keys(3), good=False)
    assert core.match("r", keys(3)).hits == 0
    assert_verifies(log)


def test_a_reset_quarantines_an_import_until_its_copy_has_ended() -> None:
    """No reuse in flight (S3), no stale data (S14): the partner's bytes may still arrive."""
    core, log = new_core(host_blocks=2)
    job = core.import_blocks((), keys(2), SOURCE).job
    assert job is not None
    core.submit([job.transfer])
    assert not core.reset()
    assert core.prepare_store("q", keys(1, "q"), [0]).job is None
    core.complete_store(job.transfer)
    assert core.lookup(keys(1)[0]) is LookupResult.MISS
    assert core.prepare_store("q", keys(1, "q"), [0]).job is not None
    assert_verifies(log)


def test_an_import_that_is_never_reported_retires_its_slots_and_no_device_block() -> None:
    core, log = new_core(host_blocks=2)
    job = core.import_blocks((), keys(1), SOURCE).job
    assert job is not None
    core.submit([job.transfer])
    core.lose(job.transfer)
    assert core.prepare_store("q", keys(2, "q"), [0, 1]).keys == tuple(keys(1, "q"))
    assert_sound(core.ledger)
    assert_verifies(log)


@settings(max_examples=examples(15), deadline=None)
@given(
    lives=st.lists(
        st.tuples(
            st.sampled_from(["store", "import", "load", "reset"]), st.sampled_from("abc"), st.booleans()
        ),
        max_size=12,
    ),
    chunk=st.sampled_from([1, 2]),
)
def test_imports_among_stores_loads_and_resets_keep_every_property(
    lives: list[tuple[str, str, bool]], chunk: int
) -> None:
    """The log verifies and replays to the same state, and a snapshot with an import in flight is restored."""
    core, log = new_core(host_blocks=5, workers=2, blocks_per_chunk=chunk)
    for what, prompt, good in lives:
        names = keys(3, prompt)
        if what == "store":
            job = core.prepare_store(prompt, names, range(3 * chunk)).job
        elif what == "import":
            job = core.import_blocks(((prompt, 3),), names, SOURCE).job
        elif what == "load" and core.match(prompt, names).hits == 3:
            job = core.prepare_load(prompt, range(6, 6 + 3 * chunk))
        else:
            job = None
            core.reset() if what == "reset" else core.finish(prompt)
        assert_sound(core.ledger)
        if job is None:
            continue
        core.submit([job.transfer])
        core.report(job.transfer, 0, True)
        restored = restore(snapshot(core.ledger))
        assert snapshot(restored) == snapshot(core.ledger)
        core.report(job.transfer, 1, good)
        core.end_step()
    for prompt in "abc":
        core.finish(prompt)
    assert_at_rest(core.ledger)
    assert_replays(log, core.ledger)
    assert_verifies(log)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (((), (b"x",), (0,), (0,), SOURCE), "a store from elsewhere names slots"),
        (((), (), (), (), SOURCE), "a store from elsewhere names slots"),
        (((), (b"x",), (0,), ()), "a plan names a chunk of device blocks for each slot"),
    ],
)
def test_a_store_names_device_blocks_or_another_source(fields: tuple[object, ...], message: str) -> None:
    core, _ = new_core()
    with pytest.raises(InvalidEvent, match=message):
        core.ledger.apply(StorePlanned(2, 0, 0, *fields))  # type: ignore[arg-type]


def test_an_import_says_where_its_bytes_come_from() -> None:
    core, _ = new_core()
    with pytest.raises(WrongArgument, match="source"):
        core.import_blocks((), keys(1), "")


def test_readers_of_a_log_are_told_of_the_other_source(tmp_path: Path) -> None:
    """`kvsm show` names the engine, where it would name device blocks."""
    with Offloader.open(OffloadConfig(host_blocks=8, device_blocks=8), tmp_path / "log") as core:
        import_all(core, keys(2))
    told = [line.text for line in Story(LogReader(tmp_path / "log"), TransferLife(2), Trust())]
    assert told[0].startswith("store 2 of request r is planned: keys ")
    assert told[0].endswith(", copied from engine p-1 to slots 0..1 (2)")
    [line] = [line.text for line in Story(LogReader(tmp_path / "log"), BlockLife(1), Trust())][:1]
    assert line.endswith("from engine p-1, by store 2 of request r")


def hand_over(core: Offloader, name: str, end: LeaseEnd) -> None:
    """Hold two slots for another engine, until the hand-over ends in this way."""
    core.pin(name, [0, 1], None, 0, 0, 0)
    core.finish(name, aborted=end is LeaseEnd.EXPIRED, hand_over=end.value)


@pytest.fixture
def both_ways(tmp_path: Path) -> Path:
    """A log of four imports (two good, one failed, one lost) and four hand-overs (two taken)."""
    config = OffloadConfig(host_blocks=16, device_blocks=8, block_tokens=16)
    with Offloader.open(config, tmp_path / "log") as core:
        for place, good in enumerate((True, False, True)):
            core.arrive(f"r{place}")
            import_for(core, f"r{place}", keys(2 + place, f"p{place}"), good)
            core.finish(f"r{place}")
        lost = core.import_blocks((), keys(1, "lost"), "engine p-2").job
        assert lost is not None
        core.submit([lost.transfer])
        core.lose(lost.transfer)
        for number, end in enumerate((LeaseEnd.TAKEN, LeaseEnd.EXPIRED, LeaseEnd.TAKEN, LeaseEnd.NOT_NEEDED)):
            hand_over(core, f"hand-over-{number}-of-q", end)
    return tmp_path / "log"


def import_for(core: Offloader, request: str, names: list[bytes], good: bool) -> None:
    """Import these keys for a request, to the end."""
    job = core.import_blocks(((request, len(names)),), names, SOURCE).job
    assert job is not None
    core.submit([job.transfer])
    core.report(job.transfer, 0, good, "" if good else "the prefill engine did not hold the blocks")


def test_metrics_count_blocks_of_other_engines_and_hand_overs_apart(both_ways: Path) -> None:
    """They are among the stored blocks, the ended transfers and the requests, and have their own counters."""
    values = Metrics.of(LogReader(both_ways)).values()
    assert values["blocks_imported"] == values["blocks_stored"] == 2 + 4
    assert {end: n for end, n in values["imports_ended"].items() if n} == {
        "completed": 2,
        "failed": 1,
        "lost": 1,
    }
    assert {end: n for end, n in values["hand_overs"].items() if n} == {
        "taken": 2,
        "not needed": 1,
        "expired": 1,
    }
    assert values["requests"] == {"finished": 6, "aborted": 1}
    assert values["matches"] == {"hit": 0, "miss": 0}


def test_tables_name_the_engine_that_blocks_came_from(both_ways: Path) -> None:
    with kvsm.open(both_ways) as log:
        found = [(row.source, row.outcome) for row in log.transfers()]
    assert found == [
        (SOURCE, "completed"),
        (SOURCE, "failed"),
        (SOURCE, "completed"),
        ("engine p-2", "lost"),
    ]


def test_a_report_tells_what_came_and_what_went(both_ways: Path) -> None:
    told = CliRunner().invoke(main, ["report", str(both_ways)]).output
    assert "hand-overs to other engines: 2 taken, 1 not needed, 1 given up" in told
    figures = json.loads(CliRunner().invoke(main, ["report", str(both_ways), "--json"]).output)
    assert figures["hand_overs"] == {"taken": 2, "not_needed": 1, "given_up": 1, "held": 0}
    ends: Counter[str] = Counter()
    for one in figures["elsewhere"]:
        assert one["direction"] == "store"
        assert f"copied from {one['place']}: {one['blocks']} block" in told
        ends.update(one["ended"])
    assert [one["place"] for one in figures["elsewhere"]] == ["engine p-1", "engine p-2"]
    assert sum(one["blocks"] for one in figures["elsewhere"]) == 6
    assert ends == {"completed": 2, "failed": 1, "lost": 1}


def test_a_report_of_an_engine_without_a_partner_says_nothing_of_hand_overs(tmp_path: Path) -> None:
    with Offloader.open(OffloadConfig(host_blocks=8, device_blocks=8), tmp_path / "log") as core:
        store(core, "r", keys(2))
    told = CliRunner().invoke(main, ["report", str(tmp_path / "log")]).output
    assert "hand-over" not in told
    assert "other engines" not in told


def test_why_names_the_engine_that_blocks_came_from(both_ways: Path) -> None:
    """Of a request, of a transfer, of a key and of a slot."""

    def why(*of: str) -> str:
        return " ".join(CliRunner().invoke(main, ["why", str(both_ways), *of]).output.split())

    with kvsm.open(both_ways) as log:
        first, failed, *_ = [row.transfer for row in log.transfers()]
    assert f"Store {first} copied 2 slots from engine p-1 for it; it completed" in why("r0")
    assert f"Store {failed} copied 3 slots from engine p-1 for it; it failed" in why("r1")
    assert "(the prefill engine did not hold the blocks)" in why("r1")
    assert f"Store {first} of request r0 (from engine p-1) copied 2 host slots" in why(
        "--transfer", str(first)
    )
    assert f"stored by store {first} of request r0 (from engine p-1)" in why("--key", keys(1, "p0")[0].hex())
    assert f"from store {first} of request r0 (from engine p-1)" in why("--block", "0")


def test_a_log_that_begins_later_tells_that_blocks_come_from_elsewhere(tmp_path: Path) -> None:
    """The log lacks the event with the engine's name. The ledger has a store without device blocks."""
    config, directory = OffloadConfig(host_blocks=8, device_blocks=8), tmp_path / "log"
    with Offloader.open(config, directory, segment_bytes=4096) as core:
        job = core.import_blocks((), keys(2), SOURCE).job
        assert job is not None
        core.submit([job.transfer])
        for number in range(300):
            core.arrive(f"q{number}")
            core.finish(f"q{number}")
            core.end_step()
        core.report(job.transfer, 0, True)
    first, *_ = segment_paths(directory)
    first.unlink()
    with kvsm.open(directory) as log:
        assert [(row.transfer, row.source) for row in log.transfers()] == [(job.transfer, "elsewhere")]


def test_an_older_log_reads_as_a_log_of_stores_from_the_device() -> None:
    """Records that were written before the field existed."""
    written = msgspec.msgpack.encode(StorePlanned(2, 0, 0, (), (b"x",), (0,), (0,)))
    older = msgspec.msgpack.encode(msgspec.msgpack.decode(written)[:-1])
    assert msgspec.msgpack.decode(older, type=StorePlanned).source == ""


def test_a_request_that_holds_blocks_for_another_engine_is_told_as_such(tmp_path: Path) -> None:
    """A hand-over is a request of its own in the prefill engine's log. It asks for nothing."""
    config = OffloadConfig(host_blocks=8, device_blocks=8, block_tokens=16)
    with Offloader.open(config, tmp_path / "log") as core:
        store(core, "r", keys(2))
        core.pin("hand-over-1-of-r", [0, 1], None, 0, 0, 0)
        core.finish("hand-over-1-of-r")
    life = RequestLife("hand-over-1-of-r")
    told = [line.text for line in Story(LogReader(tmp_path / "log"), life, Trust())]
    assert told[0] == (
        "request hand-over-1-of-r matches slots 0..1 (2), and asks for nothing: it holds these blocks for "
        "another engine or a session"
    )
    answer = CliRunner().invoke(main, ["why", str(tmp_path / "log"), "hand-over-1-of-r"])
    assert "It held 2 slots on the host for another engine" in answer.output
