"""Real threads of the real code under a scheduler that takes every schedule within a bound.

    found = explore_schedules(SCOPES["small"])
    found.verdict, found.states  # PROVED, and how many schedules were run

One thread runs at a time, and every switch is a choice (`control.py`). Locks, queues, events, threads, time
and calls of the system are replaced in the modules under test, and nowhere else (`replacing.py`). A scenario
is a small program over that code, which checks properties (`scenario.py`).
"""

from kvsm.check.threads.retold import retell_schedule, steps_of, switches_of
from kvsm.check.threads.scenario import ThreadScenario, ThreadScope, controlled
from kvsm.check.threads.schedules import explore_schedules
from kvsm.check.threads.scopes import SCOPES

__all__ = [
    "SCOPES",
    "ThreadScenario",
    "ThreadScope",
    "controlled",
    "explore_schedules",
    "retell_schedule",
    "steps_of",
    "switches_of",
]
