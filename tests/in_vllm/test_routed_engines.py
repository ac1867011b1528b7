"""`examples/kv_event_router.py` knows which blocks real engines have, from what vLLM publishes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from engine_forks import begin
from kv_event_publisher import keys_of, load_router
from published_events import readable
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from waiting import wait_for

from kvsm.explain.story import rebuild
from kvsm.vllm.tiny_model import BLOCK_TOKENS, VOCABULARY
from kvsm.vllm.trial import Trial, connector_config, environment

HERE = Path(__file__).parent
DEVICE_BLOCKS, HOST_BLOCKS, PROMPT_BLOCKS = 24, 60, 8
"""Neither tier has room for twelve prompts."""

BLOCK_BYTES = 32 << 10
"""Of the tiny model, in all layers."""

router = load_router()


def prompt(number: int) -> list[int]:
    """Return a prompt that shares no block with the others."""
    random = Random(number)
    return [random.randrange(3, VOCABULARY) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS + 5)]


def free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], second.getsockname()[1]]


def is_free(port: int) -> bool:
    """Whether a publisher can bind this port. ZeroMQ closes the last one's in a thread of its own."""
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("0.0.0.0", port))
        return True
    return False


class Engine:
    """The caller's end of `routed_engine.py`. It ends with the `with` block."""

    def __init__(self, ports: list[int], logs: Path) -> None:
        publishing = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports[0]}",
            "replay_endpoint": f"tcp://*:{ports[1]}",
        }
        self._logs = logs
        self._trial = Trial(
            kv_transfer=connector_config(
                cpu_bytes_to_use=HOST_BLOCKS * BLOCK_BYTES, event_log=str(logs), last_step="flush"
            ),
            engine={"num_gpu_blocks_override": DEVICE_BLOCKS, "kv_events_config": publishing},
        )

    def __enter__(self) -> Engine:
        self._connection, theirs = Pipe()
        with theirs, (self._logs.parent / f"{self._logs.name}.txt").open("ab") as said:
            number = theirs.fileno()
            arguments = [str(HERE / "routed_engine.py"), str(number)]
            self._process = begin(arguments, environment(), [number], stdout=said, stderr=said)
        self._connection.send_bytes(msgspec.json.encode(self._trial))
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.wait(120)

    def ready(self) -> Engine:
        assert json.loads(self._connection.recv_bytes())
        return self

    def ask(self, command: str, argument: Any = None) -> Any:
        self._connection.send_bytes(json.dumps([command, argument]).encode())
        return json.loads(self._connection.recv_bytes())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def keys(self) -> set[tuple[str, int, int | bytes]]:
        """Return what the engine has: on the host by kvsm's log, on the device by vLLM's block pool."""
        log = max(self._logs.iterdir())
        on_host = {("CPU", *named) for named in readable(rebuild(log).ledger, whole=False)}
        return on_host | {("GPU", 0, block_hash) for block_hash in self.ask("device")}


class RouterThread:
    """The router, in an event loop of its own."""

    def __init__(self, ports: dict[str, list[int]]) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        self._feeds = self._call(self._start(ports))

    async def _start(self, ports: dict[str, list[int]]) -> dict[str, Any]:
        context = router.zmq.asyncio.Context.instance()
        feeds = {
            name: router.EngineFeed(context, *(f"tcp://127.0.0.1:{port}" for port in pair), quiet_s=0.2)
            for name, pair in ports.items()
        }
        self._following = [asyncio.ensure_future(feed.follow()) for feed in feeds.values()]
        return feeds

    def _call(self, asked: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(60)

    def keys(self, name: str) -> Any:
        async def read() -> Any:
            return keys_of(self._feeds[name].view)

        return self._call(read())

    def best(self, hashes: list[int]) -> Any:
        async def read() -> Any:
            return router.best(self._feeds, hashes)

        return self._call(read())

    def close(self) -> None:
        async def end() -> None:
            for task in self._following:
                task.cancel()
            await asyncio.gather(*self._following, return_exceptions=True)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def following(ports: dict[str, list[int]]) -> Iterator[RouterThread]:
    thread = RouterThread(ports)
    try:
        yield thread
    finally:
        thread.close()


def test_the_router_reads_what_vllms_publisher_sends() -> None:
    """Without an engine: events of each kind, by replay and live, and a publisher that is made again."""
    ports = free_ports()

    def publish(publisher: ZmqEventPublisher, *events: object) -> None:
        publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def stored(medium: str, *hashes: int | bytes) -> BlockStored:
        return BlockStored(
            block_hashes=list(hashes),
            parent_block_hash=None,
            token_ids=[],
            block_size=16,
            lora_id=None,
            medium=medium,
            lora_name=None,
            group_idx=0,
        )

    with following({"engine": ports}) as router_thread:
        for big in (1 << 63, b"\xff" * 32):
            wait_for(lambda: all(map(is_free, ports)), 30)
            publisher = ZmqEventPublisher(0, f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}")
            publish(publisher, stored("GPU", 1, big), stored("CPU", 1, 2))
            wait_for(lambda big=big: ("GPU", 0, big) in router_thread.keys("engine"), 30)
            publish(publisher, BlockRemoved(block_hashes=[2], medium="CPU", group_idx=0))
            publish(publisher, AllBlocksCleared())
            publish(publisher, stored("STORAGE", 3))
            wait_for(lambda: router_thread.keys("engine") == {("CPU", 0, 1), ("STORAGE", 0, 3)}, 30)
            publisher.shutdown()


def test_the_router_knows_what_two_engines_have(tmp_path: Path) -> None:
    """After serving, evictions on both tiers, a reset of both, and the end of one engine by kill -9, whose
    successor has its ports. It prefers the engine that has a prompt."""
    ports = {"first": free_ports(), "second": free_ports()}
    first, second = (Engine(ports[name], tmp_path / name) for name in ports)

    def knows(name: str, engine: Engine) -> None:
        wait_for(lambda: router_thread.keys(name) == engine.keys(), 30)

    with following(ports) as router_thread, first, second:
        first.ready().ask("serve", [prompt(number) for number in range(12)])
        second.ready().ask("serve", [prompt(number) for number in range(20, 22)])
        knows("first", first)
        knows("second", second)
        media = [medium for medium, *_ in router_thread.keys("first")]
        assert HOST_BLOCKS - PROMPT_BLOCKS < media.count("CPU") <= HOST_BLOCKS
        assert 0 < media.count("GPU") < DEVICE_BLOCKS

        for number, right in ((11, "first"), (20, "second")):
            match = router_thread.best(first.ask("hashes", prompt(number)))
            assert (match.engine, match.blocks) == (right, PROMPT_BLOCKS)
        assert router_thread.best(first.ask("hashes", prompt(0))).blocks == 0  # evicted

        # A reset is published with the next step.
        assert first.ask("reset", True)
        assert first.ask("serve", [prompt(11)]) == [0]
        knows("first", first)
        assert {medium for medium, *_ in router_thread.keys("first")} == {"CPU", "GPU"}
        assert router_thread.best(first.ask("hashes", prompt(10))).blocks == 0

        second.kill()
        wait_for(lambda: not router_thread.keys("second"), 30)
        with Engine(ports["second"], tmp_path / "again") as again:
            again.ready().ask("serve", [prompt(11), prompt(30)])
            knows("second", again)
            match = router_thread.best(again.ask("hashes", prompt(30)))
            assert (match.engine, match.blocks) == ("second", PROMPT_BLOCKS)
