"""One run of real threads under control: one thread runs at a time, and each switch is chosen.

A thread of the code under test is an OS thread that waits for its turn. It gives its turn away
only where it calls `reach`: before each operation on a lock, queue, event or file (`primitives.py`), and, if
that is asked for, at lines of chosen modules (`shared_lines.py`). So a list of choices decides a run, and the
same choices give the same run.

A choice is counted only where there are several options. Option 0 continues the running thread or, if it is
blocked, the next runnable thread by number. Any other option is a deviation.

Time is virtual. A wait with a time limit ends when nothing else can run, or at any earlier moment as a
deviation: other threads may be slow.

A run ends when all its threads have ended. It ends early with a finding if a thread raises, if no thread can
run (a deadlock breaks progress, S9), or if it takes too many steps.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock, start_new_thread
from collections import Counter
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn

from kvsm.check.worlds.world import Finding, finding_of
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

MOST_STEPS = 20_000
"""A run with more steps counts as endless."""

GOES_ON = "goes on"
"""The step of a thread that may be interrupted at a line."""

Deviations = tuple[tuple[int, int], ...]
"""A schedule: (number of the choice, option) of each choice whose option is not 0, in order."""

Ready = Callable[[], object]
"""Whether a thread can take its next step."""

TraceCalls = Callable[[FrameType, str, Any], Any]


class RunAbandoned(BaseException):
    """Ends the threads of a run that was ended early. Code under test must not hold it up."""


class ChoicePoint(NamedTuple):
    """A choice of a run.

    number: of the choice in its run.
    options: how many there were.
    free: this number of them, the first ones, cost no preemption.
    signature: of all that had happened before.
    """

    number: int
    options: int
    free: int
    signature: int


class ThreadStep(NamedTuple):
    """A step that a thread took.

    thread: its name.
    place: FILE:LINE.
    what: the operation.
    preempts: whether the thread before it was still runnable, or a wait ended early.
    """

    thread: str
    place: str
    what: str
    preempts: bool


class RunOutcome(NamedTuple):
    """How a run ended.

    points: its choices after the last deviation.
    steps: how many steps it took.
    preemptions: switches away from a runnable thread, plus waits that ended early.
    told: the steps if the run kept them, otherwise empty.
    reached: the words that were passed to `note_reached`.
    """

    finding: Finding | None
    points: list[ChoicePoint]
    steps: int
    preemptions: int
    told: list[ThreadStep]
    reached: frozenset[str]


class TurnThread:
    """A thread under control, and what it does next."""

    __slots__ = (
        "code",
        "deadline_ns",
        "ended",
        "line",
        "name",
        "number",
        "over",
        "ready",
        "starter",
        "timed_out",
        "turn",
        "what",
    )

    def __init__(self, number: int, name: str, starter: TurnThread | None) -> None:
        self.number, self.name = number, name
        self.starter = starter
        """The thread that waits until this one reaches its first step; None if none does."""
        self.turn, self.over = allocate_lock(), allocate_lock()
        self.turn.acquire()
        self.over.acquire()
        self.what, self.code, self.line = "begins", None, 0
        self.ready: Ready | None = None
        self.deadline_ns: int | None = None
        self.timed_out = self.ended = False

    code: CodeType | None
    """With `line` the place of the next step."""

    def is_ready(self) -> bool:
        """Whether it can take its next step now, without a timeout."""
        return self.ready is None or bool(self.ready())

    @property
    def place(self) -> str:
        """FILE:LINE of the next step."""
        return "" if self.code is None else f"{os.path.basename(self.code.co_filename)}:{self.line}"


class ThreadControl:
    """Runs threads one at a time.

    deviations: the choices.
    trace: the trace function of each thread, for switches at lines; None: no such switches.
    telling: whether to keep the steps.
    delays: whether each deviation costs a preemption, also where the running thread is blocked.
    """

    def __init__(
        self,
        deviations: Deviations = (),
        trace: TraceCalls | None = None,
        telling: bool = False,
        delays: bool = False,
    ) -> None:
        self.now_ns = 1_000_000_000
        self.threads: list[TurnThread] = []
        self.current: TurnThread
        self.abandoned = False
        self._deviations: Mapping[int, int] = dict(deviations)
        self._last_deviation = deviations[-1][0] if deviations else -1
        self._trace, self._telling, self._delays = trace, telling, delays
        self._names: Counter[str] = Counter()
        self._stopped = allocate_lock()
        self._stopped.acquire()
        self._finding: Finding | None = None
        self._points: list[ChoicePoint] = []
        self._choices = self._steps = self._preemptions = 0
        self._signature, self._preempts = 0, False
        self._told: list[ThreadStep] = []
        self._reached: set[str] = set()

    def run(self, body: Callable[[], object]) -> RunOutcome:
        """Run `body` in a thread named main, and all that it starts, to the end."""
        global _current
        assert _current is None, "a run is under way"
        _current = self
        try:
            self.current = self._new_thread("main", body, None)
            self.current.turn.release()
            try:
                self._stopped.acquire()
            finally:
                self._abandon()
        finally:
            _current = None
        return RunOutcome(
            self._finding,
            self._points,
            self._steps,
            self._preemptions,
            self._told,
            frozenset(self._reached),
        )

    def begin(self, name: str, body: Callable[[], object]) -> TurnThread:
        """Start a thread and run it up to its first step; nothing before that concerns other threads."""
        me = self.current
        thread = self._new_thread(name, body, me)
        self.current = thread
        thread.turn.release()
        me.turn.acquire()
        if self.abandoned:
            raise RunAbandoned
        return thread

    def reach(
        self, what: str, ready: Ready | None = None, timeout_s: float | None = None, depth: int = 2
    ) -> bool:
        """Announce the next operation of this thread, and wait until it may run. False after a timeout.

        what: the operation, for people.
        ready: whether it can be done; None: always.
        timeout_s: a limit of time (s).
        depth: of the frame of the code under test, above this one.
        """
        if self.abandoned:
            raise RunAbandoned
        me = self.current
        frame = sys._getframe(depth)
        me.what, me.code, me.line, me.ready = what, frame.f_code, frame.f_lineno, ready
        me.deadline_ns = None if timeout_s is None else self.now_ns + max(0, int(timeout_s * 1e9))
        return self._give_turn(me)

    def choose(self, what: str, options: int) -> int:
        """Return one of 0 .. options - 1, as the schedule decides: an outcome of the scenario."""
        if self.abandoned:
            raise RunAbandoned
        chosen = self._option(options, options) if options > 1 else 0
        me, frame = self.current, sys._getframe(1)
        me.code, me.line = frame.f_code, frame.f_lineno
        self._note(me, f"{what}: {chosen}")
        return chosen

    def fail(self, broken: PropertyBroken) -> NoReturn:
        """End the run with this, also where the code under test would catch it."""
        self._stop(finding_of(broken))
        raise RunAbandoned

    def note_reached(self, word: str) -> None:
        """Record that the run has reached the situation that this word names."""
        self._reached.add(word)

    # -------------------------------------------------------------------------------- turns

    def _give_turn(self, me: TurnThread) -> bool:
        """Let the chosen thread take its next step. Returns when this one may take its own."""
        chosen = me.starter or self._chosen(me)
        me.starter = None
        if chosen is None:
            raise RunAbandoned
        if chosen is not me:
            self.current = chosen
            chosen.turn.release()
            me.turn.acquire()
            if self.abandoned:
                raise RunAbandoned
        me.ready = me.deadline_ns = None
        self._note(me, me.what)
        return not me.timed_out

    def _chosen(self, me: TurnThread) -> TurnThread | None:
        """The thread whose turn it is. None if the run is over."""
        threads, at = self.threads, me.number
        live = [one for one in (me, *threads[at + 1 :], *threads[:at]) if not one.ended]
        ways = [one for one in live if one.is_ready()]
        if not ways and not self._finding:
            timed = [one for one in live if one.deadline_ns is not None]
            if timed:
                first = min(timed, key=lambda one: (one.deadline_ns or 0, one.number))
                return self._time_out(first)
            if live:
                self._stop(Finding(Property.PROGRESS, f"no thread can go on: {self._blocked_text(live)}"))
        if not live or self._finding:
            self.abandoned = True
            self._stopped.release()
            return None
        free = 1 if ways[0] is me or self._delays else len(ways)
        able = len(ways)
        ways += [one for one in live if one.deadline_ns is not None and one not in ways]
        option = self._option(len(ways), free) if len(ways) > 1 else 0
        if option >= free:
            self._preemptions, self._preempts = self._preemptions + 1, True
        chosen = ways[option]
        if option >= able:
            return self._time_out(chosen)
        chosen.timed_out = False
        return chosen

    def _time_out(self, chosen: TurnThread) -> TurnThread:
        self.now_ns = max(self.now_ns, chosen.deadline_ns or 0)
        chosen.timed_out = True
        chosen.what += ", and its time is up"
        return chosen

    def _option(self, options: int, free: int) -> int:
        """Return the schedule's option at the next choice; record a choice after the last deviation."""
        number = self._choices
        self._choices += 1
        if number > self._last_deviation:
            self._points.append(ChoicePoint(number, options, free, self._signature))
            return 0
        if number == self._last_deviation:
            self.signature_at_last = self._signature
        option = self._deviations.get(number, 0)
        return option if option < options else 0

    signature_at_last = 0
    """Of what had happened before the last deviation."""

    def _note(self, thread: TurnThread, what: str) -> None:
        self._steps += 1
        self._signature = hash((self._signature, thread.number, thread.line, what))
        if self._telling:
            self._told.append(ThreadStep(thread.name, thread.place, what, self._preempts))
            self._preempts = False
        if self._steps > MOST_STEPS:
            self._stop(Finding(Property.PROGRESS, f"after {MOST_STEPS:,} steps the run has not ended"))

    # -------------------------------------------------------------------------------- beginnings and ends

    def _new_thread(self, name: str, body: Callable[[], object], starter: TurnThread | None) -> TurnThread:
        self._names[name] += 1
        number = self._names[name]
        thread = TurnThread(len(self.threads), name if number == 1 else f"{name} {number}", starter)
        self.threads.append(thread)
        start_new_thread(self._run_thread, (thread, body))
        return thread

    def _run_thread(self, thread: TurnThread, body: Callable[[], object]) -> None:
        """The main function of an OS thread."""
        thread.turn.acquire()
        try:
            if not self.abandoned:
                thread.ready = None
                self._note(thread, thread.what)
                if self._trace is not None:
                    sys.settrace(self._trace)
                body()
        except RunAbandoned:
            pass
        except BaseException as error:  # whatever the real code raises is a finding
            self._stop(found_in(thread.name, error))
        finally:
            sys.settrace(None)
            thread.ended = True
            if not self.abandoned:
                chosen = thread.starter or self._chosen(thread)
                if chosen is not None:
                    self.current = chosen
                    chosen.turn.release()
            thread.over.release()

    def _stop(self, finding: Finding) -> None:
        """End the run with this finding, at the next choice."""
        self._finding = self._finding or finding

    def _abandon(self) -> None:
        """End what is left, one thread after the other, first the one whose turn it is."""
        self.abandoned = True
        for thread in (self.current, *self.threads):
            if not thread.ended:
                self.current = thread
                if thread.turn.locked():
                    thread.turn.release()
            with thread.over:  # held until its last line has run
                pass

    def _blocked_text(self, live: list[TurnThread]) -> str:
        return "; ".join(f"{one.name} is at {one.place}: {one.what}" for one in sorted(live, key=_by_number))


def _by_number(thread: TurnThread) -> int:
    return thread.number


def found_in(thread: str, error: BaseException) -> Finding:
    """An error of a thread, as a finding."""
    if isinstance(error, PropertyBroken) or not isinstance(error, Exception):
        told = error if isinstance(error, Exception) else RuntimeError(repr(error))
        return finding_of(told)
    finding = finding_of(error)
    return Finding(finding.property, f"in thread {thread}: {finding.message}", finding.place)


_current: ThreadControl | None = None


def control() -> ThreadControl:
    """The run that is under way."""
    assert _current is not None, "no run is under way"
    return _current
