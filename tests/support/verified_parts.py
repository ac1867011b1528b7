"""Shared by the tests of verification: logs cut into segments anywhere, and parts of a log side by side."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
from changed_logs import PlainSegment, plain, write_plain

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import LogReader
from kvsm.errors import KvsmError
from kvsm.explain.story import Verification, verify_log
from kvsm.explain.verify.logged_copies import LoggedCopies
from kvsm.system.executors.executor import Item, Result, Task


class OneAfterTheOther:
    """An executor in this process, whose items and results are pickled. done: the results so far."""

    losses = 0

    def __init__(self, workers: int = 100) -> None:
        self.workers = workers
        self.done: list[object] = []

    @contextmanager
    def results(
        self,
        task: Task[Item, Result],
        items: Iterable[Item],
        **_: object,
    ) -> Iterator[Iterator[Result]]:
        """As `Executor.results`."""
        yield (self._do(task, item) for item in items)

    def _do(self, task: Task[Item, Result], item: Item) -> Result:
        result: Result = pickle.loads(pickle.dumps(task(pickle.loads(pickle.dumps(item)))))
        self.done.append(result)
        return result


def cut(log: Path, target: Path, lasts: Collection[int]) -> Path:
    """A log of one segment as a log of several: behind each event in `lasts` begins another one."""
    (segment,) = LogReader(log).segments()
    ledger, events = Ledger(segment.head.config), list(segment.events())
    written, tail = [], plain(segment.tail) or []
    for begin, end in pairwise((0, *sorted(lasts), len(events))):
        state = snapshot(ledger) if begin else b""
        head = msgspec.structs.replace(segment.head, config=ledger.config, seq=begin, snapshot=state)
        written.append(PlainSegment(plain(head), [plain(events[begin:end])], []))
        if end < len(events):
            ledger.apply_all(events[begin:end])
    written[-1] = written[-1]._replace(tail=tail)
    return write_plain(target, written)


def in_one_pass(log: Path) -> tuple[Verification | str, list[object]]:
    """The answer of one pass, without its time, and what the log tells of copies between tiers."""
    return _answer(log, None)


def in_parts(log: Path, workers: int = 100) -> tuple[Verification | str, list[object]]:
    """The same, with each segment verified from its own snapshot."""
    return _answer(log, OneAfterTheOther(workers))


def _answer(log: Path, executor: OneAfterTheOther | None) -> tuple[Verification | str, list[object]]:
    copies, progress = LoggedCopies(named_disk=log.name == "disk"), list[int]()
    try:
        found = verify_log(log, hearer=copies, executor=executor, progress=progress.append)
    except KvsmError as error:
        return str(error), []
    assert progress == sorted(progress)
    assert not found.good or progress[-1] == found.events
    heard = [copies.tier, copies.steps, copies.first, copies.began, copies.began_ns, copies.lacks_beginning]
    return msgspec.structs.replace(found, seconds=0.0), heard
