"""The interface of executors, which run one task for many items in other processes.

    with ForkedProcesses(2).results(task, items) as results:
        for result in results:
            ...

Every executor promises:

- Results come in the order of the items, for any number of workers.
- If a worker is lost, another worker gets its item: tasks are deterministic, so the result is the same. If an
  item has lost `MOST_LOSSES` workers, an error names it.
- Items may be endless. At most `workers` items run at a time. At most `AHEAD` items, or four for each item
  that may be submitted at a time, are taken beyond the item whose result is next.
- At the end of the `with` block, for whatever reason, all workers stop.
- An exception in a task becomes an error that names the item; an error of kvsm (`KvsmError`) is raised as it
  is. Errors come in the order of the items, too.

`OrderedResults` implements this for any `Crew`, which only starts an item in a worker, and waits for ends.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from kvsm.errors import ConfigError, KvsmError
from kvsm.system.stopping import IsOver, never

Item = TypeVar("Item")
Result = TypeVar("Result")

Task = Callable[[Item], Result]
"""The function that workers run. It may be a closure: a fork inherits it; a cluster pickles it by value."""

AHEAD = 64
"""How many items may be begun beyond the item whose result is next. Their results wait in memory."""
MOMENT_S = 0.2
"""The longest wait for an item before `is_over` is asked again."""
MOST_LOSSES = 3
"""After it has lost this number of workers, an item is not started again."""


class Executor(Protocol):
    """Runs tasks in other processes. Its workers exist only inside of `results`."""

    @property
    def workers(self) -> int:
        """Most items that run at a time."""

    @property
    def losses(self) -> int:
        """Number of workers lost so far whose items were started again."""

    def results(
        self,
        task: Task[Item, Result],
        items: Iterable[Item],
        *,
        name: Callable[[Item], str] = str,
        fresh: bool = False,
        is_over: IsOver = never,
    ) -> AbstractContextManager[Iterator[Result]]:
        """Run the task for each item. Returns an iterator over the results, in the order of the items.

        name: returns the name of an item for errors, such as "runs 16 to 23".
        fresh: run each item in a new process, for tasks that change the state of their process.
        is_over: asked while the next result is awaited; the iterator ends when it returns True.

        The iterator raises `ConfigError` if an item has lost too many workers, `KvsmError` as the task raised
        it, and `RuntimeError` with the worker's traceback for any other exception of the task.
        """


class Done(NamedTuple):
    """The result of an item."""

    result: Any


class Raised(NamedTuple):
    """The task raised.

    error: the error, if it is one of kvsm; None for others.
    traceback: the traceback as text, for other errors.
    """

    error: KvsmError | None
    traceback: str


class Lost(NamedTuple):
    """The worker is gone before its item was done. why: the reason, as far as it is known."""

    why: str


class Crew(Protocol):
    """The workers during one call of `Executor.results`."""

    def begin(self, number: int, item: Any) -> None:
        """Start an item in an idle or a new worker. Called only while fewer than `workers` items run.

        number: the number of the item, which `ended` returns.
        """

    def ended(self) -> list[tuple[int, Done | Raised | Lost]]:
        """Wait until an item has ended, at most `MOMENT_S`. Returns the number and the outcome of each item
        that has ended."""


def outcome_of(task: Callable[[Any], Any], item: Any) -> Done | Raised:
    """Run a task in a worker, and return its result or its exception."""
    try:
        return Done(task(item))
    except KvsmError as error:
        return Raised(error, "")
    except Exception:
        return Raised(None, traceback.format_exc())


class LostWorker(msgspec.Struct, frozen=True):
    """The message of an executor about a lost worker. name: of its item, which another worker gets."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"a worker was lost: {self.why}; another one takes what it had: {self.name}"


Heard = Callable[[LostWorker], None]
"""Called for each lost worker whose item is started again."""


def unheard(_lost: LostWorker) -> None:
    """Do nothing about a lost worker."""


class OrderedResults(Generic[Result]):
    """An iterator over the results of a crew, in the order of the items."""

    def __init__(
        self,
        crew: Crew,
        workers: int,
        items: Iterable[Item],
        name: Callable[[Item], str],
        heard: Heard,
        is_over: IsOver = never,
    ) -> None:
        self._is_over = is_over
        self._crew, self._workers, self._name, self._heard = crew, workers, name, heard
        self._items = enumerate(items)
        self._held: dict[int, Any] = {}
        """Number -> item, for items that run or will be started again."""
        self._again: deque[int] = deque()
        """Numbers of items whose worker was lost, to be started again."""
        self._done: dict[int, Done | Exception] = {}
        """Number -> result or error, for ended items whose turn has not come."""
        self._losses: Counter[int] = Counter()
        self._wanted = 0
        self._ahead = max(AHEAD, 4 * workers)

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        while self._wanted not in self._done:
            self._begin_more()
            if not self._held or self._is_over():
                raise StopIteration
            for number, outcome in self._crew.ended():
                self._note(number, outcome)
        self._begin_more()  # keep the workers busy while the consumer uses this result
        self._wanted += 1
        ended = self._done.pop(self._wanted - 1)
        if isinstance(ended, Exception):
            raise ended
        result: Result = ended.result
        return result

    def _begin_more(self) -> None:
        while len(self._held) - len(self._again) < self._workers:
            if self._again:
                number = self._again.popleft()
            else:
                if len(self._held) + len(self._done) > self._ahead:
                    return
                taken = next(self._items, None)
                if taken is None:
                    return
                number, self._held[taken[0]] = taken[0], taken[1]
            self._crew.begin(number, self._held[number])

    def _note(self, number: int, outcome: Done | Raised | Lost) -> None:
        name = self._name(self._held[number])
        if isinstance(outcome, Lost):
            self._losses[number] += 1
            if self._losses[number] < MOST_LOSSES:
                self._heard(LostWorker(name, outcome.why))
                self._again.append(number)
                return
        del self._held[number]
        if isinstance(outcome, Done):
            self._done[number] = outcome
        elif isinstance(outcome, Raised):
            failure = RuntimeError(f"{name} failed in a worker:\n{outcome.traceback}")
            self._done[number] = outcome.error or failure
        else:
            self._done[number] = ConfigError(
                f"{name}: {MOST_LOSSES} workers were lost at it, the last one so: {outcome.why}; "
                "perhaps for lack of memory: try fewer --jobs"
            )
