"""The process of `kvsm conform` that runs the target's code.

It writes messages to a pipe, one JSON object a line. So if the process ends or hangs, the command knows in
which run. Where possible, a call that hangs or ends the process (`os._exit`, `sys.exit`) is turned into a
broken property, so that its steps can be reduced.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic
from traceback import extract_stack
from types import FrameType
from typing import Any

import msgspec

from kvsm.check.walks.failures import SavedFailure, claim
from kvsm.check.walks.walk import WalkFailure
from kvsm.check.worlds.check_counts import taken_counts, total_counted
from kvsm.cli.conform_targets import Walked, versions_of, walked_of
from kvsm.errors import ConfigError, KvsmError, PropertyBroken, described
from kvsm.properties import Property
from kvsm.system.stopping import CutShort, watching_steps

STALL_S = int(os.environ.get("KVSM_CONFORM_STALL_S", "30"))
"""After this time, a call that has not returned counts as hanging (s)."""

BEAT_S = 1.0
"""The shortest time between two `StepsMade` (s)."""

MOST_DEFECTS = 10
"""The most different defects that are reduced."""


class WorkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must do.

    config: the connector's kv_connector_extra_config.
    seconds: how long to make runs. reduce_seconds: how long to reduce each defect.
    first_run: the number of the first run.
    known: the shapes of the defects that earlier workers have found.
    directory: where defects are saved; empty: they are not.
    """

    target: str
    config: dict[str, Any]
    seed: int
    seconds: float
    reduce_seconds: float
    first_run: int = 0
    known: tuple[str, ...] = ()
    directory: str = ""


class TargetRefused(msgspec.Struct, frozen=True, tag=True):
    """The target cannot be walked."""

    why: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The target was imported. variants: names of its variants, which the runs take in turn."""

    versions: dict[str, str]
    variants: tuple[str, ...]
    not_applicable: dict[str, str]


class RunBegan(msgspec.Struct, frozen=True, tag=True):
    """A run begins."""

    run: int


class StepsMade(msgspec.Struct, frozen=True, tag=True):
    """Steps were made since the last message, in a run or while a defect is reduced."""


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """A run has ended. counts: (property id, case, times)."""

    operations: int
    seconds: float
    counts: list[tuple[str, str, int]]


class DefectFound(msgspec.Struct, frozen=True, tag=True):
    """A run has broken a property. Sent again with the same shape after the steps were reduced.

    steps: the steps and the trace, as text; empty if this shape was found before.
    """

    property_id: str
    message: str
    place: str
    shape: str
    variant: str
    run: int
    steps: str = ""
    reduced: str = ""
    directory: str = ""


class WalkEnded(msgspec.Struct, frozen=True, tag=True):
    """The time is over."""


Message = TargetRefused | Ready | RunBegan | StepsMade | RunEnded | DefectFound | WalkEnded

_VARYING = re.compile(r"\[[^\]]*\]|\([^)]*\)|\{[^}]*\}|'[^']*'|\b[a-z]*\d[\w.]*\b")


def shape_of(property_id: str, message: str, place: str) -> str:
    """Return a text that is equal for two failures of one defect: the property, and the message without names
    and numbers, or the line that raised an error."""
    first = message.split("\n")[0]
    what = place if " raised " in first and place else _VARYING.sub("_", first)
    return f"{property_id}: {what}"


class TargetWorker:
    """Walks a target, and sends messages about it."""

    def __init__(self, order: WorkOrder, send: Callable[[Message], None]) -> None:
        self._order, self._send = order, send
        self._known = set(order.known)

    def work(self) -> None:
        """Walk until the time is over."""
        order = self._order
        try:
            walked = walked_of(order.target, order.config)
        except KvsmError as error:
            self._send(TargetRefused(str(error)))
            return
        reasons = {missing.id: why for missing, why in walked.not_applicable.items()}
        self._send(Ready(versions_of(order.target), walked.variants, reasons))
        taken_counts()
        spent, number = 0.0, order.first_run
        while number == order.first_run or spent < order.seconds:
            self._send(RunBegan(number))
            spent += self._run(walked, number, order.seconds - spent)
            number += 1
        self._send(WalkEnded())

    def _run(self, walked: Walked, number: int, left: float) -> float:
        """Make a run, and return its time. The first run of a worker is never cut short."""
        variant, began = number % len(walked.variants), monotonic()
        may_end = number > self._order.first_run

        def is_over() -> bool:
            return may_end and monotonic() - began > left

        try:
            run = walked.runs(self._order.seed, variant).run(number, is_over)
        except CutShort:
            return left
        seconds = monotonic() - began
        counts = [(tried.id, case, times) for (tried, case), times in taken_counts().items()]
        self._send(RunEnded(run.operations, seconds, counts))
        if run.failure is not None:
            self._report(walked, variant, run.failure)
            taken_counts()
        return seconds

    def _report(self, walked: Walked, variant: int, failure: WalkFailure) -> None:
        found = _found(failure.finding, walked.variants[variant], failure.run)
        is_new = found.shape not in self._known
        self._known.add(found.shape)
        self._send(found)
        if not is_new or len(self._known) > MOST_DEFECTS:
            return
        self._send(RunBegan(failure.run))
        saved = walked.unreduced(self._order.seed, variant, failure)
        self._tell(walked, variant, saved, found)
        end = monotonic() + self._order.reduce_seconds
        smaller = walked.reduced(variant, saved, lambda: monotonic() > end)
        if "Flaky" not in smaller.message:
            saved = smaller
        self._tell(walked, variant, saved, found, self._save(walked, variant, saved))

    def _save(self, walked: Walked, variant: int, saved: SavedFailure) -> str:
        if not self._order.directory:
            return ""
        # An earlier worker may have saved some.
        places = (Path(self._order.directory, str(number)) for number in count(1))
        directory = next(place for place in places if not place.exists())
        claim(directory)
        walked.save(variant, saved, directory)
        return str(directory)

    def _tell(
        self, walked: Walked, variant: int, saved: SavedFailure, found: DefectFound, directory: str = ""
    ) -> None:
        """Send the steps of a defect, as far as they were reduced."""
        steps = "\n".join(" ".join(map(str, action)) for action in saved.actions)
        told = walked.told(variant, saved) if saved.actions else ""
        reduced = (
            f"{len(saved.actions)} steps, {_how(saved)}"
            if saved.actions
            else "not repeated: it depends on time"
        )
        after = _found(saved.finding(), found.variant, found.run)
        self._known.add(after.shape)
        self._send(
            msgspec.structs.replace(
                found,
                message=after.message,
                place=after.place,
                steps=told or steps,
                reduced=reduced,
                directory=directory,
            )
        )


def _how(saved: SavedFailure) -> str:
    if not saved.reruns:
        return "not reduced"
    return f"reduced from {saved.found}{'' if saved.minimal else '; the reduction was cut short'}"


def _found(finding: Any, variant: str, run: int) -> DefectFound:
    id = finding.property.id if isinstance(finding.property, Property) else str(finding.property)
    shape = shape_of(id, finding.message, finding.place)
    return DefectFound(id, finding.message, finding.place, shape, variant, run)


# Ends and hangs of the process.


class Heartbeat:
    """Reports that steps are made, so that a long run differs from a hang. steps: their number so far."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._sent = send, monotonic()
        self.steps = 0

    def step(self) -> None:
        """Record a step, and send `StepsMade` unless it was sent just now."""
        self.steps += 1
        now = monotonic()
        if now - self._sent >= BEAT_S:
            self._sent = now
            self._send(StepsMade())


