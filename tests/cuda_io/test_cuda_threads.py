"""The CUDA engine on the fake driver, in every schedule of its threads and of the device within a bound.

The scenario checks order of copies (S12), correct bytes (S15), no reuse in flight (S3), failure is not
success (S6), one release per hold (S4, of the context) and progress (S9).
"""

from __future__ import annotations

import pytest
from cuda_rig import usable_fake
from cuda_threads import CUDA_SCOPES
from msgspec.structs import replace
from museum.exhibit import Edit
from thread_bugs import ThreadBug

from kvsm.check.explore.model import Verdict
from kvsm.check.threads import controlled, explore_schedules
from kvsm.properties import Property

_DEVICE = "kvsm.cuda_io.cuda_engine:CudaDevice"
_STREAMS = "kvsm.copies.streams:StreamCopyEngine"

BUGS = (
    ThreadBug(
        "the table of a kernel is used again before the kernel has run (B37)",
        "kernel",
        Property.CORRECT_BYTES,
        0,
        (
            Edit(
                f"{_DEVICE}.copy",
                "return prepared.keep",
                "return None",
            ),
        ),
    ),
    ThreadBug(
        "a submitting thread has no context",
        "small",
        Property.PROGRESS,
        0,
        (
            Edit(
                f"{_DEVICE}.new_submitter",
                "return ThreadSubmitter(name, died, self._context.make_current, self._context, self._settle)",
                "return ThreadSubmitter(name, died, lambda: None, self._context, self._settle)",
            ),
        ),
    ),
    ThreadBug(
        "a dead submitter does not wait for what it has begun",
        "records",
        Property.NO_REUSE_IN_FLIGHT,
        0,
        (Edit(f"{_DEVICE}._settle", "for stream in self._streams:", "for stream in ():"),),
    ),
    ThreadBug(
        "a copy does not wait for its mark",
        "small",
        Property.COPY_ORDER,
        0,
        (Edit(f"{_STREAMS}._issue", "stream.wait(transfer.after)", "pass"),),
    ),
    ThreadBug(
        "compute is held until a load begins",
        "small",
        Property.COPY_ORDER,
        1,
        (Edit(f"{_STREAMS}.hold_compute", "compute.wait(transfer.end)", "compute.wait(transfer.begin)"),),
    ),
    ThreadBug(
        "an event is used again while a transfer still asks for it",
        "stores",
        Property.LEGAL_CALLS,
        0,
        (
            Edit(
                "kvsm.cuda_io.cuda_engine:_CudaEventPool.record",
                "driver.record_event(handle, stream)",
                "driver.record_event(handle, stream); self.free.append(handle)",
            ),
        ),
    ),
)


@pytest.fixture(autouse=True)
def _fake() -> None:
    """Skips if there is a GPU, or no compiler for the fake driver."""
    usable_fake()


@pytest.mark.parametrize(
    "bug",
    [pytest.param(one, marks=pytest.mark.slow) if one.preemptions else one for one in BUGS],
    ids=lambda bug: bug.says,
)
def test_a_planted_bug_is_found(bug: ThreadBug) -> None:
    scope = CUDA_SCOPES[bug.scope]
    with bug.planted():
        found = explore_schedules(scope)
        assert found.refutation is not None
        assert found.refutation.finding.property is bug.breaks
        with controlled(scope) as runs:
            assert runs.run(found.refutation.path)[0].preemptions == bug.preemptions


SCHEDULES = {"small": 1402, "stores": 4390, "kernel": 4542, "records": 4866}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scope_is_proved(name: str) -> None:
    found = explore_schedules(CUDA_SCOPES[name])
    assert (found.verdict, found.states) == (Verdict.PROVED, SCHEDULES[name])


def test_the_small_scope_is_proved_without_delays() -> None:
    found = explore_schedules(replace(CUDA_SCOPES["small"], preemptions=0, required=False))
    assert (found.verdict, found.states) == (Verdict.PROVED, 24)


@pytest.mark.slow
def test_a_device_may_be_lost_at_any_moment() -> None:
    """The docs have the figures of two delays."""
    one = replace(CUDA_SCOPES["lost"], preemptions=1, required=False)
    assert explore_schedules(one).verdict is Verdict.PROVED
