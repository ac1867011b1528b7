"""The auditor beside a world follows each event, also those of actions that the world calls impossible."""

from __future__ import annotations

from typing import cast

from core_life import new_core

from kvsm.check.worlds.audited import AuditedCore, AuditedWorld
from kvsm.check.worlds.world import Action, World


class Emitting:
    """Each action is called impossible. The action "arrive" emits an event all the same."""

    def __init__(self) -> None:
        self.core, self.log = new_core()

    def do(self, action: Action) -> bool:
        if action == ("arrive",):
            self.core.arrive("r")
        return False


def test_an_impossible_action_that_emits_an_event_has_happened() -> None:
    inner = Emitting()
    world = AuditedWorld(cast("World", inner), lambda: [AuditedCore(inner.core.ledger, inner.log)])
    assert not world.do(("nothing",))
    assert world.do(("arrive",))
    assert not world.do(("nothing",))