class HangWatch:
    """Detects a call that does not return: between two looks no case was counted, and no step was made."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._seen = -1, -1

    def look(self, _number: int = 0, frame: FrameType | None = None) -> None:
        """Raise `PropertyBroken` if nothing has happened since the last look.

        Before the first counted case nothing counts as a hang, because importing a target takes longer than
        a call may.
        """
        now = total_counted(), self._heartbeat.steps
        if now != self._seen or not now[0]:
            self._seen = now
            return
        place = _place(frame)
        message = f"a call has not returned after {STALL_S} to {2 * STALL_S} s, at {place}"
        raise PropertyBroken(Property.PROGRESS, message, place)


def _watch(heartbeat: Heartbeat) -> None:
    """From now on, raise `PropertyBroken` when a call hangs, or when the main thread calls `os._exit`."""
    main, here, really_exit = threading.main_thread(), os.getpid(), os._exit

    def exits(status: int) -> Any:
        if os.getpid() != here or threading.current_thread() is not main:
            really_exit(status)
        place = _place(sys._getframe(1))
        message = f"a call raised an end of the process, os._exit({status}), at {place}"
        raise PropertyBroken(Property.LEGAL_CALLS, message, place)

    signal.signal(signal.SIGALRM, HangWatch(heartbeat).look)
    signal.setitimer(signal.ITIMER_REAL, STALL_S, STALL_S)
    os._exit = exits


def _place(frame: FrameType | None) -> str:
    """Return FILE:LINE of the innermost frame outside the standard library, or else of the innermost
    frame."""
    library = os.path.dirname(os.__file__)
    frames = extract_stack(frame)
    theirs = [
        one for one in frames if not one.filename.startswith(library) or "site-packages" in one.filename
    ]
    last = (theirs or list(frames))[-1]
    return f"{last.filename.split('site-packages/')[-1]}:{last.lineno}"


def main() -> None:
    """Carry out the order of the command line."""
    faulthandler.enable(all_threads=False)
    pipe = os.fdopen(int(sys.argv[1]), "wb")
    order = msgspec.json.decode(sys.argv[2], type=WorkOrder)

    def send(message: Message) -> None:
        pipe.write(msgspec.json.encode(message) + b"\n")
        pipe.flush()

    heartbeat = Heartbeat(send)
    try:
        _watch(heartbeat)
        with watching_steps(heartbeat.step):
            TargetWorker(order, send).work()
    except ConfigError as error:
        send(TargetRefused(str(error)))
    except (Exception, SystemExit) as error:
        send(TargetRefused(f"{order.target}: walking it raised {described(error)}"))
        raise
