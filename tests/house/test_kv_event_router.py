"""`examples/kv_event_router.py` knows which blocks each engine has, whatever messages are lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

pytest.importorskip("zmq", reason="pyzmq is not installed")

from kv_event_publisher import (
    END,
    KvEventPublisher,
    cleared,
    keys_after,
    keys_of,
    load_router,
    removed,
    stored,
)

from examples import examples

router = load_router()

QUIET_S = 0.02
"""The router's own value is 5 s."""


@asynccontextmanager
async def followed(publisher: KvEventPublisher, quiet_s: float = QUIET_S) -> AsyncIterator[Any]:
    """The router's feed of this publisher, while it follows."""
    context = router.zmq.asyncio.Context()
    feed = router.EngineFeed(context, *publisher.endpoints, quiet_s=quiet_s, answer_s=0.5)
    following = asyncio.ensure_future(feed.follow())
    try:
        yield feed
        assert not following.done(), following.exception()
    finally:
        following.cancel()
        context.destroy(linger=0)
        publisher.close()


async def until_known(feed: Any, publisher: KvEventPublisher) -> None:
    """Wait until the view is what the engine has. The limit only ends failing tests."""
    right = keys_after(publisher.batches)
    for _ in range(500):
        if keys_of(feed.view) == right:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the view has {keys_of(feed.view)}, the engine {right}")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


HASHES = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)
MEDIA = st.sampled_from(("GPU", "CPU"))
EVENTS = st.one_of(
    st.builds(lambda hashes, medium: stored(*hashes, medium=medium), HASHES, MEDIA),
    st.builds(lambda hashes, medium: removed(*hashes, medium=medium), HASHES, MEDIA),
    st.builds(cleared),
)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(("publish", "publish", "lose", "delay")), st.lists(EVENTS, max_size=3)),
    st.tuples(st.sampled_from(("pause", "restart")), st.just([])),
)


async def carry_out(actions: list[tuple[str, list[Any]]]) -> None:
    """Publish as the actions say. The router's view must be the fold of all batches at each pause, and at
    the end."""
    publisher = KvEventPublisher()
    late: list[Any] = []
    async with followed(publisher) as feed:
        for action, events in actions:
            if action == "pause":
                await until_known(feed, publisher)
            elif action == "restart":
                late.clear()
                await publisher.restart()
            elif action == "publish":
                await publisher.publish(*events)
                while late:
                    await publisher.send(late.pop())
            else:
                message = publisher.add(events)
                late += [message] if action == "delay" else []
        await until_known(feed, publisher)


@settings(max_examples=examples(60), deadline=None)
@given(actions=st.lists(ACTIONS, min_size=3, max_size=20))
def test_the_view_is_what_the_engine_has_whatever_messages_are_lost(actions: list[Any]) -> None:
    """Live messages are lost and reordered, and the engine restarts. Replay has all batches."""
    run(carry_out(actions))


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_the_view_is_what_the_engine_has_whatever_messages_are_lost_long(actions: list[Any]) -> None:
    run(carry_out(actions))


def test_a_gap_is_asked_for_at_once() -> None:
    """The router does not wait until the engine is quiet, and asks from the last batch that it has."""

    async def test() -> None:
        publisher = KvEventPublisher()
        publisher.add([stored(0)])
        publisher.add([stored(1)])
        async with followed(publisher, quiet_s=50) as feed:
            await publisher.subscribed()
            await until_known(feed, publisher)
            publisher.add([stored(2)])
            await publisher.publish(stored(3))
            await until_known(feed, publisher)
            assert publisher.asked == [0, 1]

    run(test())


def test_a_message_that_was_already_replayed_is_not_folded_again() -> None:
    async def test() -> None:
        publisher = KvEventPublisher()
        early = [publisher.add([stored(0)]), publisher.add([removed(0)])]
        async with followed(publisher, quiet_s=50) as feed:
            await publisher.subscribed()
            while not publisher.asked:
                await asyncio.sleep(0.01)
            await publisher.send(early[0])
            await publisher.publish(stored(1))
            await until_known(feed, publisher)
            assert publisher.asked == [0]

    run(test())


def test_a_batch_of_a_restarted_engine_is_not_taken_for_the_next_one() -> None:
    """It has the next number, but comes from an engine that lost all its blocks."""

    async def test() -> None:
        publisher = KvEventPublisher()
        publisher.add([stored(0)])
        async with followed(publisher, quiet_s=50) as feed:
            await publisher.subscribed()
            await until_known(feed, publisher)
            await publisher.restart()
            await publisher.subscribed()
            publisher.add([stored(1)])
            await publisher.publish(stored(2))
            await until_known(feed, publisher)

    run(test())


