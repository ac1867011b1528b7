"""A synthetic window of a log, of any size, with every kind of item that a page shows.

The rows are those of `kvsm.open`. So tests of the page and of the trace need no log, can have a hundred
thousand events in a second, and know what must be shown.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from msgspec.structs import replace

from kvsm import events as ev
from kvsm.explain.tables.row_kinds import (
    BlockRow,
    CopyRow,
    Gone,
    LookupRow,
    RejectionRow,
    RequestRow,
    RequestStateRow,
    ResetRow,
    Row,
    SkipRow,
    TransferRow,
)
from kvsm.explain.timeline.columns import CONDITIONS, WindowTables, read_tables
from kvsm.explain.timeline.moves import EDGES
from kvsm.explain.timeline.page import PageHead, make_page
from kvsm.explain.timeline.stream import KIND_NUMBER, PARTS, EventStream
from kvsm.states import BlockState

STEP_NS = 250_000
BEGAN_NS = 1_763_809_469_000_000_000
SLOTS = 64
ERROR = "CUDA error 700"
EDGE = {(edge.source.name, edge.trigger.name): number for number, edge in enumerate(EDGES)}

_R = TypeVar("_R", bound=Row)


@cache
def _plain(kind: type[Row]) -> dict[str, Any]:
    """Return a default for each column: None where allowed, else 0, False or an empty text."""
    return {
        name: None if NoneType in get_args(hint) else hint() for name, hint in get_type_hints(kind).items()
    }


def made(kind: type[_R], **given: Any) -> _R:
    """Return a row with these values, and defaults in the other columns."""
    return kind(**_plain(kind) | given)


class MadeRows:
    """Rows with the calls of an opened log. All rows are inside the window."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {table: [] for table in CONDITIONS}

    def __getattr__(self, table: str) -> Any:
        if table not in CONDITIONS:
            raise AttributeError(table)

        def rows(where: str = "", params: Sequence[Any] = ()) -> Iterator[Row]:  # noqa: ARG001
            return iter(self.rows[table])

        return rows


