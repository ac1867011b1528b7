"""Follow the KV events of vLLM engines, and find the engine with the longest cached prefix of a prompt.

    vllm serve MODEL ... --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
        "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
    python examples/kv_event_router.py tcp://10.0.0.1:5557 tcp://10.0.0.2:5557

Write the block hashes of a prompt to its standard input, one prompt a line, separated by spaces: integers, or
hex if the engines have VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0. Each answer is a line of JSON. Connect to the
engines themselves, not to a load balancer; each data-parallel rank has its own ports. An engine may evict
a block after the answer, so the answer is only a preference. Needs pyzmq and msgspec, not kvsm or vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import msgspec
import zmq
import zmq.asyncio

BlockHash: TypeAlias = "bytes | int"
Numbered: TypeAlias = "tuple[int, bytes]"  # the number of a batch since the start of its engine; the batch
DEVICE = "GPU"  # vLLM's name of the medium; the host's is "CPU", and that of disks and stores "STORAGE"
END = -1  # the sequence number that ends a replay


class Event(msgspec.Struct):
    """One of vLLM's KV events, with the fields that a router needs."""

    type: str
    block_hashes: list[bytes | int] = []
    medium: str | None = None
    group_idx: int | None = None


class Batch(msgspec.Struct, array_like=True):
    """The KV events of one engine step."""

    ts: float
    events: list[Event]


class Match(NamedTuple):
    """How many leading blocks of a prompt an engine has. on_device: how many of them need no load."""

    blocks: int
    on_device: int
    engine: str


class View:
    """The blocks of one engine, computed from its events. `blocks`: medium -> (group, block hash)."""

    def __init__(self) -> None:
        self.blocks: defaultdict[str, set[tuple[int, BlockHash]]] = defaultdict(set)

    def fold(self, event: Event) -> None:
        """Apply one event. An unknown type changes nothing."""
        stored = self.blocks[event.medium or DEVICE]
        named = {(event.group_idx or 0, block_hash) for block_hash in event.block_hashes}
        if event.type == "BlockStored":
            stored |= named
        elif event.type == "BlockRemoved":
            stored -= named
        elif event.type == "AllBlocksCleared":
            stored.clear()  # only the device's pool publishes this event, and it names no medium

    def match(self, engine: str, hashes: Sequence[BlockHash], group: int) -> Match:
        """Count the leading blocks of a prompt that this engine has on any medium."""
        media = ([m for m, stored in self.blocks.items() if (group, it) in stored] for it in hashes)
        prefix = list(takewhile(bool, media))
        return Match(len(prefix), sum(DEVICE in found for found in prefix), engine)


class EngineFeed:
    """Follows one engine, and folds each of its batches once, in their order."""

    def __init__(
        self, context: zmq.asyncio.Context, events: str, replay: str, quiet_s: float = 5, answer_s: float = 2
    ) -> None:
        # After quiet_s without a message, ask for missed batches. Wait answer_s for each part of an answer.
        self.view = View()
        self._last: Numbered | None = None  # the last folded batch; None if nothing is known
        self._last_ts = 0.0
        self._context, self._replay, self._quiet_s, self._answer_s = context, replay, quiet_s, answer_s
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.HEARTBEAT_IVL, 1000)  # notice a host that is gone
        self._live.subscribe(b"")
        self._disconnects = self._live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._live.connect(events)

    async def follow(self) -> None:
        """Fold what the engine publishes, until cancelled."""
        await self.catch_up()
        while True:
            heard = await self._live.poll(int(1000 * self._quiet_s))
            message = await self._live.recv_multipart() if heard else None
            # If the engine was restarted, a new batch may have the expected number by chance.
            if await self._was_disconnected() or message is None or not self._continues(*message[1:]):
                await self.catch_up()

    async def catch_up(self) -> None:
        """Ask for the last folded batch and all later ones, and fold the later ones.

        If the answer does not begin with the last folded batch, the engine has restarted, has ended, or no
        longer holds the missed batches. Then drop its blocks, and fold all batches that it still holds.
        """
        is_complete = False
        while not is_complete:
            answer, is_complete = await self._ask(self._last[0] if self._last else 0)
            if self._last is not None and answer[:1] != [self._last]:
                self._last, self.view, is_complete = None, View(), False
                continue
            missed = [batch for batch in answer if batch != self._last]
            for batch in missed:
                self._fold(batch, msgspec.msgpack.decode(batch[1], type=Batch))
            is_complete = is_complete or not missed

    def _continues(self, seq_bytes: bytes, payload: bytes) -> bool:
        """Fold a live batch if it is the next one. Return whether no batch before it is missing."""
        numbered = int.from_bytes(seq_bytes, "big"), payload
        batch = msgspec.msgpack.decode(payload, type=Batch)
        if batch.ts < self._last_ts or numbered == self._last:
            return True  # already folded from an answer, or sent before a restart
        if is_next := numbered[0] == (self._last[0] + 1 if self._last else 0):
            self._fold(numbered, batch)
        return is_next

    def _fold(self, numbered: Numbered, batch: Batch) -> None:
        for event in batch.events:
            self.view.fold(event)
        self._last, self._last_ts = numbered, batch.ts

    async def _was_disconnected(self) -> bool:
        """Whether the connection was lost since the last call: the engine may have restarted."""
        was_disconnected = False
        while await self._disconnects.poll(0):
            was_disconnected = bool(await self._disconnects.recv_multipart())
        return was_disconnected

    async def _ask(self, start: int) -> tuple[list[Numbered], bool]:
        """Ask for the batches from `start` on. Return them up to a gap, and whether that is all."""
        answer: list[Numbered] = []
        with self._context.socket(zmq.DEALER) as asking:  # a new socket receives no answers to older requests
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.RCVHWM, 0)
            asking.connect(self._replay)
            await asking.send_multipart((b"", start.to_bytes(8, "big")))
            while await asking.poll(int(1000 * self._answer_s)):
                *_, seq_bytes, payload = await asking.recv_multipart()
                seq = int.from_bytes(seq_bytes, "big", signed=True)
                if seq == END:
                    return answer, True
                if answer and seq != answer[-1][0] + 1:
                    break
                answer.append((seq, payload))
        return answer, False


def best(engines: Mapping[str, EngineFeed], hashes: Sequence[BlockHash], group: int = 0) -> Match:
    """Return the engine with the longest prefix; of several, the one that loads the fewest blocks.

    group: the KV cache group to look up; in a hybrid model, one with full attention.
    """
    return max(feed.view.match(name, hashes, group) for name, feed in engines.items())


async def main() -> None:
    """Answer questions until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", metavar="tcp://HOST:PORT")
    parser.add_argument("--replay-offset", type=int, default=1, help="port of `replay_endpoint` minus PORT")
    given = parser.parse_args()
    context, engines = zmq.asyncio.Context.instance(), {}
    for name in given.engines:
        host, _, port = name.rpartition(":")
        try:
            engines[name] = EngineFeed(context, name, f"{host}:{int(port) + given.replay_offset}")
        except (ValueError, zmq.ZMQError) as error:
            parser.error(f"{name} is not of the form tcp://HOST:PORT: {error}")
    following = [asyncio.create_task(feed.follow()) for feed in engines.values()]
    while line := await asyncio.to_thread(sys.stdin.readline):
        for ended in filter(asyncio.Task.done, following):
            ended.result()  # raises its error
        try:
            hashes = [int(word) if word.isdigit() else bytes.fromhex(word) for word in line.split()]
            print(json.dumps(best(engines, hashes)._asdict()), flush=True)
        except ValueError as error:
            print(f"block hashes are integers or hex, separated by spaces: {error}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
