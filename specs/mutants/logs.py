"""Wrong versions of logging: what the log lacks when it is needed."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the log"
_EMITTER = "kvsm.core.offloader.emitter:EventEmitter"
_WRITER = "kvsm.core.log.writer:LogWriter"

LOGS = (
    Mutant(
        id="M82",
        area=AREA,
        title="the log is flushed before the event that lets jobs leave",
        story="The event that the jobs have left is not in the log when they do, so the log of a "
        "killed process says that nothing was in flight.",
        shows_when="A process is killed right after its jobs went to the workers, and its log is read.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.offloader.transferring:submit",
                """
                core.emit(ev.TransfersSubmitted, transfers)
                core.flush_log(LogFlush.JOBS_LEAVE)
                """,
                """
                core.flush_log(LogFlush.JOBS_LEAVE)
                core.emit(ev.TransfersSubmitted, transfers)
                """,
            ),
        ),
    ),
    Mutant(
        id="M83",
        area=AREA,
        title="jobs leave before a flush that may wait",
        story="With flush_within_ms the flush before jobs leave waits too, so after a kill the log "
        "names the old key of a slot that a copy has overwritten, and a warm restart serves it.",
        shows_when="An engine with flush_within_ms on kept pools evicts a block, and is killed after the "
        "copy.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_EMITTER}.flush_log",
                "waits = reason is LogFlush.REPORTS_TAKEN or reason is LogFlush.STEP_ENDED",
                "waits = reason is not LogFlush.CACHE_RESET",
            ),
        ),
    ),
    Mutant(
        id="M84",
        area=AREA,
        title="a step's end does not flush while copies run",
        story="What a step without jobs has decided is not written as long as a copy is in flight, "
        "forever if that copy hangs.",
        shows_when="A copy hangs, other requests are matched and skipped in later steps, and the process "
        "is killed.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                f"{_EMITTER}.flush_log",
                """
                reason is LogFlush.REPORTS_TAKEN
                or (reason is LogFlush.STEP_ENDED and self._flushed_seq == ledger.seq - 1)
                """,
                "reason is LogFlush.REPORTS_TAKEN or reason is LogFlush.STEP_ENDED",
            ),
        ),
    ),
    Mutant(
        id="M85",
        area=AREA,
        title="a reset is answered before it is in the log",
        story="An idle engine that is killed after a reset starts warm and serves what the reset forbade.",
        shows_when="A reset of an idle engine on kept pools; the process is killed before its next step.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.core.offloader.offloader:Offloader.reset",
                "self.flush_log(LogFlush.CACHE_RESET)",
            ),
        ),
    ),
    Mutant(
        id="M86",
        area=AREA,
        title="closing does not write what is left",
        story="The events of the last step are missing, and the log says that it was closed well.",
        shows_when="An engine closes its log while events wait for a flush.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(Edit(f"{_WRITER}._close", "self._flush(closing=True)", "pass"),),
    ),
    Mutant(
        id="M87",
        area=AREA,
        title="a write that fails hides a sync that failed before it",
        story="Only the events of the failed write count as lost, although the pages before them may be gone "
        "since the failed sync, so after a power loss the log has a hole that no reader is told of.",
        shows_when="With sync_thread a sync fails in the background, and the next write fails before the "
        "writer has heard of it.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                f"{_WRITER}._lose",
                """
                if place.segment.sync_failure is not None and synced.offset < offset:
                    first, offset = synced.seq + 1, synced.offset
                """,
            ),
        ),
    ),
    Mutant(
        id="M88",
        area=AREA,
        title="the next process takes the last one's number",
        story="A process that goes on with a log has the same life as the one before, so its first "
        "event is refused and the engine does not start.",
        shows_when="An engine on kept pools is killed and started again.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                "kvsm.core.log.continued:_behind",
                "return EndedLog(claimed, seq, head.life + 1, head.run, life_id=head.life_id, **more)",
                "return EndedLog(claimed, seq, head.life, head.run, life_id=head.life_id, **more)",
            ),
        ),
    ),
    Mutant(
        id="M89",
        area=AREA,
        title="an event is logged before it is checked",
        story="An event that the ledger refuses is in the log, which nobody can fold any more.",
        shows_when="A call of the engine is refused, as one with a device block that is in flight.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                f"{_EMITTER}.emit",
                """
                ended = ledger.apply(event)
                if self.log is not None:
                    self._may_change = THE_LOG
                    self.log.append(event)
                """,
                """
                if self.log is not None:
                    self._may_change = THE_LOG
                    self.log.append(event)
                    self._may_change = NOBODY
                ended = ledger.apply(event)
                """,
            ),
        ),
    ),
    Mutant(
        id="M90",
        area=AREA,
        title="a refused event stops the core",
        story="After one call that the ledger refused all later calls are refused too.",
        shows_when="A call of the engine is refused, and it makes another one.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_EMITTER}.emit",
                """
                except (IllegalTransition, InvalidEvent):
                    self._may_change = thread
                    raise
                """,
                """
                except (IllegalTransition, InvalidEvent):
                    raise
                """,
            ),
        ),
    ),
    Mutant(
        id="M91",
        area=AREA,
        title="a flush right after another one writes nothing",
        story="For the time of a sync interval a flush looks at the clock alone, so jobs leave "
        "without their plan in the log.",
        shows_when="Two steps with jobs within 100 ms, and the process is killed.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_WRITER}.flush",
                "if not self._place.events and "
                "self._flushed_ns <= time.monotonic_ns() < self._nothing_until_ns:",
                "if self._flushed_ns <= time.monotonic_ns() < self._nothing_until_ns:",
            ),
        ),
    ),
    Mutant(
        id="M92",
        area=AREA,
        title="a log that goes on keeps the torn end",
        story="A new process writes behind the half frame that a killed one has left, so a reader "
        "stops there and calls the log damaged.",
        shows_when="A process is killed in the middle of a write, and another one goes on.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.log.continued:_inherit",
                """
                if end.torn is not None and Path(end.torn.path) == path:
                    older.cut(end.torn.offset)
                """,
            ),
        ),
    ),
)
