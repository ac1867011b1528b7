"""Expand states: take their actions and check what follows, in this process or in forked ones.

An expander loads a state, takes each action that it is asked for, and checks each state that follows. It is
the only part of the explorer that runs the model. It runs in the explorer's own process or in forked ones,
with the same result: each process sends every state that it has not sent before, so a state's first
appearance in the explorer's order always comes with the state itself.
"""

from __future__ import annotations

import gc
import signal
import traceback
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from kvsm.check.explore import coverage
from kvsm.check.explore.budgets import FREE, Left, ModelBudgets
from kvsm.check.explore.coverage import TableEdge
from kvsm.check.explore.model import Model
from kvsm.check.worlds.requirement import Kind, Requirement
from kvsm.check.worlds.world import Finding, finding_of
from kvsm.errors import ConfigError

YOUNG_OBJECTS = 50_000
"""A search makes millions of small objects that stay alive, and a full collection would scan them all. The
collector scans only young objects, which still frees discarded worlds with reference cycles."""

BATCH_STATES = 128
"""How many states a process expands at most between two messages."""


class Task(NamedTuple):
    """Actions to take from a saved state. asked: (action, what is left of the budgets before it)."""

    saved: Any
    asked: Sequence[tuple[Any, Left]]


class NewState(NamedTuple):
    """A state that was seen for the first time.

    saved: the state.
    actions: what may happen in it while every budget has something left.
    wind_down: which of the actions winds down; -1 if none does.
    holds: a bit for each "eventually" that holds in it.
    faded: its fingerprint when the fading budget is used up (`ModelBudgets.faded`).
    """

    saved: Any
    actions: tuple[Any, ...]
    wind_down: int
    holds: int
    faded: Hashable


class Expansion(NamedTuple):
    """What the actions of a task lead to.

    after: the fingerprint after each action; None if the action does not apply.
    new: the states among them that were not sent before, by fingerprint.
    reached: a bit for each "sometimes" that is first seen to hold after some action.
    broken: the place of the last action that was taken, and what it broke. `after` has its fingerprint if a
        state follows it.
    """

    after: list[Hashable]
    new: dict[Hashable, NewState]
    reached: int
    broken: tuple[int, Finding] | None


class Expander:
    """Expands states. known: fingerprints of states that need not be checked or sent again."""

    def __init__(self, model: Model[Any, Any], budgets: ModelBudgets, known: Container[Hashable]) -> None:
        self._model, self._budgets, self._known = model, budgets, known
        of: dict[Kind, list[Requirement[Any]]] = {kind: [] for kind in Kind}
        for one in model.requirements:
            of[one.kind].append(one)
        self._always, self._eventually = of[Kind.ALWAYS], of[Kind.EVENTUALLY]
        self._sometimes = list(enumerate(of[Kind.SOMETIMES]))
        """The "sometimes" that this expander has not seen hold, with their bits."""

    def expand(self, task: Task) -> Expansion:
        """Take the actions of a task, until something is broken."""
        model, budgets, known = self._model, self._budgets, self._known
        after: list[Hashable] = []
        new: dict[Hashable, NewState] = {}
        reached = 0
        state, is_fresh = model.load(task.saved), True
        for place, (action, left) in enumerate(task.asked):
            if not is_fresh:
                state = model.load(task.saved)
            budgets.set_left(state, left)
            try:
                following = model.next(state, action)
            except Exception as error:
                return Expansion(after, new, reached, (place, finding_of(error)))
            is_fresh = following is None
            if following is None:
                after.append(None)
                continue
            try:
                fingerprint = budgets.fingerprint(following)
            except Exception:
                # A broken state may have no fingerprint. If nothing is broken, the model is at fault.
                finding = self.broken(following)
                if finding is None:
                    raise
                return Expansion(after, new, reached, (place, finding))
            after.append(fingerprint)
            if self._sometimes:
                reached |= self.reached(following)
            if fingerprint not in known and fingerprint not in new:
                finding = self.broken(following)
                if finding is not None:
                    return Expansion(after, new, reached, (place, finding))
                new[fingerprint] = self.seen(following, fingerprint)
        return Expansion(after, new, reached, None)

    def seen(self, state: Any, fingerprint: Hashable) -> NewState:
        """Save a state with what the search needs to know of it."""
        faded = self._budgets.faded(state, fingerprint)
        self._budgets.set_left(state, self._budgets.whole)
        actions = tuple(self._model.actions(state))
        wind_down, holds = -1, 0
        if self._eventually:
            holds = sum(1 << bit for bit, one in enumerate(self._eventually) if one.holds(state))
            winding = self._model.wind_down(state)
            if winding is not None and (winding not in actions or self._budgets.spends(winding) != FREE):
                raise ConfigError(
                    f"model {self._model.name}: {winding!r} should wind down and is not among the actions"
                )
            wind_down = -1 if winding is None else actions.index(winding)
        return NewState(self._model.save(state), actions, wind_down, holds, faded)

    def broken(self, state: Any) -> Finding | None:
        """The first "always" that does not hold in the state. An exception is the finding itself."""
        for one in self._always:
            try:
                holds = one.holds(state)
            except Exception as error:
                return finding_of(error)
            if not holds:
                return Finding(one.name, f"does not hold: {one.says}")
        return None

    def reached(self, state: Any) -> int:
        """The "sometimes" that hold in the state and that this expander has not seen hold before, as bits."""
        reached = 0
        for bit, one in self._sometimes:
            if one.holds(state):
                reached |= 1 << bit
        if reached:
            self._sometimes = [(bit, one) for bit, one in self._sometimes if not reached >> bit & 1]
        return reached


