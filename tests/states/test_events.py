"""Ids, events, plans, snapshots and KV events survive as bytes."""

from __future__ import annotations

import pickle
from typing import Any, Union, get_type_hints

import msgspec
import numpy as np
import pytest
from core_life import fold, keys, load, new_core, store
from hypothesis import given
from hypothesis import strategies as st

from kvsm import ids
from kvsm.core import native
from kvsm.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent, Publisher
from kvsm.core.ledger.snapshot import digest, restore, snapshot
from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.errors import ConfigError
from kvsm.events import KINDS, SCHEMA_VERSION, Direction, OffloadConfig, OffloadingEvent
from kvsm.ids import SMALL, MalformedIds, count, pack, to_list, unpack

RUNS_OF_IDS = st.lists(
    st.builds(
        lambda first, size, step: [max(first + step * place, 0) for place in range(size)],
        st.integers(0, 2**32 - 40),
        st.integers(1, 40),
        st.sampled_from([-1, 1]),
    ),
    max_size=6,
).map(lambda runs: [id for run in runs for id in run])
ANY_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=3 * SMALL) | RUNS_OF_IDS


class TestIds:
    @given(ANY_IDS)
    def test_packed_ids_unpack_to_themselves(self, batch: list[int]) -> None:
        assert to_list(pack(batch)) == to_list(unpack(pack(batch))) == batch

    @given(ANY_IDS.filter(lambda batch: len(batch) > SMALL))
    def test_both_bodies_make_the_same_bytes_of_ids_and_read_the_same(self, batch: list[int]) -> None:
        """One fold, two bodies: so the other one can go on with a log."""
        packed = ids.pack_in_python(batch)
        assert pack(batch) == packed
        assert to_list(unpack(packed)) == ids.unpack_in_python(packed).tolist()

    @given(
        st.binary(max_size=60)
        | st.builds(
            lambda form, rest: form + rest,
            st.sampled_from([b"\x02", b"\x03", b"\x04", b"\x0a", b"\x0b", b"\x0c"]),
            st.binary(max_size=60),
        )
    )
    def test_any_bytes_are_read_alike_by_both_bodies(self, packed: bytes) -> None:
        try:
            numbers = ids.unpack_in_python(packed).tolist()
        except MalformedIds:
            numbers = []
        try:
            assert to_list(unpack(packed)) == numbers
        except MalformedIds:
            assert len(numbers) <= SMALL
        if len(numbers) > SMALL:
            assert count(packed) == len(numbers)

    def test_what_is_usual_is_packed_and_read_in_c(self) -> None:
        """Else the tests above would compare Python with Python."""
        if native.WHY_NOT:
            pytest.skip(f"Python packs: {native.WHY_NOT}")
        assert native.unpack_ids(b"\x02") == b""
        for numbers in ([7], [*range(40)], [5, 3, 70_000], [1 << 31, 1 << 20]):
            for batch in (numbers, tuple(numbers), np.array(numbers, dtype=np.int64)):
                packed = native.pack_ids(batch)
                assert packed == ids.pack_in_python(np.array(numbers, dtype=np.int64))
                assert np.frombuffer(native.unpack_ids(packed), dtype=np.int64).tolist() == numbers

    @given(st.integers(0, 2**24 - 1000), st.integers(SMALL + 1, 900), st.sampled_from([-1, 1]))
    def test_a_run_takes_the_bytes_of_two_ids(self, first: int, size: int, step: int) -> None:
        """A prompt that comes back has its slots in a row."""
        batch = [first + place for place in range(size)][::step]
        assert len(pack(batch)) <= 1 + 2 * 3

    def test_a_few_bytes_do_not_stand_for_more_ids_than_a_batch_of_runs_has(self) -> None:
        """A damaged log must not take the memory of the one who reads it."""
        most, more = range(ids.MOST_IN_RUNS), range(ids.MOST_IN_RUNS + 1)
        assert len(pack(most)) == 1 + 2 * 2
        assert len(pack(more)) == 1 + 3 * len(more)
        assert to_list(pack(more)) == list(more)
        run = bytes([3 + ids.RUNS]) + (0).to_bytes(3, "little") + more[-1].to_bytes(3, "little")
        with pytest.raises(MalformedIds, match="packed as runs"):
            unpack(run)

    @given(ANY_IDS)
    def test_form_depends_on_the_batch_alone(self, batch: list[int]) -> None:
        """Determinism (S11): equal batches have equal bytes, as a list, a tuple or an array."""
        forms = [pack(batch), pack(tuple(batch)), pack(np.array(batch, dtype=np.int64))]
        assert forms[0] == forms[1] == forms[2]
        assert isinstance(forms[0], tuple) == (len(batch) <= SMALL)

    @given(ANY_IDS)
    def test_count_needs_no_unpacking(self, batch: list[int]) -> None:
        assert count(pack(batch)) == len(batch)

    @pytest.mark.parametrize(("largest", "width"), [(2**16 - 1, 2), (2**16, 3), (2**24 - 1, 3), (2**24, 4)])
    def test_ids_take_no_more_bytes_than_the_largest_needs(self, largest: int, width: int) -> None:
        assert len(pack([largest] * (SMALL + 1))) == 1 + width * (SMALL + 1)

    @pytest.mark.parametrize("wrong", [-1, 2**32])
    def test_id_that_does_not_fit_is_refused(self, wrong: int) -> None:
        with pytest.raises(OverflowError):
            pack([wrong] * (SMALL + 1))

    @pytest.mark.parametrize(
        "malformed", [b"", b"\x05abc", b"\x02\x00\x00", b"\x03abcd" + bytes(60), b"\x0a" + bytes(6)]
    )
    def test_malformed_bytes_are_refused(self, malformed: bytes) -> None:
        with pytest.raises(ValueError, match=r"."):
            unpack(malformed)

    def test_ids_in_a_log_are_never_negative(self) -> None:
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode((-1,)), type=ids.Ids)