@pytest.mark.parametrize(("lost", "asked"), [({3, 5}, [0, 2]), ({END}, [0, 8]), ({3, 6, END}, [0, 2])])
def test_an_answer_that_lost_messages_is_asked_for_again(lost: set[int], asked: list[int]) -> None:
    """The replay socket of vLLM 0.32 drops messages of a long answer, perhaps the last one too."""

    async def test() -> None:
        publisher = KvEventPublisher()
        for number in range(9):
            publisher.add([stored(number)])
        publisher.lost_from_answers = lost
        async with followed(publisher, quiet_s=50) as feed:
            await until_known(feed, publisher)
            while len(publisher.asked) < 2:
                await asyncio.sleep(0.01)
            assert publisher.asked == asked

    run(test())


def test_a_view_never_has_a_block_that_was_removed_while_nothing_could_be_replayed() -> None:
    """The replay buffer has the last two batches only. Then a view has too few blocks, and none too many."""

    async def test() -> None:
        publisher = KvEventPublisher(buffer=2)
        await publisher.publish(stored(0, 1))
        async with followed(publisher) as feed:
            await until_known(feed, publisher)
            for events in ([removed(0)], [stored(2)], [stored(3)], [stored(4)]):
                publisher.add(events)
            while ("CPU", 0, 4) not in keys_of(feed.view):
                await asyncio.sleep(0.01)
            assert keys_of(feed.view) == {("CPU", 0, 3), ("CPU", 0, 4)}

    run(test())


def test_an_engine_that_is_gone_has_nothing() -> None:
    async def test() -> None:
        publisher = KvEventPublisher()
        await publisher.publish(stored(0))
        async with followed(publisher) as feed:
            await until_known(feed, publisher)
            publisher.close()
            while keys_of(feed.view):
                await asyncio.sleep(0.01)

    run(test())


def test_the_engine_with_the_longest_prefix_is_chosen_and_of_two_the_one_that_loads_less() -> None:
    def feed(*events: dict[str, Any]) -> Any:
        view = router.View()
        for event in events:
            view.fold(router.msgspec.convert(event, router.Event))
        return type("Feed", (), {"view": view})

    engines = {
        "short": feed(stored(1, 2, medium="GPU"), stored(9, medium="CPU")),
        "host": feed(stored(1, medium="GPU"), stored(2, 3)),
        "device": feed(stored(1, 2, medium="GPU"), stored(3), stored(4, group=1)),
        "gap": feed(stored(1, 3, 4, medium="GPU")),
    }
    assert router.best(engines, [1, 2, 3, 4]) == (3, 2, "device")
    assert router.best(engines, [9, 3]) == (1, 0, "short")
    assert router.best(engines, [4], group=1) == (1, 0, "device")
    assert router.best(engines, [7])[:2] == (0, 0)


def test_a_reset_of_the_device_clears_no_other_medium_and_unknown_events_nothing() -> None:
    view = router.View()
    events = [stored(1, medium="GPU"), stored(1), {"type": "BlockMoved", "block_hashes": [1]}, cleared()]
    for event in events[:-1]:
        view.fold(router.msgspec.convert(event, router.Event))
    assert keys_of(view) == {("GPU", 0, 1), ("CPU", 0, 1)}
    view.fold(router.msgspec.convert(cleared(), router.Event))
    assert keys_of(view) == {("CPU", 0, 1)} == keys_after([[events[0], events[1], cleared()]])


def test_the_command_answers_each_line() -> None:
    """Wrong input is named, and the next line is answered."""

    async def test() -> None:
        publisher = KvEventPublisher()
        await publisher.publish(stored(1, 2), stored(b"\xab\xcd", medium="GPU"))
        offset = publisher.replay_port - publisher.port
        command = [sys.executable, str(ROOT / "examples" / "kv_event_router.py"), publisher.endpoints[0]]
        process = await asyncio.create_subprocess_exec(
            *command,
            f"--replay-offset={offset}",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None

        async def ask(line: str) -> Any:
            process.stdin.write(f"{line}\n".encode())
            return json.loads(await process.stdout.readline())

        while (await ask("1 2 3"))["blocks"] != 2:
            await asyncio.sleep(0.02)
        assert await ask("abcd 1 7") == {"blocks": 2, "on_device": 1, "engine": publisher.endpoints[0]}
        process.stdin.write(b"no-hash\n")
        assert (await ask("1"))["blocks"] == 1
        _, said = await process.communicate(b"")
        assert said.startswith(b"block hashes are integers or hex, separated by spaces: ")
        assert process.returncode == 0
        publisher.close()

    run(test())


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "10.0.0.1:5557", "nonsense"])
def test_the_command_names_a_wrong_endpoint(endpoint: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "kv_event_router.py"), endpoint]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"error: {endpoint} is not of the form tcp://HOST:PORT" in ended.stderr
