"""Wrong versions of the adapters for vLLM."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the adapters for vLLM"
_SCHEDULER = "kvsm.vllm.scheduler_side"
_MANAGER = "kvsm.vllm.spec_manager:KvsmManager"
_CONNECTOR = "kvsm.vllm.offloading_connector:KvsmOffloadingConnector"

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
        title="states of a request that lost its blocks are held and stored",
        story="A state is taken from a block that vLLM has given to another request in the same step.",
        shows_when="vLLM offers a state of a request and preempts it in one step.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_SCHEDULER}:SchedulerSide._hold_states",
                "if name in output.num_scheduled_tokens and name not in gone",
                "if name in output.num_scheduled_tokens",
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
        "stores nor loads, and their requests wait for ever.",
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
    Mutant(
        id="M128",
        area=AREA,
        title="promises are not pinned before an eviction",
        story="A store evicts what a lookup of the same step has found, and vLLM's connector then "
        "loads a key that is not there: the engine ends.",
        shows_when="A full host; one request's lookup hits, and another one's store is prepared in that "
        "step.",
        breaks=Property.MATCH_HOLDS,
        edits=(Edit(f"{_MANAGER}.prepare_store", "self._pin_promises()"),),
    ),
    Mutant(
        id="M129",
        area=AREA,
        title="promises that are not kept hold their blocks",
        story="A hit that vLLM does not load stays pinned until its request ends, so the pool fills "
        "up with blocks that cannot be evicted.",
        shows_when="A lookup hits, a store pins the promise, and vLLM does not schedule the request.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                f"{_MANAGER}.on_schedule_end",
                """
                for request in self._promises.by_request:
                    core.release(request)
                """,
            ),
        ),
    ),
    Mutant(
        id="M130",
        area=AREA,
        title="a job that has ended is still known",
        story="A store that was lost or has failed is taken for one that is still under way, so its "
        "keys are never stored by this request again.",
        shows_when="A store fails, and the request offers the same keys once more.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_MANAGER}._complete",
                "transfer = self._jobs.pop((request, direction, named), _UNKNOWN_TRANSFER)",
                "transfer = self._jobs.get((request, direction, named), _UNKNOWN_TRANSFER)",
            ),
        ),
    ),
    Mutant(
        id="M131",
        area=AREA,
        title="a rank reports its failed copies as good",
        story="The errors of a rank are taken and not looked at, so wrong bytes are served.",
        shows_when="A copy fails on one rank under KvsmOffloadingConnector.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                f"{_CONNECTOR}.build_connector_worker_meta",
                'WorkerReport(transfer, self._rank, job not in errors, errors.get(job, ""))',
                'WorkerReport(transfer, self._rank, True, errors.get(job, ""))',
            ),
        ),
    ),
    Mutant(
        id="M132",
        area=AREA,
        title="a reset makes window groups offer everything again",
        story="Running requests offer blocks that have left their window, and that other requests "
        "compute into.",
        shows_when="A model with a sliding window is reset while a request runs whose first blocks were "
        "freed.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_CONNECTOR}.reset_cache",
                """
                for group, cursor in kept:
                    group.next_stored_chunk_idx = cursor
                """,
            ),
        ),
    ),
    Mutant(
        id="M133",
        area=AREA,
        title="the blocks of a lost load are not kept away from vLLM",
        story="The device blocks of a load that was given up go back to vLLM's pool, and a late copy "
        "writes into another request's KV.",
        shows_when="A load hangs for longer than transfer_timeout_s, and its request is aborted.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_CONNECTOR}._note_load_end",
                """
                if ended.lost and self._pool is not None:
                    blocks = [block for block in job.device_blocks if block != _NULL_BLOCK]
                    self._pool.touch(blocks)
                    self._pool.retire(blocks)
                """,
            ),
        ),
    ),
)
