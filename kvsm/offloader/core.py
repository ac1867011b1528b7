"""How an event comes to be: made, checked, applied and handed to the log, in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvsm import events as ev
from kvsm.errors import IllegalTransition, InvalidEvent, Poisoned
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ids import SMALL, IdArray
from kvsm.kv_events import Publisher
from kvsm.ledger import Ledger, TransferRecord
from kvsm.states import machines_digest


class EventSink(Protocol):
    """Where events go once applied: a `LogWriter`, or a list in tests. `flush` before jobs leave."""

    def append(self, event: OffloadingEvent) -> None: ...

    def flush(self) -> None: ...


class Core:
    """A ledger, a log, and the one way to change the former: `_emit`. Not thread safe."""

    def __init__(
        self,
        config: OffloadConfig,
        log: EventSink | None = None,
        *,
        publisher: Publisher | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """config: fixed for life, written into the log. log: None keeps none. publisher: collects what
        leaves for schedulers and routers; whoever gives one must take from it, or it grows. clock_ns: wall
        time, data only."""
        self.config = config
        self.publisher = publisher
        self.ledger = Ledger(config, publisher)
        self.log = log
        self.step = 0
        self._clock_ns = clock_ns
        self._poisoned: str | None = None
        self._flushed_at = -1
        """The step in which the log was last flushed."""
        self._emit(ev.LogOpened, config, machines_digest())

    def _emit(self, kind: type[OffloadingEvent], *fields: object) -> TransferRecord | None:
        """Make the next event, check it, apply it and hand it to the log, in one call.

        Returns the transfer that it ended. A refused event leaves no trace; any other failure between
        the fold and the log poisons the core.
        """
        if self._poisoned is not None:
            raise Poisoned(f"this offloader stopped at event {self.ledger.seq}: {self._poisoned}")
        ledger = self.ledger
        event = kind(ledger.seq + 1, self.step, self._clock_ns(), *fields)
        try:
            ended = ledger.apply(event)
            if self.log is not None:
                self.log.append(event)
            return ended
        except (IllegalTransition, InvalidEvent):
            raise
        except BaseException as error:  # An interrupt too: the log would lack what the ledger has.
            self._poisoned = str(error) or type(error).__name__
            raise

    def sync(self) -> None:
        """Let the log have everything decided so far on disk: before the engine goes idle."""
        self._flush()

    def _flush(self) -> None:
        self._flushed_at = self.step
        if self.log is None:
            return
        try:
            self.log.flush()
        except BaseException as error:  # An interrupt too: the log would lack what the ledger has.
            self._poisoned = str(error) or type(error).__name__
            raise

    def _device_ids(self, device_blocks: Sequence[int]) -> IdArray:
        """The engine's list as the ledger's array. Raises `InvalidEvent` for a block that does not exist."""
        limit = self.config.device_blocks
        ids: IdArray
        if len(device_blocks) <= SMALL:
            ids = tuple(device_blocks)
            wrong = [one for one in ids if not 0 <= one < limit]
        else:
            ids = np.asarray(device_blocks, dtype=np.int64)
            wrong = ids[(ids < 0) | (ids >= limit)].tolist()
        if wrong:
            raise InvalidEvent(self.ledger.seq + 1, f"device block {wrong[0]} is not one of the {limit}")
        return ids

    def _has_room_for_transfer(self) -> bool:
        return len(self.ledger.transfers) < self.config.max_live_transfers