class TestEvents:
    def test_tags_are_one_to_n(self) -> None:
        """Older logs keep their tags: new kinds are added at the end."""
        assert [kind.__struct_config__.tag for kind in KINDS] == list(range(1, len(KINDS) + 1))

    def test_every_kind_is_listed(self) -> None:
        assert set(KINDS) == set(OffloadingEvent.__subclasses__())

    def test_missing_trailing_field_takes_its_default(self) -> None:
        """An older record of the same schema can always be read."""
        decoder = msgspec.msgpack.Decoder(Union[KINDS])  # type: ignore[valid-type]  # noqa: UP007
        older = msgspec.msgpack.encode([4, 7, 1, 2, "r"])
        assert decoder.decode(older).aborted is False

    @pytest.mark.parametrize(
        ("record", "fields"),
        [
            ([5, 7, 1, 2, "r", [3], None], {"asked": None, "on_device": None, "on_host": None}),
            ([15, 7, 1, 2, 4, 0, False], {"error": ""}),
        ],
    )
    def test_record_from_before_a_field_was_added_is_read(
        self, record: list[Any], fields: dict[str, Any]
    ) -> None:
        """A log of an older kvsm tells less, and nothing false."""
        decoder = msgspec.msgpack.Decoder(Union[KINDS])  # type: ignore[valid-type]  # noqa: UP007
        event = decoder.decode(msgspec.msgpack.encode(record))
        assert {name: getattr(event, name) for name in fields} == fields

    def test_configuration_from_before_block_tokens_is_read(self) -> None:
        older = msgspec.msgpack.encode({"host_blocks": 4, "device_blocks": 8})
        assert msgspec.msgpack.decode(older, type=OffloadConfig).block_tokens == 0

    def test_fields_after_the_first_with_a_default_have_one_too(self) -> None:
        for kind in KINDS:
            fields = msgspec.structs.fields(kind)
            optional = [not field.required for field in fields]
            assert optional == sorted(optional), kind

    def test_every_field_is_documented_by_its_type(self) -> None:
        for kind in KINDS:
            assert get_type_hints(kind)
            assert kind.__doc__ or kind.__name__ in {"RequestArrived", "StepEnded"}

    def test_schema_version_is_a_decision(self) -> None:
        """An older kvsm refuses logs of a higher version, and older records may need rows in `UPGRADES`.

        3: the version of release 0.1.0.
        """
        assert SCHEMA_VERSION == 3


class TestConfig:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("host_blocks", 0),
            ("device_blocks", -1),
            ("workers", 0),
            ("workers", 5000),
            ("block_bytes", -1),
            ("max_live_transfers", 0),
            ("max_live_transfers", 4096),
            ("defer_ticks", -1),
            ("blocks_per_chunk", 0),
            ("blocks_per_chunk", 1025),
            ("transfer_ticks", -1),
            ("store_threshold", 0),
            ("block_tokens", -1),
        ],
    )
    def test_value_out_of_bounds_names_field_value_and_bound(self, field: str, value: int) -> None:
        options = {"host_blocks": 1, "device_blocks": 1, field: value}
        with pytest.raises(ConfigError, match=f"{field} is {value}; it must be from"):
            OffloadConfig(**options)


