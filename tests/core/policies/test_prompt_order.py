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

from examples import examples
from kvsm.core import native
from kvsm.core.ledger.snapshot import digest, restore, snapshot
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.policies import ADMITTING
from kvsm.errors import InvalidEvent
from kvsm.events import BlocksTouched, OffloadConfig, StorePlanned
from kvsm.ids import SMALL, to_list

Body = Callable[[], AbstractContextManager[None]]
BODIES = [pytest.param(native.without, id="Python"), pytest.param(nullcontext, id="native")]
EXAMPLES = [pytest.param(examples(60), id="fast"), pytest.param(400, id="slow", marks=pytest.mark.slow)]
EVERY_POLICY = pytest.mark.parametrize("policy", sorted(ADMITTING))
"""`auto` has no order of its own: it goes by what it has learned."""
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


def offer(
    core: Offloader, pieces: Sequence[Sequence[bytes]], how: str, name_all: bool = False
) -> list[bytes]:
    """Offer pieces of several prompts in one call. Returns the keys that were evicted for them.

    how: which call makes it.
    name_all: name the parent of each block, also of one that continues the block before it in the offer.
    """
    keys, parents = [key for piece in pieces for key in piece], dict[int, bytes]()
    for piece in pieces:
        first = len(parents)
        parents |= {first + n: key[:-1] for n, key in enumerate(piece)}
    starts = {sum(map(len, pieces[:n])) for n in range(len(pieces))}
    parents = {place: key for place, key in parents.items() if name_all or place in starts}
    owners = tuple([(f"offers {n}", len(piece)) for n, piece in enumerate(pieces)])
    if how == "store":
        prepared = core.store(owners, keys, range(len(keys)), parents=parents)
    else:
        prepared = core.import_blocks(owners, keys, "another engine", parents)
    if prepared.job is not None:
        core.submit([prepared.job.transfer])
        core.complete_store(prepared.job.transfer)
    return list(prepared.evicted)


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


branching = st.lists(
    st.tuples(st.text("ab", max_size=2), st.integers(0, 3), st.integers(1, 7)), min_size=1, max_size=6
)
"""Of each piece in an offer: what follows the common beginning of its prompt, its first place and its end."""


def cut(piece: tuple[str, int, int]) -> list[bytes]:
    tail, first, end = piece
    return prompt(f"cc{tail[:1]}c{tail[1:]}ddd", 8)[first:][:end]


