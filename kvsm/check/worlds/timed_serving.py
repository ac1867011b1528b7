"""The serving world with `load_only_if_faster`: the measured times change between any two events.

It has one more action: the engine notes measured times ("times", start, block, token). Each answer to a
request is compared with `kvsm.check.worlds.declined_hits`.
"""

from __future__ import annotations

from random import Random
from typing import Annotated

import msgspec

from kvsm.check.worlds.declined_hits import BeforeSlowAnswer
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.wider_engine import WiderEngine
from kvsm.check.worlds.wider_serving import WiderServing
from kvsm.check.worlds.world import Action
from kvsm.core.ledger.canonical import PART, declared
from kvsm.core.ledger.expected_times import MOST_TIME
from kvsm.events import OffloadConfig

_STARTS_US, _BLOCKS_NS, _TOKENS_NS = (0, 20, 200), (0, 5_000, 40_000), (0, 1_000, 5_000, 20_000, 200_000)
"""The times to draw from. They make loads faster, slower, or slower only behind other loads."""


@declared
class TimedEngine(WiderEngine):
    """A `WiderEngine` whose core declines slow hits. It takes the same arguments."""

    def _core_config(self, config: OffloadConfig) -> OffloadConfig:
        return msgspec.structs.replace(super()._core_config(config), load_only_if_faster=True)

    def _ask(self, request: SmallRequest, local: int) -> int | None:
        before = BeforeSlowAnswer(self.scheduler, request, request.cells, local, self.log)
        found, loads = self.scheduler.get_num_new_matched_tokens(request, local)
        if found is not None:
            self._check_match(request, local, found, loads)
        before.check(found)
        return found


@declared
class TimedServing(WiderServing):
    """A `World` of a `TimedEngine`."""

    engine_class = TimedEngine

    engine: Annotated[TimedEngine, PART]

    def draw(self, random: Random) -> Action:
        """Draw measured times, or an action of `WiderServing`."""
        if random.random() < 1 / 20:
            return ("times", *map(random.choice, (_STARTS_US, _BLOCKS_NS, _TOKENS_NS)))
        return super().draw(random)

    def _do_times(self, start_us: int, block_ns: int, token_ns: int) -> bool:
        if not all(0 <= time <= MOST_TIME for time in (start_us, block_ns, token_ns)):
            return False
        self.engine.core.note_times(start_us, block_ns, token_ns)
        return True
