"""The managers to learn, each with a pool of one block: vLLM's, and one made of the block machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvsm.states import block
from kvsm.states.block import BLOCK, EVICTED, BlockState
from kvsm.states.machine import UndefinedStep


def vllms() -> CPUOffloadingManager:
    """vLLM's manager."""
    return CPUOffloadingManager(1, enable_events=True)


READABLE = (BlockState.STORED, BlockState.LOADING)
INDEXED = (BlockState.ALLOCATED, BlockState.STORING, *READABLE)


class Event(NamedTuple):
    """A KV event of the block machine's manager."""

    keys: Sequence[bytes]
    removed: bool
    metadata_only: bool = False


class Output(NamedTuple):
    """The answer to an offer."""

    keys_to_store: Sequence[bytes]
    evicted_keys: Sequence[bytes]


class TableManager:
    """A manager whose only state is a block of the block machine, and the block's key.

    Every change of the block is a step of the machine. The steps cause the KV events: `stored` when the block
    becomes readable, `removed` when it stops being readable, and `forget` when it is evicted without ever
    having been readable.
    """

    # ruff: noqa: ARG002 (vLLM's signatures)

    def __init__(self) -> None:
        self.state, self.counts = int(BLOCK.initial), (0, 0)
        self._key = b""
        """The key of the block, or the one that it had last."""
        self._was_readable = False
        self._pinning: set[str] = set()
        self._old_copies = 0
        self._events: list[Event] = []

    def _take(self, trigger: int) -> bool:
        """Take a step. Returns False if no row allows it."""
        before = self.state
        try:
            self.state, self.counts = BLOCK.step(before, self.counts, trigger)
        except UndefinedStep:
            return False
        was, readable = before in READABLE, self.state in READABLE
        if was != readable:
            self._was_readable = True
            self._events.append(Event([self._key], removed=was))
        if self.state == EVICTED and before != EVICTED and not self._was_readable:
            self._events.append(Event([self._key], removed=True, metadata_only=True))
        return True

    def lookup(self, key: bytes, request: Any) -> LookupResult:
        """Look up a key. A hit is pinned until the step ends."""
        if key != self._key or self.state not in INDEXED:
            return LookupResult.MISS
        if request.req_id not in self._pinning:
            if not self._take(block.PIN):
                return LookupResult.HIT_PENDING
            self._pinning.add(request.req_id)
        return LookupResult.HIT

    def prepare_load(self, keys: Collection[bytes], request: Any) -> None:
        self._pinning.remove(request.req_id)
        self._must(block.BEGIN_LOAD)

    def complete_load(self, keys: Collection[bytes], request: Any) -> None:
        self._must(block.END_COPY_GOOD)

    def prepare_store(self, keys: Sequence[bytes], request: Any) -> Output | None:
        if keys[0] == self._key and self.state in INDEXED:
            return Output([], [])
        evicted = [self._key] if self._take(block.EVICT) else []
        if not self._take(block.ALLOCATE):
            return None
        self._key, self._was_readable = keys[0], False
        self._must(block.SUBMIT_STORE)
        return Output(keys, evicted)

    def complete_store(self, keys: Collection[bytes], request: Any, success: bool = True) -> None:
        self._must(block.END_COPY_GOOD if success else block.END_COPY_BAD)

    def reset_cache(self) -> None:
        self._pinning.clear()
        self._old_copies = self.counts[0]
        self._must(block.INVALIDATE)

    def on_reset_flushed(self) -> None:
        for _ in range(self._old_copies):
            self._must(block.END_COPY_GOOD)
        self._old_copies = 0

    def on_schedule_end(self, context: Any) -> None:
        for _ in self._pinning:
            self._must(block.UNPIN)
        self._pinning.clear()

    def _must(self, trigger: int) -> None:
        if not self._take(trigger):
            raise UndefinedStep(f"{self}: {block.BlockTrigger(trigger).name}")

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def on_new_request(self, request: Any) -> None:
        pass

    def on_request_finished(self, request: Any) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def __str__(self) -> str:
        (copies, pins), state = self.counts, BlockState(self.state).name
        counted = [f"{copies} cop{'y' if copies == 1 else 'ies'}"] * bool(copies) + [f"{pins} pin"] * bool(
            pins
        )
        return f"{state}: {', '.join(counted)}" if counted else state


MANAGERS: dict[str, Callable[[], Any]] = {"vLLM": vllms, "table": TableManager}
"""Name on the page -> the function that creates the manager."""
