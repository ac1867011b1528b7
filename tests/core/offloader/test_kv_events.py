"""KV events: folded, they say what can be matched (events are state, S10); self-describing ones are true.

The consumer here starts from nothing, and believes a self-describing event only as far as it can compute its
hashes from the parent, the tokens and the adapter that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from core_life import begin_store, keys, load, new_core, store
from hypothesis import given, settings
from hypothesis import strategies as st
from random_acts import ACTS, DescribedRequest, live

from examples import examples
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import HASH_TOKENS, chain
from kvsm.core.kv_events import (
    GROUP_INDEX_BYTES,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    Publisher,
)
from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import (
    GroupKind,
    KVCacheGroup,
    OffloadScheduler,
    SchedulerConfig,
    StepOutput,
    StoreMode,
)
from kvsm.core.scheduler.groups import KeyLayout
from kvsm.core.scheduler.payloads import describe as describe_stored
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.events import OffloadConfig

FULL = KVCacheGroup(HASH_TOKENS)
WIDE = KVCacheGroup(2 * HASH_TOKENS)
SLIDING = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=6)
CHUNKED = KVCacheGroup(HASH_TOKENS, GroupKind.CHUNKED_LOCAL, window=6)
MAMBA = KVCacheGroup(2 * HASH_TOKENS, GroupKind.MAMBA)
KINDS = {
    GroupKind.FULL: ("full_attention", None),
    GroupKind.SLIDING_WINDOW: ("sliding_window", 6),
    GroupKind.CHUNKED_LOCAL: ("chunked_local_attention", None),
    GroupKind.MAMBA: ("mamba", None),
}


class Consumer:
    """What a router knows: (group, block hash) of everything that it was told."""

    def __init__(self, groups: Sequence[KVCacheGroup] = (FULL,)) -> None:
        self.groups, self.known = groups, set[tuple[int, bytes]]()
        self.described = 0

    def take(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.medium == "CPU"
            assert event.group_idx is not None
            names = {(event.group_idx, one) for one in event.block_hashes}
            assert len(names) == len(event.block_hashes)
            if isinstance(event, BlockRemoved):
                assert names <= self.known, "removed, and never stored"
                self.known -= names
                continue
            # Chunks of prompts that part within them have blocks in common, and differ in the last one.
            assert (event.group_idx, event.block_hashes[-1]) not in self.known, "stored twice"
            self.known |= names
            if event.block_size:
                self._believe(event)

    def _believe(self, event: BlockStored) -> None:
        """The hashes follow from what the event says."""
        assert event.group_idx is not None
        group, size = self.groups[event.group_idx], event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == KINDS[group.kind]
        assert (event.lora_id, bool(event.lora_name)) in {(7, True), (None, False)}
        value = event.parent_block_hash or chain(b"", (event.lora_name or "").encode())
        for place, token in enumerate(event.token_ids, 1):
            value = chain(value, token.to_bytes(4, "big"))
            if place % size == 0:
                assert value == event.block_hashes[place // size - 1]
        self.described += 1


def readable(core: Offloader) -> list[bytes]:
    return [key for key, slot in core.ledger.index.items() if core.ledger.readable(slot)]


def names_of(engine: SmallEngine) -> set[tuple[int, bytes]]:
    """What a router must know: all blocks of every readable key, computed from the requests."""
    chunk = engine.core.config.blocks_per_chunk
    blocks: dict[bytes, list[bytes]] = {}
    for request in engine.requests.values():
        for index, group in enumerate(engine.groups):
            stride = group.block_tokens // HASH_TOKENS
            hashes = request.block_hashes[stride - 1 :: stride]
            for end in range(chunk, len(hashes) + 1, chunk):
                blocks[hashes[end - 1] + index.to_bytes(4, "big")] = hashes[end - chunk : end]
    return {
        (int.from_bytes(key[-4:], "big"), one)
        for key in readable(engine.core)
        for one in (blocks[key] if engine.scheduler.config.store is StoreMode.EAGER else [key[:-4]])
    }


LIVES = st.fixed_dictionaries(
    {
        "groups": st.sampled_from([(FULL,), (WIDE,), (FULL, SLIDING), (WIDE, SLIDING), (FULL, CHUNKED)]),
        "store": st.sampled_from([StoreMode.EAGER, StoreMode.EAGER, StoreMode.LAZY]),
        "host_blocks": st.sampled_from([3, 6, 20]),
        "workers": st.sampled_from([1, 2]),
        "chunk": st.sampled_from([1, 1, 2, 3]),
    }
)


def life(form: str, options: dict[str, Any], acts: Sequence[int]) -> tuple[SmallEngine, Consumer]:
    """A whole life under random acts; the consumer is checked at every take. form: `wire`, or `offloading`
    (vLLM's events of the same name)."""
    chunk = options["chunk"] if options["store"] is StoreMode.EAGER else 1
    engine = SmallEngine(
        groups=options["groups"],
        device_blocks=40,
        host_blocks=options["host_blocks"],
        workers=options["workers"],
        store=options["store"],
        publisher=Publisher(),
        core={"blocks_per_chunk": chunk, "transfer_ticks": 3},
    )
    consumer = Consumer(options["groups"])
    announced: set[bytes] = set()

    def take() -> None:
        if form != "offloading":
            consumer.take(engine.scheduler.take_events())
            assert consumer.known == names_of(engine)
            return
        for event in engine.core.take_events():
            if event.removed:
                announced.difference_update(event.keys)
            else:
                announced.update(event.keys)
        assert announced == set(readable(engine.core))

    for act in acts:
        live(engine, act)
        if act % 3 == 0:
            take()
    engine.run(400)
    take()
    return engine, consumer


@given(st.sampled_from(["wire", "wire", "offloading"]), LIVES, ACTS)
@settings(max_examples=examples(60))
def test_folding_gives_the_matchable_keys(form: str, options: dict[str, Any], acts: list[int]) -> None:
    """Events are state (S10) in every form, under failures, losses, resets, evictions and aborts. What was
    kept for a store goes with it."""
    engine, _ = life(form, options, acts)
    publisher = engine.core.publisher
    assert publisher is not None
    assert publisher.state.descriptions == {}
    assert set(publisher.state.blocks_of) <= set(readable(engine.core))
    assert {name for names in publisher.state.blocks_of.values() for name in names} == set(
        publisher.state.chunks_with
    )


@pytest.mark.slow
@given(st.sampled_from(["wire", "wire", "offloading"]), LIVES, ACTS)
@settings(max_examples=400)
def test_folding_gives_the_matchable_keys_long(form: str, options: dict[str, Any], acts: list[int]) -> None:
    life(form, options, acts)


def engine_of(*groups: KVCacheGroup, chunk: int = 1, **options: Any) -> SmallEngine:
    return SmallEngine(groups=groups, publisher=Publisher(), core={"blocks_per_chunk": chunk}, **options)


def stored_events(engine: SmallEngine, request: DescribedRequest) -> list[BlockStored]:
    engine.arrive(request)
    engine.run()
    return [event for event in engine.scheduler.take_events() if isinstance(event, BlockStored)]


def test_event_says_what_the_block_holds() -> None:
    engine = engine_of(FULL)
    first, second = stored_events(engine, DescribedRequest("r", range(10), lora="adapter"))
    hashes = engine.requests["r"].block_hashes
    assert first == BlockStored(
        [hashes[0]], None, [0, 1, 2, 3], 4, 7, "CPU", "adapter", [("adapter",)], 0, "full_attention"
    )
    assert (second.parent_block_hash, second.token_ids) == (hashes[0], [4, 5, 6, 7])


def test_chunk_is_one_event_that_names_all_its_blocks_and_so_does_its_removal() -> None:
    engine = engine_of(FULL, chunk=2)
    events = stored_events(engine, DescribedRequest("r", range(18)))
    hashes = engine.requests["r"].block_hashes
    assert [event.block_hashes for event in events] == [hashes[:2], hashes[2:4]]
    assert [event.parent_block_hash for event in events] == [None, hashes[1]]
    assert [(event.block_size, event.token_ids) for event in events] == [
        (4, [*range(8)]),
        (4, [*range(8, 16)]),
    ]
    engine.reset()
    removed = [event for event in engine.scheduler.take_events() if isinstance(event, BlockRemoved)]
    assert [event.block_hashes for event in removed] == [hashes[:4]]


def test_removal_leaves_the_blocks_that_another_chunk_has() -> None:
    """Events are state (S10): two prompts that part within a chunk have two chunks; their common first block
    is in both."""
    engine = engine_of(FULL, chunk=2)
    consumer = Consumer()
    engine.arrive(DescribedRequest("r", [1, 1, 1, 1, 2, 2, 2, 2, 2]))
    engine.arrive(DescribedRequest("q", [1, 1, 1, 1, 3, 3, 3, 3, 3]))
    engine.run()
    consumer.take(engine.scheduler.take_events())
    shared, end = engine.requests["r"].block_hashes[:2]
    other = engine.requests["q"].block_hashes[1]
    assert consumer.known == {(0, shared), (0, end), (0, other)}
    assert engine.core.publisher is not None
    engine.core.publisher.removed([end + bytes(4)])
    consumer.take(engine.scheduler.take_events())
    assert consumer.known == {(0, shared), (0, other)}


def test_block_of_several_hashes_goes_by_its_last() -> None:
    engine = engine_of(WIDE)
    events = stored_events(engine, DescribedRequest("r", range(17)))
    hashes = engine.requests["r"].block_hashes
    assert [(event.block_hashes, event.parent_block_hash) for event in events] == [
        ([hashes[1]], None),
        ([hashes[3]], hashes[1]),
    ]
    assert [event.block_size for event in events] == [8, 8]


def test_sliding_window_is_named() -> None:
    events = stored_events(engine_of(FULL, SLIDING), DescribedRequest("r", range(9)))
    assert {(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in events} == {
        (0, "full_attention", None),
        (1, "sliding_window", 6),
    }


def hand_over(*owners: DescribedRequest) -> tuple[Offloader, OffloadScheduler]:
    """A scheduler to which each of these hands over the states at 16 and 20 tokens, in one step."""
    core = Offloader(OffloadConfig(host_blocks=8, device_blocks=32), publisher=Publisher())
    scheduler = OffloadScheduler(core, SchedulerConfig(groups=(FULL, MAMBA), hash_tokens=HASH_TOKENS))
    states = {}
    for number, request in enumerate(owners):
        first = 10 * number
        scheduler.add_request(request)
        scheduler.update_state_after_alloc(request, [[first, first + 1, first + 2], [first + 3]], 0)
        states[request.request_id] = [(1, first + 4, 16), (1, first + 5, 20)]
    plan = scheduler.build_connector_meta(StepOutput(scheduled=list(states), boundary_states=states))
    core.complete_store(plan.stores[0].transfer)
    return core, scheduler


def test_handed_over_state_is_told_under_its_group() -> None:
    """A state at a block boundary covers the block. A state within a block covers the tokens from its start
    on."""
    request = DescribedRequest("r", range(30))
    _, scheduler = hand_over(request)
    events = scheduler.take_events()
    consumer = Consumer((FULL, MAMBA))
    consumer.take(events)
    hashes = request.block_hashes
    assert consumer.known == {(1, hashes[3]), (1, hashes[4])}
    told = [event for event in events if isinstance(event, BlockStored)]
    assert [(event.block_size, event.token_ids, event.parent_block_hash) for event in told] == [
        (8, [*range(8, 16)], hashes[1]),
        (4, [*range(16, 20)], hashes[3]),
    ]


def test_state_that_two_requests_hand_over_is_told_once_and_moves_no_cursor() -> None:
    both = [DescribedRequest(name, range(30)) for name in "rq"]
    for request in both:
        request.num_computed_tokens = 12
    core, scheduler = hand_over(*both)
    events = [event for event in scheduler.take_events() if isinstance(event, BlockStored)]
    states = [event.token_ids for event in events if event.group_idx == 1]
    assert states == [[*range(8, 16)], [*range(16, 20)]]
    assert {name: request.settled for name, request in core.ledger.requests.items()} == {
        "r": (3, 0),
        "q": (0, 0),
    }


def test_lazy_store_is_told_in_the_legacy_form() -> None:
    """Nobody knows which tokens a free device block holds."""
    engine = engine_of(FULL, store=StoreMode.LAZY)
    events = stored_events(engine, DescribedRequest("r", range(10)))
    engine.step()
    engine.run()
    events += [event for event in engine.scheduler.take_events() if isinstance(event, BlockStored)]
    assert {one for event in events for one in event.block_hashes} == {*engine.requests["r"].block_hashes[:2]}
    assert {(event.block_size, tuple(event.token_ids)) for event in events} == {(0, ())}


def test_request_of_embeddings_is_told_in_the_legacy_form() -> None:
    """Its token ids do not say what its blocks hold."""
    events = stored_events(engine_of(FULL), DescribedRequest("r", range(10), embeds=True))
    assert [(event.block_size, event.token_ids) for event in events] == [(0, [])]
    assert len(events[0].block_hashes) == 2


def test_extra_keys_are_of_each_block() -> None:
    """The second image begins where a block does, and ends where one does."""
    images = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for name, offset, length in (("first", 2, 4), ("second", 8, 4))
    ]
    request = DescribedRequest("r", range(17), mm_features=images, cache_salt="salt", lora="adapter")
    events = stored_events(engine_of(FULL), request)
    assert [event.extra_keys for event in events] == [
        [("adapter", ("first", 2), "salt")],
        [("adapter", ("first", -2))],
        [("adapter", ("second", 0))],
        [("adapter",)],
    ]


def test_extra_keys_are_none_where_tokens_say_all() -> None:
    """As in vLLM: None rather than an empty list."""
    events = stored_events(engine_of(FULL), DescribedRequest("r", range(9)))
    assert [event.extra_keys for event in events] == [None, None]


@pytest.mark.parametrize("end", [1, 2, 3])
def test_block_of_one_token_is_told_like_others(end: int) -> None:
    """Its hash is the hash of its token; its parent is the hash of the token before."""
    config = SchedulerConfig(groups=(KVCacheGroup(1),), hash_tokens=1)
    request = DescribedRequest("r", range(10, 13))
    request.block_hashes = [b"%d" % number for number in range(3)]
    (event,) = describe_stored(
        config, 1, [(TrackedRequest(request, config, KeyLayout.of(config, 1)), 0, end)]
    )
    assert event is not None
    assert (event.block_hashes, event.token_ids, event.block_size) == (
        [request.block_hashes[end - 1]],
        [9 + end],
        1,
    )
    assert event.parent_block_hash == (request.block_hashes[end - 2] if end > 1 else None)


def describe(publisher: Publisher, transfer: int, names: Sequence[bytes]) -> list[BlockStored]:
    told = [
        BlockStored([key[:-4]], None, [transfer, place], 2, None, "CPU", None, group_idx=0)
        for place, key in enumerate(names)
    ]
    publisher.describe(transfer, told)
    return told


def test_store_that_was_described_in_part_is_told_whole_and_in_order() -> None:
    publisher = Publisher()
    names = keys(4)
    told = BlockStored([names[2][:-4]], None, [1, 2], 2, None, "CPU", None, group_idx=0)
    publisher.describe(7, [None, None, told, None])
    publisher.stored(7, names)
    first, second, third = publisher.take_kv_events()
    assert isinstance(first, BlockStored)
    assert isinstance(third, BlockStored)
    assert (first.block_hashes, third.block_hashes) == ([names[0][:-4], names[1][:-4]], [names[3][:-4]])
    assert second == told


def test_removal_takes_nothing_from_a_later_store_of_the_same_batch() -> None:
    """B26: stored, evicted and stored again between two takes; each store has its own payload."""
    publisher = Publisher()
    core, _ = new_core(host_blocks=1, publisher=publisher)
    expected: list[KVCacheEvent] = []
    for name in "aba":
        names = keys(1, name)
        transfer = begin_store(core, "r", names)
        told = describe(publisher, transfer, names)
        core.complete_store(transfer)
        expected += [*told, BlockRemoved([names[0][:-4]], "CPU", 0)]
    expected.pop()
    assert core.take_kv_events() == expected


def test_removal_while_a_store_of_the_same_key_is_planned_takes_nothing_from_it() -> None:
    """B26, across batches: the payload is the transfer's, not the key's."""
    publisher = Publisher()
    core, _ = new_core(host_blocks=4, publisher=publisher)
    store(core, "r", keys(1))
    failing = load(core, "q", keys(1), 4)
    core.fail_load(failing)
    transfer = begin_store(core, "r", keys(1))
    told = describe(publisher, transfer, keys(1))
    publisher.removed([])
    core.take_kv_events()
    core.complete_store(transfer)
    assert core.take_kv_events() == told


@pytest.mark.parametrize("end", ["fail", "cancel", "lose", "reset"])
def test_store_that_does_not_end_well_drops_its_payload(end: str) -> None:
    publisher = Publisher()
    core, _ = new_core(publisher=publisher)
    job = core.prepare_store("r", keys(2), [0, 1]).job
    assert job is not None
    describe(publisher, job.transfer, keys(2))
    if end == "cancel":
        core.cancel(job.transfer)
    elif end == "reset":
        core.reset()
    else:
        core.submit([job.transfer])
        (core.fail_store if end == "fail" else core.lose)(job.transfer)
    assert publisher.state.descriptions == {}
    assert not [event for event in core.take_kv_events() if isinstance(event, BlockStored)]


class TestBesideVLLM:
    """Skipped where vLLM cannot be imported; the continuous integration makes an environment for it."""

    def test_events_decode_as_vllms(self) -> None:
        import msgspec

        theirs = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")
        engine = engine_of(FULL, SLIDING)
        sent = stored_events(engine, DescribedRequest("r", range(10), lora="adapter", cache_salt="salt"))
        kind = list[theirs.BlockStored | theirs.BlockRemoved]
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=kind)
        for ours, their in zip(sent, read, strict=True):
            assert isinstance(their, theirs.BlockStored)
            for name in BlockStored.__struct_fields__:
                wanted = getattr(ours, name)
                if name == "extra_keys" and wanted:
                    wanted = [list(one) for one in wanted]
                    assert [list(one) for one in getattr(their, name)] == wanted
                else:
                    assert getattr(their, name) == wanted, name
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(read))
        assert again == msgspec.msgpack.decode(msgspec.msgpack.encode(sent))

    def test_extra_keys_are_vllms(self) -> None:
        utils = pytest.importorskip("vllm.v1.core.kv_cache_utils", reason="vLLM is not installed")
        images = [
            SimpleNamespace(
                identifier=f"image {n}", mm_position=SimpleNamespace(offset=offset, length=length)
            )
            for n, (offset, length) in enumerate([(2, 3), (5, 9), (20, 1)])
        ]
        request = DescribedRequest("r", range(26), mm_features=images, cache_salt="salt", lora="adapter")
        request.lora_request.lora_name = "adapter"  # type: ignore[attr-defined]
        request.lora_request.lora_path = "anywhere"  # type: ignore[attr-defined]
        place, wanted = 0, []
        for first in range(0, 24, HASH_TOKENS):
            extra, place = utils.generate_block_hash_extra_keys(request, first, first + HASH_TOKENS, place)
            wanted += utils.to_event_extra_keys([extra])
        told = stored_events(engine_of(FULL), request)
        assert [one for event in told for one in event.extra_keys or ()] == wanted


def test_each_form_of_events_names_the_medium_of_its_publisher() -> None:
    """A removal under another medium would leave a router believing in what is gone (S10)."""
    key = b"hash" + bytes(GROUP_INDEX_BYTES)
    for take in (Publisher.take_events, Publisher.take_kv_events):
        publisher = Publisher(medium=MEDIUM_STORAGE)
        publisher.stored(1, [key])
        publisher.removed([key])
        assert [event.medium for event in take(publisher)] == [MEDIUM_STORAGE] * 2
