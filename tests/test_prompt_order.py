"""A prompt that is stored over several steps is evicted from its end, like one that is stored at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsm import native
from kvsm.errors import InvalidEvent
from kvsm.events import BlocksTouched, OffloadConfig, StorePlanned
from kvsm.ids import SMALL, to_list
from kvsm.log import MemoryLog
from kvsm.offloader import Offloader
from kvsm.policies import POLICIES
from kvsm.snapshot import digest, restore, snapshot

Body = Callable[[], AbstractContextManager[None]]
BODIES = [pytest.param(native.without, id="Python"), pytest.param(nullcontext, id="native")]
EXAMPLES = [pytest.param(60, id="fast"), pytest.param(2_000, id="slow", marks=pytest.mark.slow)]
EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))
EITHER_BODY = pytest.mark.parametrize("body", BODIES)


def prompt(name: str, blocks: int) -> list[bytes]:
    """The keys of a prompt. A key without its last letter is the key of the block before it."""
    return [name[:end].encode() for end in range(1, blocks + 1)]


def new_core(policy: str, host_blocks: int) -> Offloader:
    config = OffloadConfig(host_blocks=host_blocks, device_blocks=64, policy=policy, defer_ticks=0)
    return Offloader(config, MemoryLog())


def serve(core: Offloader, request: str, keys: Sequence[bytes]) -> int:
    """Match and load."""
    hits = core.match(request, keys).hits
    job = core.prepare_load(request, range(hits)) if hits else None
    if job is not None:
        core.submit([job.transfer])
        core.complete_load(job.transfer)
    return hits


def store(core: Offloader, request: str, keys: Sequence[bytes]) -> Sequence[bytes]:
    """Store a piece. Returns the keys that were evicted for it."""
    parent = keys[0][:-1] if keys else b""
    prepared = core.prepare_store(request, keys, range(len(keys)), parent)
    if prepared.job is not None:
        core.submit([prepared.job.transfer])
        core.complete_store(prepared.job.transfer)
    return prepared.evicted


def order(core: Offloader) -> list[bytes]:
    """All keys, the one that goes next first."""
    policy = core.ledger.policy
    choice = policy.choose(len(policy), ())
    assert choice is not None
    return [core.ledger.key_of[slot] for slot in to_list(choice.victims)]


def planned(core: Offloader) -> list[StorePlanned]:
    assert isinstance(core.log, MemoryLog)
    return [event for event in core.log if isinstance(event, StorePlanned)]


lives = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 8), st.integers(1, SMALL + 4)), min_size=1, max_size=5
)
"""Of each request: its blocks, how many of these are on the host before it, and the blocks of a piece."""


@EITHER_BODY
@EVERY_POLICY
@pytest.mark.parametrize("examples", EXAMPLES)
def test_pieces_come_to_the_order_of_whole_prompts(body: Body, policy: str, examples: int) -> None:
    """Requests begin in one sequence. How they go on, and in which pieces, is not seen in the order."""

    @settings(max_examples=examples, deadline=None)
    @given(requests=lives, seed=st.integers(0, 1 << 32))
    def check(requests: list[tuple[int, int, int]], seed: int) -> None:
        def served(pieces: Sequence[int]) -> list[bytes]:
            core, random, left = new_core(policy, 400), Random(seed), dict[str, list[bytes]]()
            names = [chr(ord("a") + number) * 40 for number in range(len(requests))]
            for name, (blocks, before, _) in zip(names, requests):
                store(core, f"before {name}", prompt(name, min(blocks, before)))
            for name, (blocks, _, _), piece in zip(names, requests, pieces):
                keys = prompt(name, blocks)
                keys = keys[serve(core, name, keys) :]
                store(core, name, keys[:piece])
                left[name] = keys[piece:]
            while any(left.values()):
                name = random.choice(names)
                piece = pieces[names.index(name)]
                if left[name]:
                    store(core, name, left[name][:piece])
                    left[name] = left[name][piece:]
            return order(core)

        with body():
            assert served([piece for _, _, piece in requests]) == served([1 << 20] * len(requests))

    check()


moves = st.lists(
    st.tuples(st.sampled_from("ssssmmtf"), st.integers(0, 3), st.integers(0, 6)), min_size=10, max_size=120
)


@EITHER_BODY
@pytest.mark.parametrize("examples", EXAMPLES)
def test_no_block_goes_before_what_continues_it(body: Body, examples: int) -> None:
    """Under LRU: through stores in pieces, matches, loads, touches and ends of requests whose prompts branch,
    an idle block is not evicted while an idle one that continues it stays. Left out: blocks of the very offer
    for which room is made, which are not evicted."""

    @settings(max_examples=examples, deadline=None)
    @given(steps=moves, seed=st.integers(0, 1 << 32))
    def check(steps: list[tuple[str, int, int]], seed: int) -> None:
        core, random, running = new_core("lru", 24), Random(seed), dict[int, tuple[str, list[bytes], int]]()
        for number, (move, who, size) in enumerate(steps):
            request, keys, done = running.get(who, ("", [], 0))
            if not request:
                name = "".join(random.choice("ab") if place in (0, 4, 9) else "c" for place in range(20))
                request, keys = f"{who} {number}", prompt(name, random.randint(1, 20))
                running[who] = request, keys, serve(core, request, keys)
            elif move == "s":
                piece = keys[done : done + size]
                idle = set(order(core)) - set(piece)
                evicted = store(core, request, piece)
                left = idle & set(order(core))
                assert not {key[:-1] for key in left} & set(evicted), (evicted, left)
                running[who] = request, keys, done + len(piece)
            elif move == "m":
                serve(core, f"other {number}", keys[:size])
                core.finish(f"other {number}")
            elif move == "t":
                core.touch(keys[:size])
            else:
                core.finish(request)
                del running[who]

    with body():
        check()


@EITHER_BODY
def test_a_block_whose_beginning_has_gone_goes_next(body: Body) -> None:
    """It cannot be hit before its beginning is stored again."""
    with body():
        core = new_core("lru", 4)
        store(core, "a", prompt("a" * 9, 2))
        store(core, "b", prompt("b" * 9, 2))
        store(core, "c", prompt("c" * 9, 2))
        assert not {*prompt("a" * 9, 2)} & {*order(core)}
        store(core, "a", prompt("a" * 9, 3)[2:])
        assert planned(core)[-1].parents == ((0, None),)
        assert order(core)[0] == prompt("a" * 9, 3)[2]


@EITHER_BODY
@EVERY_POLICY
@pytest.mark.parametrize("blocks", [3, SMALL])
def test_a_restart_keeps_the_order_of_prompts(body: Body, policy: str, blocks: int) -> None:
    """Also of a prompt that a request holds when the process ends, wherever its blocks lie, and if the next
    process has another policy."""
    with body():
        core = new_core(policy, 6 * blocks)
        held, loaded, idle = (prompt(name * 40, 2 * blocks) for name in "abc")
        for keys in (held, loaded, idle):
            for piece in (keys[blocks:], keys[:blocks]):
                store(core, "stores", piece)
        core.match("holds", held)
        core.match("loads", loaded)
        core.prepare_load("loads", range(len(loaded)))
        for other in POLICIES:
            config = msgspec.structs.replace(core.config, policy=other)
            found = order(Offloader.restarted(restore(snapshot(core.ledger)), config))
            assert [key for key in found if key in held] == held[::-1], other
            assert [key for key in found if key in loaded] == loaded[::-1], other
            if policy != "s3fifo":  # A use moves no block in its queue.
                assert found.index(idle[0]) < found.index(held[0]) < found.index(loaded[0]), other


@EITHER_BODY
@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"s3fifo"}))
def test_an_import_continues_what_the_host_has(body: Body, policy: str) -> None:
    """And what the caller names. Not under S3-FIFO, where what continues a used block enters at the end."""
    with body():
        core = new_core(policy, 12)
        keys = prompt("a" * 9, 6)
        store(core, "a", keys[:2])
        store(core, "b", prompt("b" * 9, 2))
        for piece, parents in ((keys[:4], {}), (keys[4:], {0: keys[3]})):
            job = core.import_blocks((("a", len(piece)),), piece, "another engine", parents).job
            assert job is not None
            core.submit([job.transfer])
            core.complete_store(job.transfer)
        slots = [core.ledger.index[key] for key in keys]
        assert [event.parents for event in planned(core)[-2:]] == [((0, slots[1]),), ((0, slots[3]),)]
        assert [key for key in order(core) if key in keys] == keys[::-1]


@EITHER_BODY
def test_a_core_remembers_no_parent(body: Body) -> None:
    """The parent of a store follows from the call and the ledger: a core resumed from a snapshot plans the
    next piece like the core that wrote the snapshot."""
    with body():
        core = new_core("lru", 8)
        keys = prompt("a" * 9, 6)
        store(core, "a", keys[:2])
        serve(core, "a", keys)
        other = Offloader.resumed(restore(snapshot(core.ledger)), MemoryLog())
        for one in (core, other):
            one.prepare_store("a", keys[2:4], (2, 3))
            one.prepare_store("a", keys[4:], (4, 5), keys[3])
            assert [event.parents for event in planned(one)[-2:]] == [(), ((0, 3),)]
        assert digest(core.ledger) == digest(other.ledger)


@EITHER_BODY
def test_an_offer_says_what_its_runs_continue(body: Body) -> None:
    """Of several requests at once, by the keys that the caller names."""
    with body():
        core = new_core("lru", 16)
        a, b = prompt("a" * 9, 6), prompt("b" * 9, 4)
        for request, keys in (("a", a[:2]), ("b", b[:2]), ("c", a[3:4])):
            store(core, request, keys)
        slot = core.ledger.index.__getitem__
        offered = [*a[2:6], *b[2:4]]
        prepared = core.store((("a", 4), ("b", 2)), offered, range(6), parents={0: a[1], 4: b[1]})
        assert prepared.keys == (a[2], a[4], a[5], *b[2:4])
        assert planned(core)[-1].parents == ((0, slot(a[1])), (1, slot(a[3])), (3, slot(b[1])))


@EITHER_BODY
@pytest.mark.parametrize(
    "parents",
    [
        ((1, 0), (0, 0)),
        ((0, 0), (0, 1)),
        ((2, 0),),
        ((-1, 0),),
        ((0, 4),),
        ((0, -1),),
        ((0, -(1 << 40)),),
        ((0, True),),
        ((0, "x"),),
        ((0,),),
        (0,),
        [(0, 0)],
        "",
        None,
    ],
)
def test_parents_that_cannot_be_are_refused(body: Body, parents: Any) -> None:
    """An event may say anything. Nothing is changed."""
    with body():
        core = new_core("lru", 4)
        store(core, "a", prompt("a" * 9, 2))
        before = digest(core.ledger)
        seq = core.ledger.seq + 1
        for event in (
            StorePlanned(seq, 0, 0, (), (b"x", b"y"), (2, 3), (0, 1), "", parents),
            BlocksTouched(seq, 0, 0, (0, 1), parents),
        ):
            with pytest.raises(InvalidEvent, match="parents"):
                core.ledger.apply(event)
            assert digest(core.ledger) == before
