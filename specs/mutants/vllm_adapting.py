"""Wrong versions of the adapter for vLLM."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the adapters for vLLM"
_SCHEDULER = "kvsm.vllm.scheduler_side"

VLLM_ADAPTING = (
    Mutant(
        id="M122",
        area=AREA,
        title="a reset keeps the states that it forgets",
        story="The references to mamba states that wait for their store are dropped by nobody, so "
        "vLLM's pool shrinks with each reset.",
        shows_when="A model with mamba layers, and a reset between the step that computes a state and the "
        "next one.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(Edit(f"{_SCHEDULER}:SchedulerSide._forget", "self._free_states(self._states)"),),
    ),
    Mutant(
        id="M123",
        area=AREA,
        title="a state is stored in the step that computes it",
        story="The states that a step is about to compute are stored with the blocks that are already "
        "computed, so the copy does not wait for the step.",
        shows_when="A step of a model with mamba layers computes the state at the end of a block.",
        breaks=Property.COPY_ORDER,
        edits=(
            Edit(
                f"{_SCHEDULER}:SchedulerSide._plan_with_states",
                "computed, self._states = self._states, self._hold_states(output)",
                "computed = self._hold_states(output)",
            ),
        ),
    ),
    Mutant(
        id="M124",
        area=AREA,
        title="an admitted request's prefix is stored in the same step",
        story="A prefix that another request computes in this very step is stored before it is computed.",
        shows_when="Two requests with one prompt in one step, the second of which hits the first one's "
        "blocks.",
        breaks=Property.COPY_ORDER,
        edits=(
            Edit(
                f"{_SCHEDULER}:_step_output",
                "scheduled = [name for name in scheduled if name not in admitted]",
                "pass",
            ),
        ),
    ),
    Mutant(
        id="M125",
        area=AREA,
        title="a resumed request's blocks are noted twice",
        story="The blocks of a request that is resumed stand in its table twice, so every later block "
        "of it is stored from the wrong place.",
        shows_when="vLLM preempts a request and resumes it.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_SCHEDULER}:_step_output",
                """
                for name in cached.resumed_req_ids:
                    # New and resumed requests have reported all their blocks when they got them.
                    grown.pop(name, None)
                """,
            ),
        ),
    ),
    Mutant(
        id="M126",
        area=AREA,
        title="a step without copies of the device starts none at all",
        story="Copies of the disk tier and from other engines are dropped in a step that neither "
        "stores nor loads, and their requests wait forever.",
        shows_when="A step whose only work is a copy from the disk.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.vllm.worker_side:WorkerSide.start",
                "if not step.plan and not step.imports and not step.disk:",
                "if not step.plan:",
            ),
        ),
    ),
    Mutant(
        id="M127",
        area=AREA,
        title="new weights are not noted",
        story="After a change of weights nothing old is matched, but the log names the old ones, so a "
        "process that starts with the old weights serves what the new ones have computed.",
        shows_when="An engine on a kept pool is given other weights by name, stores blocks, and the next "
        "process starts with the first weights.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_SCHEDULER}:SchedulerSide.set_weights_version",
                "self._forget(version)",
                "self._forget(None)",
            ),
        ),
    ),
)
