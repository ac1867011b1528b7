"""An executor: other processes that do one task for many items.

    with ForkedProcesses(2).results(task, items) as results:
        for result in results:
            ...

What every executor promises:

- Results come in the order of the items, for any number of workers.
- A task is deterministic: its result depends on its item only. So a lost worker is made up for: another one
  takes its item. An item that loses `MOST_LOSSES` workers is an error that names it.
- Items may be endless. No more than `workers` are worked on at once, and no more than `AHEAD` (or four for
  each that may be begun at once) are taken beyond the one whose result is wanted.
- At the end of the `with` block, for whatever reason, no worker goes on.
- An exception in a task names the item. An error of kvsm (`KvsmError`) comes as it is. Both come in the order
  of the items, after the results before them.

`OrderedResults` keeps these promises for any `Crew`, which knows only how to start an item and how to wait.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from kvsm.errors import ConfigError, KvsmError

Item = TypeVar("Item")
Result = TypeVar("Result")

Task = Callable[[Item], Result]
"""What workers do. A fork inherits it, so it may be a closure; a cluster pickles it by value."""

AHEAD = 64
"""How many items may be begun beyond the one whose result is wanted. Results wait in memory."""
MOST_LOSSES = 3
"""An item that has lost this number of workers is not given to another one."""


class Executor(Protocol):
    """Who works, and how many at once. Nobody works outside of `results`."""

    @property
    def workers(self) -> int:
        """How many items are worked on at once, at most."""

    @property
    def losses(self) -> int:
        """How many workers were lost and made up for so far."""

    def results(
        self,
        task: Task[Item, Result],
        items: Iterable[Item],
        *,
        name: Callable[[Item], str] = str,
        fresh: bool = False,
    ) -> AbstractContextManager[Iterator[Result]]:
        """The results of the items, in their order.

        name: what an item is called in an error: "runs 16 to 23".
        fresh: a new process for each item, for a task that leaves its process changed.

        The iterator raises `ConfigError` if an item has lost too many workers, `KvsmError` as the task raised
        it, and `RuntimeError` with the worker's traceback for any other exception of the task.
        """


class Done(NamedTuple):
    """The result of an item."""

    result: Any


class Raised(NamedTuple):
    """The task raised. error: an error of kvsm as it was raised; None for others. told: the traceback."""

    error: KvsmError | None
    told: str


class Lost(NamedTuple):
    """The worker is gone, and its item was not done. why: as far as it is known."""

    why: str


class Crew(Protocol):
    """The workers during one call of `Executor.results`."""

    def begin(self, number: int, item: Any) -> None:
        """Let an idle or a new worker take an item. Called while fewer than `workers` are busy."""

    def ended(self) -> list[tuple[int, Done | Raised | Lost]]:
        """Wait until at least one item has ended. Each that has, by its number."""


def outcome_of(task: Callable[[Any], Any], item: Any) -> Done | Raised:
    """Do a task in a worker."""
    try:
        return Done(task(item))
    except KvsmError as error:
        return Raised(error, "")
    except Exception:
        return Raised(None, traceback.format_exc())


class LostWorker(msgspec.Struct, frozen=True):
    """What an executor says when it has lost a worker. name: of the item, which another worker takes."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"a worker was lost: {self.why}; another one takes what it had: {self.name}"


Heard = Callable[[LostWorker], None]
"""Is told of each worker that was lost and made up for."""


def unheard(_lost: LostWorker) -> None:
    """Nobody listens."""


class OrderedResults(Generic[Result]):
    """The results of a crew, in the order of the items. An iterator."""

    def __init__(
        self,
        crew: Crew,
        workers: int,
        items: Iterable[Item],
        name: Callable[[Item], str],
        heard: Heard,
    ) -> None:
        self._crew, self._workers, self._name, self._heard = crew, workers, name, heard
        self._items = enumerate(items)
        self._held: dict[int, Any] = {}
        """Items that are begun, or to be begun again, by their numbers."""
        self._again: deque[int] = deque()
        self._done: dict[int, Done | Exception] = {}
        """What has ended and is not yet wanted. An exception waits for its turn too."""
        self._losses: Counter[int] = Counter()
        self._wanted = 0
        self._ahead = max(AHEAD, 4 * workers)

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        while self._wanted not in self._done:
            self._begin_more()
            if not self._held:
                raise StopIteration
            for number, outcome in self._crew.ended():
                self._note(number, outcome)
        self._begin_more()  # they work while the consumer does
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
            self._done[number] = outcome.error or RuntimeError(f"{name} failed in a worker:\n{outcome.told}")
        else:
            self._done[number] = ConfigError(
                f"{name}: {MOST_LOSSES} workers were lost at it, the last one so: {outcome.why}; "
                "perhaps for lack of memory: try fewer --jobs"
            )
