"""The serving world around the wider engine (`kvsm.check.worlds.wider_engine`).

It has two more actions: the next part of a session's prompt arrives ("next"), and the engine makes a step
that preempts a request which it has just admitted ("reconsider", from the budget `Budgets.preemptions`). A
request can arrive only while no unfinished request has its name.
"""

from __future__ import annotations

from typing import Annotated

from kvsm.check.worlds.serving_world import EndingServing, ServingOptions
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.wider_engine import WiderEngine
from kvsm.check.worlds.world import Action
from kvsm.core.ledger.canonical import FIXED, PART, declared


class WiderOptions(ServingOptions, frozen=True, kw_only=True):
    """`ServingOptions` with reused names.

    names: the number of request names, which are used in turn; 0 gives each request its own name.
    """

    names: int = 0


@declared
class WiderServing(EndingServing):
    """A `World` of a `WiderEngine`."""

    engine_class = WiderEngine

    engine: Annotated[WiderEngine, PART]
    names: Annotated[int, FIXED]

    def __init__(self, options: WiderOptions, *, keep_events: bool = True) -> None:
        self.names = options.names or len(options.requests)
        super().__init__(options, keep_events=keep_events)

    def _request(self, place: int) -> SmallRequest:
        request = super()._request(place)
        request.request_id = f"r{place % self.names}"
        return request

    # What may happen.

    def actions(self) -> list[Action]:
        actions = super().actions()
        if not self._may_arrive():
            actions = [action for action in actions if action != ("arrive",)]
        actions += [("next", place) for place in range(len(self.engine.paused))]
        if self.engine.waiting and self.left["preemptions"]:
            actions.append(("reconsider",))
        return actions

    def _may_arrive(self) -> bool:
        if self.arrived == len(self.options.requests):
            return False
        earlier = self.engine.requests.get(f"r{self.arrived % self.names}")
        return earlier is None or earlier.finished

    def wind_down(self) -> Action | None:
        if self.engine.paused and not (self.engine.copies or self.engine.reports):
            return ("next", 0)
        return super().wind_down()

    # What happens.

    def _do_arrive(self) -> bool:
        # The earlier request of this name is dropped, but the host may still hold its blocks.
        self.contents.update(self._expected())
        return self._may_arrive() and super()._do_arrive()

    def _do_next(self, place: int) -> bool:
        paused = list(self.engine.paused.values())
        if place >= len(paused):
            return False
        self.engine.next_part(paused[place])
        return True

    def _do_reconsider(self) -> bool:
        self.engine.reconsiders = True
        try:
            return bool(self.engine.waiting) and self._do_step()
        finally:
            self.engine.reconsiders = False