def one_by_one(pieces: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """The runs of new blocks in an offer: the last one first, but each after the run that it continues."""
    runs = list[list[bytes]]()
    for key in dict.fromkeys([key for piece in pieces for key in piece]):
        if runs and runs[-1][-1] == key[:-1]:
            runs[-1].append(key)
        else:
            runs.append([key])
    found = list[list[bytes]]()

    def add(run: list[bytes]) -> None:
        if run in found:
            return
        for other in runs:
            if run[0][:-1] in other:
                add(other)
        found.append(run)

    for run in reversed(runs):
        add(run)
    return found


@EITHER_BODY
@EVERY_POLICY
@pytest.mark.parametrize("how", ["store", "import"])
@pytest.mark.parametrize("examples", EXAMPLES)
def test_an_offer_comes_to_the_order_of_its_runs(body: Body, policy: str, how: str, examples: int) -> None:
    """Prompts that share new blocks, in one offer: a run may continue a block that the same offer stores, at
    an earlier place or at a later one. To name the block before a block changes nothing."""

    @settings(max_examples=examples, deadline=None)
    @given(before=st.text("ab", max_size=2), blocks=st.integers(0, 4), drawn=branching)
    def check(before: str, blocks: int, drawn: list[tuple[str, int, int]]) -> None:
        cores = [new_core(policy, 64) for _ in range(3)]
        together, named, single = cores
        held = cut((before, 0, blocks))
        for core in cores:
            store(core, "old", prompt("old", 3))
            store(core, "before", held)
        pieces = [[key for key in cut(piece) if key not in held] for piece in drawn]
        offer(together, pieces, how)
        offer(named, pieces, how, name_all=True)
        for run in one_by_one(pieces):
            store(single, "single", run)
        assert order(together) == order(single)
        assert [event.parents for event in planned(named)] == [event.parents for event in planned(together)]

    with body():
        check()


@EITHER_BODY
@pytest.mark.parametrize("how", ["store", "import"])
def test_a_block_waits_for_the_beginning_that_its_offer_stores(body: Body, how: str) -> None:
    """It is on the host, and the blocks between it and its beginning are not. It enters the order where they
    will, not as the next victim."""
    with body():
        core, keys = new_core("lru", 16), prompt("abcde", 5)
        for request, piece in (("old", prompt("old", 3)), ("a", keys[:1]), ("new", prompt("xyz", 3))):
            store(core, request, piece)
        for place in (3, 4):
            store(core, "a", keys[place : place + 1])
        assert order(core)[:2] == [keys[4], keys[3]]
        offer(core, [keys[1:]], how)
        assert order(core) == [*prompt("old", 3)[::-1], *keys[::-1], *prompt("xyz", 3)[::-1]]


moves = st.lists(
    st.tuples(st.sampled_from("ssssoommtf"), st.integers(0, 3), st.integers(0, 6)), min_size=10, max_size=120
)


@EITHER_BODY
@pytest.mark.parametrize("examples", EXAMPLES)
def test_no_block_goes_before_what_continues_it(body: Body, examples: int) -> None:
    """Under LRU: through stores in pieces, of one request or of all in one offer, matches, loads, touches and
    ends of requests whose prompts branch, an idle block is not evicted while an idle one that continues it
    stays. Left out: blocks of the very offer for which room is made, which are not evicted, and blocks that
    cannot be hit, because a block before them has gone."""

    @settings(max_examples=examples, deadline=None)
    @given(steps=moves, seed=st.integers(0, 1 << 32))
    def check(steps: list[tuple[str, int, int]], seed: int) -> None:
        core, random, running = new_core("lru", 24), Random(seed), dict[int, tuple[str, list[bytes], int]]()

        def store_pieces(of: Sequence[int], size: int) -> None:
            """Store the next piece of each of these requests, in one offer."""
            pieces = list[list[bytes]]()
            for who in of:
                request, keys, done = running[who]
                pieces.append(keys[done : done + size])
                running[who] = request, keys, done + len(pieces[-1])
            idle = set(order(core)) - {key for piece in pieces for key in piece}
            whole = {key for key in idle if all(key[:end] in core.ledger.index for end in range(1, len(key)))}
            evicted = whole & set(offer(core, pieces, "store"))
            left = idle & set(order(core))
            assert not {key[:-1] for key in left} & evicted, (evicted, left)

        for number, (move, who, size) in enumerate(steps):
            request, keys, _ = running.get(who, ("", [], 0))
            if not request:
                name = "".join(random.choice("ab") if place in (0, 4, 9) else "c" for place in range(20))
                request, keys = f"{who} {number}", prompt(name, random.randint(1, 20))
                running[who] = request, keys, serve(core, request, keys)
            elif move == "s":
                store_pieces([who], size)
            elif move == "o":
                store_pieces(list(running), size)
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
        for other in ADMITTING:
            config = msgspec.structs.replace(core.config, policy=other)
            found = order(Offloader.restarted(restore(snapshot(core.ledger)), config))
            assert [key for key in found if key in held] == held[::-1], other
            assert [key for key in found if key in loaded] == loaded[::-1], other
            if policy != "s3fifo":  # A use moves no block in its queue.
                assert found.index(idle[0]) < found.index(held[0]) < found.index(loaded[0]), other


@EITHER_BODY
@pytest.mark.parametrize("policy", sorted({*ADMITTING} - {"s3fifo"}))
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
def test_a_piece_continues_the_last_block_of_its_request_unless_the_caller_names_another(body: Body) -> None:
    """What a request has matched counts, too. A core that resumes from a snapshot does not know it any more:
    there the caller names the parent."""
    with body():
        core = new_core("lru", 8)
        keys = prompt("a" * 9, 6)
        store(core, "a", keys[:2])
        serve(core, "a", keys)
        other = Offloader.resumed(restore(snapshot(core.ledger)), MemoryLog())
        core.prepare_store("a", keys[2:4], (2, 3))
        other.prepare_store("a", keys[2:4], (2, 3), keys[1])
        for one in (core, other):
            one.prepare_store("a", keys[4:], (4, 5))
            assert [event.parents for event in planned(one)[-2:]] == [((0, 1),), ((0, 3),)]
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
