"""Hypothesis, for all tests: no deadline, because a slow machine is no bug.

CI names a profile of `kvsm.testing.profiles` and the day's seed, so each day has examples of its own.
Elsewhere twelve examples do (see `examples.py`), because the suite is run many times a day.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from examples import runs_today

if "CI" in os.environ:
    # Not elsewhere: a mutant is chosen before kvsm is imported.
    import kvsm.testing.profiles  # noqa: F401  (registers the profiles)
else:
    settings.register_profile("kvsm", deadline=None, max_examples=12)
settings.load_profile("kvsm")

# Collecting makes half a million objects, and hardly one of them is garbage. Looking through them again and
# again was a third of the time that collecting took.
gc.disable()

# Tests start hundreds of processes, and each would compile kvsm for itself. So would each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is begun in the background of a script ignores Ctrl-C, and so do its children. The tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        runs = item.get_closest_marker("slow") is None or runs_today(item.nodeid)
        (kept if runs else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def _python_folds() -> Iterator[None]:
    """For a test that changes the text of the Python body, or listens to it: the native body has its own."""
    from kvsm.core import native  # Not above: a mutant is chosen before kvsm is imported.

    with native.without():
        yield


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """What was imported, collected or kept before a file of tests lives as long as the process: no garbage
    collection looks through its half a million objects again. A walk collects after each batch of runs: those
    of test_shard.py took 38 s in a process that had run other files, and 1 s in a new one."""
    gc.collect()
    gc.freeze()
