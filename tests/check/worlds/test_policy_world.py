"""The world of one eviction policy sees a policy that breaks its rules."""

from __future__ import annotations

import pytest

from kvsm.check.worlds.policy_world import PolicyWorld, PolicyWorldOptions
from kvsm.core.policies import POLICIES
from kvsm.errors import PropertyBroken


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_evicts_what_is_protected_is_seen(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A match holds what it counts (S7)."""
    world = PolicyWorld(PolicyWorldOptions(policy=policy, capacity=40))
    choose = world._policy.choose
    monkeypatch.setattr(world._policy, "choose", lambda count, _protected: choose(count, ()))
    assert world.do(("admit", 40, 0))
    with pytest.raises(PropertyBroken, match="are protected"):
        world.do(("evict", 30, 0, 3))
