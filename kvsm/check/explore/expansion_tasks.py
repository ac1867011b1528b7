"""Expand levels by an executor, for example on the workers of a cluster.

The processes of `kvsm.check.explore.expansion` remember which states they have sent. A task has no memory:
its result depends on its batch alone, so that another worker can repeat the batch of a lost one. The cost:
a state is checked and sent once for each batch that reaches it.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

from kvsm.check.explore import coverage
from kvsm.check.explore.budgets import ModelBudgets
from kvsm.check.explore.coverage import TableEdge
from kvsm.check.explore.expansion import BATCH_STATES, Expander, Expansion, Task
from kvsm.check.explore.model import Model
from kvsm.system.executors.executor import Executor


class ExpansionTasks:
    """Expands levels by an executor. A context manager: its exit stops the level that is being expanded."""

    def __init__(self, model: Model[Any, Any], budgets: ModelBudgets, executor: Executor) -> None:
        self._model, self._budgets, self._executor = model, budgets, executor
        self._edges: set[TableEdge] = set()
        self._level: Generator[Expansion, None, None] | None = None

    def __enter__(self) -> ExpansionTasks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._level is not None:
            self._level.close()

    def expand(self, tasks: Sequence[Task]) -> Iterator[Expansion]:
        """Yield the expansion of each task, in order. The caller may stop early."""
        self._level = self._expanded(tasks)
        return self._level

    def _expanded(self, tasks: Sequence[Task]) -> Generator[Expansion, None, None]:
        size = max(1, min(BATCH_STATES, len(tasks) // (4 * self._executor.workers)))
        batches = (tasks[first : first + size] for first in range(0, len(tasks), size))
        task, named = partial(_expanded, self._model, self._budgets), f"states of model {self._model.name}"
        with self._executor.results(task, batches, name=lambda _: named) as results:
            for expansions, edges in results:
                self._edges |= edges
                yield from expansions

    def edges(self) -> set[TableEdge]:
        """Return the edges taken in the expansions that were received."""
        return self._edges


def _expanded(
    model: Model[Any, Any], budgets: ModelBudgets, batch: Sequence[Task]
) -> tuple[list[Expansion], set[TableEdge]]:
    known: set[Hashable] = set()
    expander = Expander(model, budgets, known)
    coverage.forget()
    expansions = []
    for task in batch:
        expansions.append(expander.expand(task))
        known.update(expansions[-1].new)
    return expansions, coverage.taken()
