"""A publisher of KV events over ZeroMQ, with vLLM's messages, that loses and delays them on command.

`tests/in_vllm/test_routed_engines.py` runs the same router on vLLM's own publisher.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from places import ROOT

END = -1
"""The number of the message that ends an answer."""

Key = tuple[str, int, "bytes | int"]
"""A block as events name it: medium, KV cache group, hash."""


def load_router() -> Any:
    """Return `examples/kv_event_router.py` as a module."""
    spec = importlib.util.spec_from_file_location("kv_event_router", ROOT / "examples" / "kv_event_router.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # msgspec looks for the names in annotations
    spec.loader.exec_module(module)
    return module


def stored(*hashes: bytes | int, medium: str = "CPU", group: int = 0) -> dict[str, Any]:
    """A `BlockStored` as vLLM encodes it, with fields that the router does not know."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": group,
    }


def removed(*hashes: bytes | int, medium: str = "CPU", group: int = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": group}


def cleared() -> dict[str, Any]:
    """The reset of the device's prefix cache."""
    return {"type": "AllBlocksCleared"}


def keys_after(batches: Iterable[Sequence[dict[str, Any]]]) -> set[Key]:
    """Return the blocks that an engine has after these batches: the last event of each block decides."""
    state: dict[Key, bool] = {}
    for event in (event for events in batches for event in events):
        if event["type"] == "AllBlocksCleared":
            state = {key: has and key[0] != "GPU" for key, has in state.items()}
        for block_hash in event.get("block_hashes", ()):
            state[event["medium"], event["group_idx"], block_hash] = event["type"] == "BlockStored"
    return {key for key, has in state.items() if has}


def keys_of(view: Any) -> set[Key]:
    """Return the blocks of a router's view."""
    return {(medium, *key) for medium, keys in view.blocks.items() for key in keys}


class KvEventPublisher:
    """One engine's publisher. It runs in the caller's event loop.

    buffer: how many batches it keeps for replay.
    """

    def __init__(self, buffer: int = 10_000) -> None:
        self._buffer, self._clock = buffer, 0.0
        self.asked: list[int] = []
        """The start of each request for missed batches."""
        self.lost_from_answers: set[int] = set()
        """Numbers of messages that are lost once each."""
        self.start(0, 0)

    def start(self, port: int, replay_port: int) -> None:
        """Begin a life of the engine: numbers start at 0, and nothing is kept for replay. 0: any port."""
        self.batches: list[list[dict[str, Any]]] = []
        self._sent: list[tuple[int, bytes]] = []
        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._live, self.port = self._bind(zmq.XPUB, port)  # a PUB that says who subscribes
        self._replay, self.replay_port = self._bind(zmq.ROUTER, replay_port)
        self._answering = asyncio.ensure_future(self._answer())

    def _bind(self, kind: int, port: int) -> tuple[Any, int]:
        socket = self._context.socket(kind)
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def endpoints(self) -> tuple[str, str]:
        return f"tcp://127.0.0.1:{self.port}", f"tcp://127.0.0.1:{self.replay_port}"

    def add(self, events: list[dict[str, Any]]) -> tuple[bytes, bytes, bytes]:
        """Publish a batch for replay alone, and return the message that has not been sent."""
        self._clock += 1
        payload = msgspec.msgpack.encode([self._clock, events, 0])
        seq = len(self.batches)
        self.batches.append(events)
        self._sent = [*self._sent, (seq, payload)][-self._buffer :]
        return b"", seq.to_bytes(8, "big"), payload

    async def send(self, message: tuple[bytes, bytes, bytes]) -> None:
        await self._live.send_multipart(message)

    async def subscribed(self) -> None:
        """Wait until a router has subscribed: messages before that are lost."""
        assert (await self._live.recv())[:1] == b"\x01"

    async def publish(self, *events: dict[str, Any]) -> None:
        await self.send(self.add(list(events)))

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for seq, payload in [*self._sent, (END, b"")]:
                if seq in self.lost_from_answers:
                    self.lost_from_answers.discard(seq)
                elif seq >= self.asked[-1] or seq == END:
                    seq_bytes = seq.to_bytes(8, "big", signed=True)
                    await self._replay.send_multipart((client, b"", b"", seq_bytes, payload))

    async def restart(self) -> None:
        """End this life, and begin another one at the same ports."""
        self.close()
        await asyncio.to_thread(self._context.term)  # ZeroMQ's own thread closes the ports
        self.start(self.port, self.replay_port)

    def close(self) -> None:
        self._answering.cancel()
        self._live.close()
        self._replay.close()