@contextmanager
def collecting_young_objects() -> Iterator[None]:
    """Let the garbage collector scan only young objects."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, 1 << 30, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Processes:
    """Forked processes that expand a level together. A context manager."""

    def __init__(self, model: Model[Any, Any], budgets: ModelBudgets, jobs: int) -> None:
        context = get_context("fork")  # so that a model may be made of closures
        self._workers: list[tuple[Any, Connection]] = []
        self._busy: dict[Connection, int] = {}
        """Connection of a busy process -> number of its batch."""
        for _ in range(jobs):
            here, there = context.Pipe()
            not_theirs = [connection for _, connection in self._workers] + [here]
            process = context.Process(target=_serve, args=(model, budgets, there, not_theirs), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._workers:
            process.terminate()
            process.join()
            connection.close()

    def expand(self, tasks: Sequence[Task]) -> Iterator[Expansion]:
        """Yield the expansion of each task, in order. The caller may stop early."""
        size = max(1, min(BATCH_STATES, len(tasks) // (4 * len(self._workers))))
        batches = deque(enumerate(tasks[first : first + size] for first in range(0, len(tasks), size)))
        done: dict[int, list[Expansion]] = {}
        for wanted in range(len(batches)):
            while wanted not in done:
                for _, connection in self._workers:
                    if batches and connection not in self._busy:
                        number, batch = batches.popleft()
                        self._send(connection, batch)
                        self._busy[connection] = number
                done.update(self._receive())
            yield from done.pop(wanted)

    def edges(self) -> set[TableEdge]:
        """Wait for running batches, end the processes, and return the edges taken in them."""
        while self._busy:
            self._receive()
        taken: set[TableEdge] = set()
        for _, connection in self._workers:
            self._send(connection, None)
            taken |= self._answer(connection)
        return taken

    def _send(self, connection: Connection, batch: Sequence[Task] | None) -> None:
        try:
            connection.send(batch)
        except OSError:
            raise _killed() from None

    def _receive(self) -> dict[int, list[Expansion]]:
        ready = [one for one in wait(list(self._busy)) if isinstance(one, Connection)]
        return {self._busy.pop(connection): self._answer(connection) for connection in ready}

    def _answer(self, connection: Connection) -> Any:
        try:
            answer, error = connection.recv()
        except (EOFError, OSError):
            raise _killed() from None
        if error:
            raise RuntimeError(f"the model failed in a process of the explorer:\n{error}")
        return answer


def _killed() -> ConfigError:
    return ConfigError(
        "a process of the explorer was killed, perhaps for lack of memory; try fewer --jobs, or a small scope"
    )


def _serve(
    model: Model[Any, Any], budgets: ModelBudgets, connection: Connection, not_ours: Sequence[Connection]
) -> None:
    """The main function of a process: expand batches until None comes, then send the edges taken."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the explorer decides when to stop
    for inherited in not_ours:
        inherited.close()  # otherwise this process would not notice the end of the explorer
    with suppress(EOFError, ConnectionError):
        _expand_batches(model, budgets, connection)


def _expand_batches(model: Model[Any, Any], budgets: ModelBudgets, connection: Connection) -> None:
    known: set[Hashable] = set()
    expander = Expander(model, budgets, known)
    coverage.forget()
    with collecting_young_objects():
        while (batch := connection.recv()) is not None:
            try:
                answer, error = _expand_all(expander, batch, known.update), ""
            except Exception:
                answer, error = [], traceback.format_exc()
            connection.send((answer, error))
    connection.send((coverage.taken(), ""))


def _expand_all(
    expander: Expander, batch: Iterable[Task], learn: Callable[[Iterable[Hashable]], None]
) -> list[Expansion]:
    expansions = []
    for task in batch:
        expansions.append(expander.expand(task))
        learn(expansions[-1].new)
    return expansions
