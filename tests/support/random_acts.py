"""Random actions on a small engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest


class DescribedRequest(SmallRequest):
    """A small request with all fields that a self-describing KV event reads."""

    def __init__(
        self, name: str, prompt: Sequence[int], outputs: int = 1, lora: str = "", **more: Any
    ) -> None:
        self.mm_features: Sequence[Any] = more.pop("mm_features", ())
        self.cache_salt: str | None = more.pop("cache_salt", None)
        super().__init__(name, prompt, outputs, extras=lora.encode(), **more)
        self.lora_request = SimpleNamespace(adapter_id=7, name=lora) if lora else None  # type: ignore[assignment]


ACTS = st.lists(st.integers(0, 1 << 20), min_size=40, max_size=120)


def live(engine: SmallEngine, act: int) -> None:
    """Do one random action, chosen by `act`."""
    act, number = act % 16, act >> 4
    copies, running = list(engine.copies), list(engine.running.values())
    if act < 4:
        prompt = [1 + number % 3] * (number % 29 + 1)
        lora = "adapter" if number % 5 == 0 else ""
        engine.arrive(DescribedRequest(str(len(engine.requests)), prompt, number % 6 + 1, lora))
    elif act < 9:
        engine.step()
    elif act < 13 and copies:
        engine.carry_out(copies[number % len(copies)], good=number % 4 > 0)
        engine.hand_on()
    elif act == 13 and running:
        engine.finish(running[number % len(running)], aborted=True)
    elif act == 14 and running:
        engine.preempt(running[number % len(running)])
    elif act == 15 and number % 2:
        engine.reset()
