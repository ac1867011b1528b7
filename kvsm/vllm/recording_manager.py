"""`RecordingManager`: forward every call to a manager of vLLM, and let a `ManagerRecorder` record it.

Answers are returned unchanged; only the statistics get two metrics of the event log. If the recorder fails,
vLLM's log says so once, and vLLM continues without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingManager

from kvsm.core.offloader import LogFlush
from kvsm.errors import described
from kvsm.vllm.log_stats import LogStats
from kvsm.vllm.manager_recorder import ManagerRecorder
from kvsm.vllm.versions import features

log = init_logger("vllm.kvsm")


class RecordingManager:
    """A manager of vLLM with a recorder beside it. `RECORDED` adds the recorded methods to this class.

    It does not inherit from `OffloadingManager`, so that every other method is the recorded manager's own.
    """

    def __init__(self, manager: Any, recorder: ManagerRecorder, log_stats: LogStats | None = None) -> None:
        """Make a recording manager. log_stats: adds the log's metrics to the statistics; None: adds none."""
        self._manager, self.recorder = manager, recorder
        self._log_stats = log_stats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def _note(self, record: Callable[..., object], *arguments: Any, **named: Any) -> None:
        """Call the recorder. Its exceptions do not reach vLLM."""
        recorder = self.recorder
        if recorder.stopped is not None:
            return
        try:
            record(recorder, *arguments, **named)
        except Exception as error:
            # After an illegal event the recorder has already stopped and logged why.
            if recorder.stopped is None:
                recorder.stop(described(error))
                log.exception("kvsm: the recorder failed, and recording has ended; vLLM's offload continues")


def _record_load(recorder: ManagerRecorder, answer: Any, keys: Any, req_context: Any) -> None:
    recorder.load_prepared(req_context.req_id, list(keys), answer.block_ids.tolist())


def _record_store(recorder: ManagerRecorder, answer: Any, keys: Any, req_context: Any) -> None:
    request, offered = req_context.req_id, list(keys)
    if features().schedule_end_is_last:
        # The workers finish the copies from before a reset before they begin a store of the next step.
        recorder.abandoned_ended()
    if answer is None:
        recorder.store_prepared(request, offered, (), (), (), has_room=False)
    else:
        slots = answer.store_spec.block_ids.tolist()
        recorder.store_prepared(request, offered, answer.keys_to_store, slots, answer.evicted_keys)


def _record_load_end(recorder: ManagerRecorder, _: Any, keys: Any, req_context: Any) -> None:
    recorder.load_completed(req_context.req_id, keys)


def _record_store_end(
    recorder: ManagerRecorder, _: Any, keys: Any, req_context: Any, success: bool = True
) -> None:
    recorder.store_completed(req_context.req_id, keys, success)


RECORDED: Mapping[str, Callable[..., object]] = {
    "lookup": lambda recorder, answer, key, req_context: recorder.looked_up(
        req_context.req_id, key, answer.name
    ),
    "prepare_load": _record_load,
    "touch": lambda recorder, _, keys, req_context: recorder.touch(list(keys)),  # noqa: ARG005
    "complete_load": _record_load_end,
    "prepare_store": _record_store,
    "complete_store": _record_store_end,
    "on_new_request": lambda recorder, _, req_context: recorder.arrive(req_context.req_id),
    "on_request_finished": lambda recorder, _, req_context: recorder.request_finished(req_context.req_id),
    "on_schedule_end": lambda recorder, _, context: recorder.schedule_ended(context.preempted_req_ids),
    "take_events": lambda recorder, events: recorder.announced(
        # vLLM does not publish events that are only metadata.
        [(event.keys, event.removed) for event in events if not getattr(event, "metadata_only", False)]
    ),
    "reset_cache": lambda recorder, _: recorder.cache_reset(),
    "get_stats": lambda recorder, stats: recorder.counted({} if stats is None else stats.reduce()),
    "shutdown": lambda recorder, _: recorder.stop("the manager was shut down"),
}
"""A manager's method -> the function that records a call: (recorder, answer, the call's arguments)."""

NOT_RECORDED = frozenset({"config_info", "get_load_source", "has_pending_work", "lock", "on_reset_flushed"})
"""Methods that change no state and show no property."""

_COMPLETIONS = (_record_load_end, _record_store_end)


def _recorded(name: str, record: Callable[..., object]) -> Callable[..., Any]:
    def call(self: RecordingManager, *arguments: Any, **named: Any) -> Any:
        try:
            answer = getattr(self._manager, name)(*arguments, **named)
        except BaseException:
            # This ends the engine, so the log must be complete. A completion that is refused is recorded too.
            self._note(ManagerRecorder.flush_log, LogFlush.ENGINE_FAILS)
            if record in _COMPLETIONS:
                self._note(record, None, *arguments, **named)
            raise
        if isinstance(answer, Iterator):
            answer = list(answer)
        self._note(record, answer, *arguments, **named)
        if name == "get_stats" and self._log_stats is not None:
            return self._log_stats.added_to(answer)
        return answer

    return call


for _name, _record in RECORDED.items():
    setattr(RecordingManager, _name, _recorded(_name, _record))

OffloadingManager.register(RecordingManager)
