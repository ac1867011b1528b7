"""The end of a run: what is asked of an engine at rest, and how it is shut down.

Three actions on the way to rest, in this order:

=========  ====================================================================================
probe      the published KV events are compared with what the device and the host have (S10)
fill       new requests replace all that the host has. A fresh engine serves as many of their
           blocks, or the host has lost slots (S4)
shutdown   both sides are shut down: no error (S8), and their threads end (S9)
=========  ====================================================================================

`probe` and `fill` change what a connector does next, as requests do. So they are actions: what happens after
them in a run is told, and repeated, with them.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvsm.check.vllm_fuzz.configs import hasher
from kvsm.check.vllm_fuzz.host_probe import (
    FILLED_BLOCKS,
    AskedBlock,
    asked_blocks,
    fillers,
    is_all_there_is,
    may_be_filled,
)
from kvsm.check.vllm_fuzz.kv_event_check import PublishedEvents
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, MOST_TOKENS, VOCABULARY, EngineShape
from kvsm.check.worlds.world import Action
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

FIRST_FILLER = VOCABULARY * 16
"""A token that no request has."""

THREAD_END_S = 1.0
"""How long a thread may take to end after the shutdown."""


class EndedEngine(Protocol):
    """What the end needs of a world."""

    shape: EngineShape
    scheduler: Any
    ranks: list[Any]
    asked: dict[str, Request]

    @property
    def lost_host_blocks(self) -> int: ...
    def filled_by_fresh(self) -> int: ...
    def calling(self, what: str) -> Any: ...
    def add_request(self, name: str, prompt: list[int], outputs: int, salt: int) -> None: ...
    def forget_request(self, name: str) -> None: ...
    def to_rest(self) -> None: ...


class Ending:
    """The end of one engine.

    threads: those that ran before the engine was made.
    """

    def __init__(self, engine: EndedEngine, threads: set[threading.Thread]) -> None:
        self._engine, self._threads = engine, threads
        self._events = PublishedEvents(engine.scheduler) if engine.shape.kv_events else None
        self._left: list[Action] = [("shutdown",)]
        if may_be_filled(engine.shape):
            self._left.insert(0, ("fill",))
        if self._events is not None:
            self._left.insert(0, ("probe",))
        self._probes = 0
        self.is_over = False

    def next(self) -> Action | None:
        """What happens next at rest; None: nothing more."""
        return self._left[0] if self._left else None

    def probe(self) -> bool:
        """Compare the published events with what is there. False if none are published."""
        if self._events is None:
            return False
        self._done("probe")
        engine = self._engine
        with engine.calling("take_events"):
            self._events.check_device()
        if is_all_there_is(engine.shape):
            asked = self._asked_of_all()
            with engine.calling("take_events"):
                self._events.check_host(asked, is_whole=_is_matched_alone(engine.shape))
        engine.to_rest()
        return True

    def _asked_of_all(self) -> list[AskedBlock]:
        """What the connector matches of each request that there was, but of equal ones once."""
        asked, known = list[AskedBlock](), set[bytes]()
        for name, request in list(self._engine.asked.items()):
            hashes = request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]
            if hashes and hashes[-1] not in known:
                known.update(hashes)
                asked += self._asked(name, request)
        return asked

    def fill(self) -> bool:
        """Replace all that the host has, and compare what it serves with a fresh engine."""
        if not may_be_filled(self._engine.shape):
            return False
        self._done("fill")
        served, fresh = filled(self._engine), self._engine.filled_by_fresh()
        given_up = self._engine.lost_host_blocks
        # In what is left of the host, a request must have room.
        is_small = self._engine.shape.host_blocks - given_up < FILLED_BLOCKS
        # With a sliding window, one block on the host may serve a whole prompt.
        missing = given_up * (FILLED_BLOCKS if self._engine.shape.windows else 1)
        if served + missing < fresh and not is_small:
            lost = f" (up to {given_up} of them by copies that were given up)" if given_up else ""
            raise PropertyBroken(
                Property.ONE_RELEASE_PER_HOLD,
                f"{fillers(self._engine.shape)} new requests were served; the host has {served} of their "
                f"blocks, and the host of a fresh engine has {fresh}: host blocks are lost{lost}",
            )
        return True

    def shutdown(self) -> bool:
        """Shut down both sides. Nothing can happen afterwards."""
        self._left.clear()
        self.is_over = True
        with self._engine.calling("Scheduler.shutdown"):
            self._engine.scheduler.shutdown()
        with self._engine.calling("a worker's shutdown"):
            for rank in self._engine.ranks:
                rank.shutdown()
        new = [one for one in threading.enumerate() if one not in self._threads]
        for thread in new:
            thread.join(THREAD_END_S)
            if thread.is_alive():
                raise PropertyBroken(Property.PROGRESS, f"thread {thread.name} runs on after the shutdown")
        return True

    def _done(self, kind: str) -> None:
        self._left = [action for action in self._left if action[0] != kind]

    def _asked(self, name: str, like: Request) -> list[AskedBlock]:
        """What the connector matches of a request like this one, with an answer as its prompt."""
        engine = self._engine
        # A match leaves a token to compute.
        prompt = [*like.all_token_ids[: MOST_TOKENS - 1], 0]
        request = _request(f"probe{self._probes}", prompt, like.cache_salt, like.lora_request)
        self._probes += 1
        with engine.calling(f"a request like {name} waits, and is aborted"):
            engine.scheduler.add_request(request)
            found = asked_blocks(engine.scheduler, request, name)
            engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return found


def filled(engine: EndedEngine) -> int:
    """Serve new requests, one after the other; then ask how many blocks of them the host has."""
    with engine.calling("Scheduler.reset_prefix_cache"):
        # Lazy stores take what the device is about to forget, and that would be older blocks for long.
        engine.scheduler.reset_prefix_cache()
    prompts = [[FIRST_FILLER + n] * (FILLED_BLOCKS * BLOCK_TOKENS + 1) for n in range(fillers(engine.shape))]
    for number, prompt in enumerate(prompts):
        engine.add_request(f"filler{number}", prompt, 1, 0)
        engine.to_rest()
        engine.forget_request(f"filler{number}")
    found = 0
    with engine.calling("a request waits, and is aborted"):
        for number, prompt in enumerate(prompts):
            request = _request(f"again{number}", prompt)
            engine.scheduler.add_request(request)
            found += sum(block.is_matched is True for block in asked_blocks(engine.scheduler, request, ""))
            engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    engine.to_rest()
    return found


def _is_matched_alone(shape: EngineShape) -> bool:
    """Whether the connector matches each block of a request's prefix that the host has.

    A window needs other blocks besides. A block of a chunk may be there in the chunk of another prompt alone.
    """
    return shape.windows_of_groups == (0,) and shape.extra.get("blocks_per_chunk", 1) == 1


def _request(name: str, prompt: list[int], salt: str | None = None, adapter: Any = None) -> Request:
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    return Request(name, prompt, sampling, None, lora_request=adapter, block_hasher=hasher(), cache_salt=salt)
