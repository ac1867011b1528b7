"""The scheduler under every order of steps, copies, reports, aborts, preemptions and resets.

`kvsm.testing.OffloadMachine` makes the checks, and drives kvsm's own unchanged stack.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from examples import examples
from kvsm.testing import OffloadMachine

SETTINGS = OffloadMachine.TestCase.settings


def test_scheduler_keeps_its_promises() -> None:
    chosen = settings(SETTINGS, max_examples=examples(60), stateful_step_count=50)
    run_state_machine_as_test(OffloadMachine, settings=chosen)


@pytest.mark.slow
def test_scheduler_keeps_its_promises_long() -> None:
    chosen = settings(SETTINGS, max_examples=350, stateful_step_count=60)
    run_state_machine_as_test(OffloadMachine, settings=chosen)
