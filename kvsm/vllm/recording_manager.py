"""`RecordingManager`: forwards every call to a manager of vLLM, and tells a `ManagerRecorder` about it.

Answers go back unchanged. Whatever happens to the recorder, the manager's caller sees nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingManager

from kvsm.errors import described
from kvsm.vllm.manager_recorder import ManagerRecorder, StoreAnswer

log = init_logger("vllm.kvsm")


class RecordingManager:
    """A manager of vLLM, with a recorder beside it. Whatever is not recorded is the manager's own."""

    def __init__(self, manager: Any, recorder: ManagerRecorder) -> None:
        self._manager, self.recorder = manager, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        answer = self._ask(self._manager.lookup, key, req_context)
        self._note(lambda: self.recorder.looked_up(req_context.req_id, key, answer.name))
        return answer

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        answer = self._ask(self._manager.prepare_load, keys, req_context)
        self._note(
            lambda: self.recorder.load_prepared(req_context.req_id, list(keys), answer.block_ids.tolist())
        )
        return answer

    def touch(self, keys: Collection[bytes], req_context: Any) -> Any:
        answer = self._ask(self._manager.touch, keys, req_context)
        self._note(lambda: self.recorder.touch(list(keys)))
        return answer

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        try:
            return self._ask(self._manager.complete_load, keys, req_context)
        finally:  # A completion that the manager refuses is one to tell of.
            self._note(lambda: self.recorder.load_completed(req_context.req_id, keys))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        answer = self._ask(self._manager.prepare_store, keys, req_context)
        self._note(
            lambda: self.recorder.store_prepared(req_context.req_id, list(keys), _plan_of(answer)),
        )
        return answer

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> Any:
        try:
            return self._ask(self._manager.complete_store, keys, req_context, success)
        finally:
            self._note(lambda: self.recorder.store_completed(req_context.req_id, keys, success))

    def on_new_request(self, req_context: Any) -> Any:
        answer = self._ask(self._manager.on_new_request, req_context)
        self._note(lambda: self.recorder.arrive(req_context.req_id))
        return answer

    def on_request_finished(self, req_context: Any) -> Any:
        answer = self._ask(self._manager.on_request_finished, req_context)
        self._note(lambda: self.recorder.request_finished(req_context.req_id))
        return answer

    def on_schedule_end(self, context: Any) -> Any:
        answer = self._ask(self._manager.on_schedule_end, context)
        self._note(lambda: self.recorder.schedule_ended(context.preempted_req_ids))
        return answer

    def take_events(self) -> Iterator[Any]:
        taken = []
        for event in self._manager.take_events():
            taken.append((event.keys, event.removed))
            yield event
        self._note(lambda: self.recorder.announced(taken))

    def reset_cache(self) -> Any:
        answer = self._ask(self._manager.reset_cache)
        self._note(self.recorder.cache_reset)
        return answer

    def get_stats(self) -> Any:
        answer = self._ask(self._manager.get_stats)
        if answer is not None:
            self._note(lambda: self.recorder.counted(answer.reduce()))
        return answer

    def shutdown(self) -> Any:
        answer = self._ask(self._manager.shutdown)
        self._note(lambda: self.recorder.stop("the manager was shut down"))
        return answer

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The manager's answer. One that raises ends the engine: then the log is to have all before it."""
        try:
            return call(*arguments)
        except BaseException:
            self._note(self.recorder.sync)
            raise

    def _note(self, tell: Callable[[], object]) -> None:
        """Let the recorder hear of it. Whatever becomes of that, vLLM goes on."""
        recorder = self.recorder
        if recorder.stopped is not None:
            return
        try:
            tell()
        except Exception as error:
            # An illegal event has stopped the recorder, and been told of, by now.
            if recorder.stopped is None:
                recorder.stop(described(error))
                log.exception("kvsm: the recorder failed, and records no more; vLLM's offload goes on")


def _plan_of(answer: Any) -> StoreAnswer | None:
    """A `PrepareStoreOutput`, in plain lists."""
    if answer is None:
        return None
    return StoreAnswer(
        list(answer.keys_to_store), answer.store_spec.block_ids.tolist(), list(answer.evicted_keys)
    )


# For whoever asks whether it is a manager. It inherits nothing: each method is the recorded manager's.
OffloadingManager.register(RecordingManager)