class TestPlans:
    @pytest.mark.parametrize("size", [1, SMALL, SMALL + 1])
    def test_job_travels_to_another_process(self, size: int) -> None:
        job = TransferJob(7, Direction.LOAD, pack(range(size)), pack(range(size, 2 * size)))
        assert pickle.loads(pickle.dumps(job)) == job
        assert [list(map(int, side)) for side in job.pairs()] == [
            list(range(size)),
            list(range(size, 2 * size)),
        ]

    def test_plan_travels_to_another_process(self) -> None:
        """By pickle or by msgpack."""
        loads = (TransferJob(7, Direction.LOAD, (1,), (2,)),)
        stores = (TransferJob(8, Direction.STORE, pack(range(20)), pack(range(20))),)
        plan = TransferPlan(loads, stores, (3, 7))
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=TransferPlan) == plan

    def test_plan_with_nothing_to_do_is_false(self) -> None:
        job = TransferJob(7, Direction.LOAD, (1,), (2,))
        assert not TransferPlan()
        assert all((TransferPlan((job,)), TransferPlan((), (job,)), TransferPlan(flush=(7,))))

    def test_report_travels_to_another_process(self) -> None:
        report = WorkerReport(7, 1, False, "copy engine lost")
        assert pickle.loads(pickle.dumps(report)) == report


class TestSnapshot:
    def test_restored_ledger_has_the_same_future(self) -> None:
        """Events are state (S10): a segment's snapshot replaces the events before it."""
        core, log = new_core(workers=2)
        store(core, "r", keys(6))
        load(core, "q", keys(3), 8)
        core.match("s", keys(2))
        job = core.prepare_store("t", keys(2, "t"), [12, 13]).job
        assert job is not None
        core.match("w", keys(1, "t"))
        half = restore(snapshot(core.ledger))
        since = len(log)
        core.submit([job.transfer])
        core.reset()
        core.report(job.transfer, 1, True)
        core.report(job.transfer, 0, True)
        store(core, "r", keys(2, "after"))
        for event in log[since:]:
            half.apply(event)
        assert digest(half) == digest(core.ledger) == digest(fold(log, core.config))

    def test_eviction_order_is_part_of_the_digest(self) -> None:
        first, _ = new_core()
        second, _ = new_core()
        for core, order in ((first, "ab"), (second, "ba")):
            for name in "ab":
                store(core, "r", keys(1, name))
            for name in order:
                core.touch(keys(1, name))
        assert digest(first.ledger) != digest(second.ledger)


class TestKVEvents:
    def test_folding_gives_the_readable_keys(self) -> None:
        """Events are state (S10)."""
        core, _ = new_core(host_blocks=3, publisher=Publisher())
        readable: set[bytes] = set()
        for name in "abc":
            store(core, "r", keys(2, name))
        core.reset()
        store(core, "r", keys(2, "d"))
        core.fail_load(load(core, "q", keys(1, "d"), 4))
        for event in core.take_kv_events():
            if isinstance(event, BlockStored):
                readable |= {block + event.group_idx.to_bytes(4, "big") for block in event.block_hashes}  # type: ignore[union-attr]
            elif isinstance(event, BlockRemoved):
                readable -= {block + event.group_idx.to_bytes(4, "big") for block in event.block_hashes}  # type: ignore[union-attr]
        assert (
            readable
            == {key for key in core.ledger.index if core.lookup(key).name == "HIT"}
            == set(keys(2, "d")[1:])
        )

    def test_wire_form_is_a_tagged_map_without_defaults(self) -> None:
        """The form that vLLM's own decoder expects, without a block size."""
        publisher = Publisher()
        publisher.stored(7, keys(1, group=3))
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(publisher.take_kv_events()))
        assert sent == [
            {
                "type": "BlockStored",
                "block_hashes": [b"p-0000"],
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
                "group_idx": 3,
            }
        ]

    def test_one_event_holds_one_group(self) -> None:
        publisher = Publisher()
        publisher.removed([*keys(2, group=0), *keys(1, group=1)])
        events: list[KVCacheEvent] = publisher.take_kv_events()
        assert [event.group_idx for event in events if isinstance(event, BlockRemoved)] == [0, 1]

    def test_events_are_taken_once(self) -> None:
        publisher = Publisher()
        publisher.stored(7, keys(1))
        publisher.take_kv_events()
        assert publisher.take_kv_events() == []
        assert publisher.take_events() == []
