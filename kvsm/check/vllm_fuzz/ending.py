"""The end of a run: the checks of an engine at rest, and its shutdown.

Four actions on the way to rest, in this order:

=========  ====================================================================================
ask        ask the connector for each prompt of the run, and compare each answer with the
           longest one (`served_prompts.py`, S19)
probe      compare the published KV events with the content of device and host (S10)
fill       replace all blocks of the host by those of new requests. If the host of a fresh
           engine then has more of their blocks, host slots were lost (S4)
shutdown   shut down both sides of the connector: no error (S8), and all threads end (S9)
=========  ====================================================================================

Like any request, `ask`, `probe` and `fill` change the state of a connector. So they are actions, and belong
to the recorded run.
"""

from __future__ import annotations

import threading
from typing import Protocol

from vllm.v1.request import Request, RequestStatus

from kvsm.check.vllm_fuzz.host_probe import (
    FILLED_BLOCKS,
    AskedBlock,
    asked_blocks,
    fillers,
    is_all_there_is,
    may_be_filled,
    new_request,
    repeated,
)
from kvsm.check.vllm_fuzz.kv_event_check import EventName, PublishedEvents
from kvsm.check.vllm_fuzz.served_prompts import AskedEngine, ServedPrompts
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, VOCABULARY, EngineShape
from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.world import Action
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

FIRST_FILLER = VOCABULARY * 16
"""A token that no other request contains."""

THREAD_END_S = 1.0
"""The time within which a thread must end after the shutdown (s)."""


class EndedEngine(AskedEngine, Protocol):
    """The parts of a world that its end uses."""

    @property
    def lost_host_blocks(self) -> int: ...
    def filled_by_fresh(self) -> int: ...
    def add_request(self, name: str, prompt: list[int], outputs: int, salt: int) -> None: ...
    def forget_request(self, name: str) -> None: ...
    def to_rest(self) -> None: ...


class Ending:
    """The end of one engine's run.

    threads: the threads that ran before the engine was created.
    """

    def __init__(self, engine: EndedEngine, threads: set[threading.Thread]) -> None:
        self._engine, self._threads = engine, threads
        self._events = PublishedEvents(engine.scheduler) if engine.shape.kv_events else None
        self._left: list[Action] = [("shutdown",)]
        if may_be_filled(engine.shape):
            self._left.insert(0, ("fill",))
        if self._events is not None:
            self._left.insert(0, ("probe",))
        self._left.insert(0, ("ask",))
        self._probes = 0
        self.is_over = False

    def next(self) -> Action | None:
        """The next action at rest; None after the shutdown."""
        return self._left[0] if self._left else None

    def ask(self) -> bool:
        """Compare each answer to a prompt of the run with the longest one."""
        self._done("ask")
        events = self._events.stored_on_host() if self._events is not None else set[EventName]()
        ServedPrompts(self._engine, events).check()
        self._engine.to_rest()
        return True

    def probe(self) -> bool:
        """Compare the published events with the content of device and host. False if none are published."""
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
        """The blocks of all requests of the run, with what the connector matches; equal requests once."""
        asked, known = list[AskedBlock](), set[bytes]()
        for name, request in list(self._engine.asked.items()):
            hashes = request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]
            if hashes and hashes[-1] not in known:
                known.update(hashes)
                asked += self._asked(name, request)
        return asked

    def fill(self) -> bool:
        """Replace all blocks of the host, and compare how many of them it has with a fresh engine."""
        if not may_be_filled(self._engine.shape):
            return False
        self._done("fill")
        served, fresh = filled(self._engine), self._engine.filled_by_fresh()
        count_case(Property.ONE_RELEASE_PER_HOLD, "hosts that new requests filled", bool(fresh))
        given_up = self._engine.lost_host_blocks
        # The rest of the host may be too small for a single request.
        is_small = self._engine.shape.host_blocks - given_up < FILLED_BLOCKS
        # With a sliding window, a match of a whole prompt may depend on a single block of the host.
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
        """Shut down both sides of the connector. No action can follow."""
        self._left.clear()
        self.is_over = True
        count_case(Property.PROGRESS, "engines that came to rest and were shut down")
        with self._engine.calling("Scheduler.shutdown"):
            self._engine.scheduler.shutdown()
        with self._engine.calling("a worker's shutdown"):
            for rank in self._engine.ranks:
                rank.shutdown()
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        for thread in new:
            thread.join(THREAD_END_S)
            if thread.is_alive():
                raise PropertyBroken(Property.PROGRESS, f"thread {thread.name} runs on after the shutdown")
        return True

    def _done(self, kind: str) -> None:
        self._left = [action for action in self._left if action[0] != kind]

    def _asked(self, name: str, like: Request) -> list[AskedBlock]:
        """The blocks of a new request, whose prompt is this one's prompt and answer, and their matches."""
        engine = self._engine
        request = repeated(f"probe{self._probes}", like)
        self._probes += 1
        with engine.calling(f"a request like {name} waits, and is aborted"):
            engine.scheduler.add_request(request)
            found = asked_blocks(engine.scheduler, request, name)
            engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return found


def filled(engine: EndedEngine) -> int:
    """Serve new requests, one after the other. Returns how many of their blocks the host has then."""
    with engine.calling("Scheduler.reset_prefix_cache"):
        # Otherwise lazy stores would go on storing older blocks, which the device reuses first.
        engine.scheduler.reset_prefix_cache()
    prompts = [[FIRST_FILLER + n] * (FILLED_BLOCKS * BLOCK_TOKENS + 1) for n in range(fillers(engine.shape))]
    for number, prompt in enumerate(prompts):
        engine.add_request(f"filler{number}", prompt, 1, 0)
        engine.to_rest()
        engine.forget_request(f"filler{number}")
    found = 0
    with engine.calling("a request waits, and is aborted"):
        for number, prompt in enumerate(prompts):
            request = new_request(f"again{number}", prompt)
            engine.scheduler.add_request(request)
            found += sum(block.is_matched is True for block in asked_blocks(engine.scheduler, request, ""))
            engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    engine.to_rest()
    return found


def _is_matched_alone(shape: EngineShape) -> bool:
    """Whether the connector must match each block that the host has, regardless of other blocks.

    With a sliding window a match depends on several blocks, and with a drafter it may depend on the next
    block. With chunks of several blocks, a block may be on the host only as a part of another prompt's chunk.
    """
    is_full = shape.windows_of_groups == (0,) and not shape.drafter
    return is_full and shape.extra.get("blocks_per_chunk", 1) == 1