class MadeTimeline:
    """Overlapping requests. Each waits for its own store, loads a block, runs, and finishes.

    Every tenth request's store fails on rank 1. Every tenth request evicts a block, and a later one misses
    its key. One request of 97 never ends, and rank 1 never reports its store. After every two hundredth
    request the cache is reset.

    requests: number of requests. names: of the first requests; the others are `r10`, `r11` and so on.
    """

    def __init__(self, requests: int, names: Sequence[str] = (), seed: int = 0) -> None:
        self._random, self._names = random.Random(seed), list(names)
        self.stream, self.rows = EventStream(), MadeRows()
        self._resets = 0
        self._stored: list[int] = []
        self._evicted: list[int] = []
        coming, active = (self._request(number) for number in range(requests)), list[Iterator[None]]()
        while active := [*active, *islice(coming, 24 - len(active))]:
            chosen = self._random.choice(active)
            if next(chosen, True):
                active.remove(chosen)
        self._fill_pool()

    @property
    def last(self) -> int:
        """Return the number of the last event."""
        return len(self.stream.number)

    @property
    def tables(self) -> WindowTables:
        """Return the rows as pages and traces take them."""
        return read_tables(self.rows, 1, self.last)

    def page(self, directory: str = "kvsm-log", notes: Sequence[str] = ()) -> str:
        """Return the page of this window."""
        head = PageHead(directory, BEGAN_NS, (1, self.last), list(notes))
        return make_page(head, self.stream, self.tables)

    def name(self, number: int) -> str:
        """Return the name of a request."""
        return self._names[number] if number < len(self._names) else f"r{number}"

    def _emit(self, kind: type[ev.OffloadingEvent], text: str, *moves: tuple[str, str]) -> int:
        stream, place = self.stream, len(self.stream.number)
        stream.number.append(place + 1)
        stream.kind.append(KIND_NUMBER[kind])
        stream.step.append(place // 4)
        stream.at.append(BEGAN_NS + place * STEP_NS + self._random.randrange(STEP_NS))
        stream.text.append(f"{kind.__name__} {text}")
        for move in moves:
            stream.moves.event.append(place)
            stream.moves.edge.append(EDGE[move])
            stream.moves.blocks.append(1)
        return place + 1

    def _add(self, table: str, row: Row) -> int:
        self.rows.rows[table].append(row)
        return len(self.rows.rows[table]) - 1

    def _request(self, number: int) -> Iterator[None]:
        name, stuck = self.name(number), number % 97 == 96
        states = [("NEW", self._emit(ev.RequestArrived, f"request {name}"), None)]
        yield
        self._look_up(name, number % 10 == 5)
        yield
        store = self._plan_store(name, number % 10 == 4)
        yield
        states.append(("DEFERRED", self._emit(ev.RequestDeferred, f"request {name} transfer {store}"), store))
        yield from self._copy(store, "store", name, failing=number % 10 == 3, stuck=stuck)
        states.append(("MATCHED", self._emit(ev.HitMatched, f"request {name} slot 2"), None))
        yield
        load = self._emit(ev.LoadPlanned, f"request {name} slot 2", ("STORED", "BEGIN_LOAD"))
        states.append(("LOADING", load, load))
        yield from self._copy(load, "load", name)
        states.append(("RUNNING", self.last, None))
        for _ in range(self._random.randrange(6)):
            self._emit(ev.StepEnded, "")
            yield
        finished = None if stuck else self._emit(ev.RequestFinished, f"request {name}")
        ends = [began for _, began, _ in states[1:]] + [finished]
        for (state, began, transfer), ended in zip(states, ends, strict=True):
            stay = made(
                RequestStateRow, request=name, began=began, state=state, transfer=transfer, ended=ended
            )
            self._add("request_states", stay)
        self._add(
            "requests",
            made(
                RequestRow, request=name, arrived=states[0][1], finished=finished, lookups=1, loads=1,
                state="RUNNING" if stuck else "RELEASED", loaded=1, stored=1,
                deferred_ns=5_000_000, loading_ns=2_000_000,
            ),
        )  # fmt: skip
        if number % 200 == 199:
            self._reset()

    def _look_up(self, name: str, missing: bool) -> None:
        event = self._emit(ev.HitMatched, f"request {name} slots 1..3 (3)")
        lookup = made(
            LookupRow, event=event, request=name, asked=8, on_device=2, on_host=0 if missing else 3,
            hit_slots=3, admitted=event,
        )  # fmt: skip
        if missing and self._evicted:
            place = self._evicted.pop(0)
            block = self.rows.rows["blocks"][place]
            self.rows.rows["blocks"][place] = replace(block, wanted=event, wanted_by=name)
            lookup = replace(
                lookup, missed=block.key, why=str(Gone.EVICTED), cause=block.gone,
                cause_transfer=block.gone_for, cause_requests=block.gone_for_requests,
            )  # fmt: skip
        self._add("lookups", lookup)

    def _plan_store(self, name: str, evicting: bool) -> int:
        if evicting and self._stored:
            place = self._stored.pop(self._random.randrange(len(self._stored)))
            gone = self._emit(ev.BlocksEvicted, "slot 1", ("STORED", "EVICT"))
            block = self.rows.rows["blocks"][place]
            self.rows.rows["blocks"][place] = replace(
                block,
                gone=gone,
                why=str(Gone.EVICTED),
                gone_for=gone + 1,
                gone_for_requests=json.dumps([name]),
            )
            self._evicted.append(place)
        key = self._random.randbytes(32).hex()
        store = self._emit(ev.StorePlanned, f"request {name} key {key[:12]}..", ("EVICTED", "ALLOCATE"))
        self._add("blocks", made(BlockRow, transfer=store, slot=1, key=key, requests=json.dumps([name])))
        return store

    def _copy(
        self, id: int, direction: str, name: str, failing: bool = False, stuck: bool = False
    ) -> Iterator[None]:
        """Add a transfer, from its submission to the last report of its two ranks."""
        store = direction == "store"
        submitted = self._emit(
            ev.TransfersSubmitted, f"transfer {id}", *([("ALLOCATED", "SUBMIT_STORE")] if store else [])
        )
        reports = []
        for worker in range(1 if stuck else 2):
            for _ in range(self._random.randrange(1, 4)):
                yield
            failed = failing and worker == 1
            end = "END_COPY_BAD" if failed else "END_COPY_GOOD"
            moves = [("STORING" if store else "LOADING", end)] if worker == 1 else []
            text = f"transfer {id} worker {worker} {'failed' if failed else 'good'}"
            reports.append(self._emit(ev.WorkerReported, text, *moves))
        outcome = None if stuck else "failed" if failing else "completed"
        self._add(
            "transfers",
            made(
                TransferRow,
                transfer=id,
                direction=direction,
                requests=json.dumps([name]),
                slots=1,
                workers=2,
                pending=int(stuck),
                submitted=submitted,
                ended=None if stuck else reports[-1],
                outcome=outcome,
            ),
        )
        if store and outcome == "completed":
            places = range(len(self.rows.rows["blocks"]))
            place = next(one for one in reversed(places) if self.rows.rows["blocks"][one].transfer == id)
            self.rows.rows["blocks"][place] = replace(self.rows.rows["blocks"][place], stored=reports[-1])
            self._stored.append(place)
        for worker in range(2):
            good = not (failing and worker == 1) if worker < len(reports) else None
            self._add(
                "copies",
                made(
                    CopyRow, transfer=id, worker=worker, direction=direction, good=good,
                    reported=reports[worker] if worker < len(reports) else None,
                    error=f"{ERROR} in {name}" if good is False else None,
                ),
            )  # fmt: skip

    def _reset(self) -> None:
        self._resets += 1
        event = self._emit(ev.CacheReset, f"epoch {self._resets}", ("STORED", "INVALIDATE"))
        reset = made(ResetRow, event=event, epoch=self._resets, keys=12, cancelled=1, abandoned=2)
        self._add("resets", reset)
        event = self._emit(ev.ReportRejected, "transfer 5 worker 1 good")
        reason = str(ev.RejectReason.STALE)
        self._add(
            "rejections", made(RejectionRow, event=event, transfer=5, worker=1, good=True, reason=reason)
        )
        event = self._emit(ev.StoreSkipped, "no request key 00")
        skip = made(SkipRow, event=event, requests="[]", blocks=3, reason=str(ev.SkipReason.POOL_FULL))
        self._add("skips", skip)

    def _fill_pool(self) -> None:
        """Add enough slots for every move, and samples of a pool that fills and empties."""
        stream, states = self.stream, [0] * len(BlockState)
        states[BlockState.STORED] = states[BlockState.EVICTED] = self.last
        stream.checkpoints.event.append(0)
        stream.checkpoints.blocks.append(states)
        for place in range(0, self.last, 16):
            idle = 8 + self._random.randrange(20)
            parts = dict.fromkeys(PARTS, 2) | {"idle": idle, "free": SLOTS - 8 - idle}
            stream.pool.event.append(place)
            for column, part in zip(stream.pool.parts, PARTS, strict=True):
                column.append(parts[part])
