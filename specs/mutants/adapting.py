"""Wrong versions of what stands between the core and its surroundings: workers, copy engines, routers, other
engines, and the next process."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "workers, copy engines, events and restarts"
_WORKER = "kvsm.copies.worker:Worker"
_STREAMS = "kvsm.copies.streams:StreamCopyEngine"
_PUBLISHER = "kvsm.core.kv_events:Publisher"

ADAPTING = (
    Mutant(
        id="M104",
        area=AREA,
        title="a refused job is never reported",
        story="A job that the copy engine does not take is counted and forgotten, so its request "
        "waits forever.",
        shows_when="The device is gone, and the engine refuses every job.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_WORKER}._start",
                "self._refused.append(WorkerReport(job.transfer, self.rank, False, described(error)))",
            ),
        ),
    ),
    Mutant(
        id="M105",
        area=AREA,
        title="refused jobs are reported with the next copy",
        story="Reports of refused jobs wait until some copy has ended, which may be never.",
        shows_when="The engine refuses the only job of a step.",
        breaks=Property.PROGRESS,
        edits=(Edit(f"{_WORKER}.poll", "if not results and not self._refused:", "if not results:"),),
    ),
    Mutant(
        id="M106",
        area=AREA,
        title="a step's copies begin before those that it awaits have ended",
        story="The worker waits for older copies only after it has begun the new ones, so a load "
        "writes a block that an older store still reads.",
        shows_when="An engine without references gives the block of a store in flight to a request that "
        "loads into another one of its blocks later; the plan flushes the store and loads.",
        breaks=Property.COPY_ORDER,
        edits=(
            Edit(
                f"{_WORKER}.start",
                """
                given = {job.transfer for job in (*plan.loads, *plan.stores)}
                self._engine.wait([transfer for transfer in plan.flush if transfer not in given])
                self.submit((*plan.loads, *plan.stores))
                self._engine.wait([transfer for transfer in plan.flush if transfer in given])
                """,
                """
                self.submit((*plan.loads, *plan.stores))
                self._engine.wait(plan.flush)
                """,
            ),
        ),
    ),
    Mutant(
        id="M107",
        area=AREA,
        title="a refused job stays unreported in the books of its worker",
        story="Transfers that were refused never leave the list of live ones, so the worker cannot "
        "change its copy engine, and an engine that wakes up fails.",
        shows_when="A job is refused and reported, and then the KV cache moves.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_WORKER}.poll",
                """
                for report in reports:
                    del self._live[report.transfer]
                """,
                """
                for result in results:
                    del self._live[result.transfer]
                """,
            ),
        ),
    ),
    Mutant(
        id="M108",
        area=AREA,
        title="a block that stands in two chunks is removed with the first",
        story="The router hears that a block is gone although another chunk still has it, and sends "
        "the request elsewhere.",
        shows_when="Chunks of two blocks, self-describing events, two prompts that part within a chunk, "
        "and one chunk is evicted.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                f"{_PUBLISHER}._gone_with",
                """
                if chunks_with[name] < 1:
                    del chunks_with[name]
                    yield name
                """,
                """
                yield name
                """,
            ),
        ),
    ),
    Mutant(
        id="M109",
        area=AREA,
        title="the removal of a chunk names its last block alone",
        story="The other blocks of the chunk stay announced forever, and the router sends requests in vain.",
        shows_when="Chunks of two blocks and self-describing events: a chunk is stored and evicted.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                f"{_PUBLISHER}.take_kv_events",
                "BlockRemoved(hashes, self.medium, group) for group, hashes in _by_group(change.names)",
                "BlockRemoved(hashes, self.medium, group) for group, hashes in _by_group(change.keys)",
            ),
        ),
    ),
    Mutant(
        id="M110",
        area=AREA,
        title="keys before a described one are not announced",
        story="Of one store, the keys that nobody can describe are announced only if they stand "
        "behind all others, so the router does not hear of them.",
        shows_when="A store of two requests, of which the first has prompt embeddings, with self- "
        "describing events.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.kv_events:_stored_events",
                """
                yield from _legacy(unknown, medium)
                unknown.clear()
                yield event
                """,
                """
                unknown.clear()
                yield event
                """,
            ),
        ),
    ),
    Mutant(
        id="M111",
        area=AREA,
        title="other weights start warm",
        story="A process with other weights serves what the last one's weights have computed.",
        shows_when="An engine on kept pools ends, and starts with a new version of its weights.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.tiers.warm_restart:_differences",
                """
            if ledger.weights != weights:
                lines.append(f"weights: {ledger.weights or 'not named'}, and now {weights or 'not named'}")
                """,
            ),
        ),
    ),
    Mutant(
        id="M112",
        area=AREA,
        title="pools that changed places start warm",
        story="The log does not compare which pool each rank has, so each rank serves another one's share "
        "of every block.",
        shows_when="The files of two ranks' pools are exchanged between two processes.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                "kvsm.tiers.warm_restart:_differences",
                """
                if not lines and ledger.kept.ids != pools.ids:
                    lines.append("the log speaks of other pools than those that are there")
                """,
            ),
        ),
    ),
    Mutant(
        id="M113",
        area=AREA,
        title="what the caller knows against a warm start is not heard",
        story="A pool that its rank has found cold is served as warm.",
        shows_when="One rank could not take its pool over, and says so in `why_cold`.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                "kvsm.tiers.warm_restart:_start",
                "if left is not None and not (why_cold or reasons):",
                "if left is not None and not reasons:",
            ),
        ),
    ),
    Mutant(
        id="M114",
        area=AREA,
        title="a dead submitter fails what the device already has",
        story="Copies that were handed to the device are reported as bad while they still run, so "
        "their memory is used again under them.",
        shows_when="The thread that submits dies while an earlier copy of its direction is under way.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_STREAMS}._submitter_died",
                "self._fail([each for each in live if each.job.direction is direction and each.end is None])",
                "self._fail([each for each in live if each.job.direction is direction])",
            ),
        ),
    ),
    Mutant(
        id="M115",
        area=AREA,
        title="a copy engine closes its device under running copies",
        story="Closing does not wait for the copies that are under way, and they touch memory that is "
        "given back.",
        shows_when="An engine is closed while a copy is in flight.",
        breaks=Property.COPY_ORDER,
        edits=(Edit(f"{_STREAMS}.close", "self.drain()"),),
    ),
    Mutant(
        id="M116",
        area=AREA,
        title="compute is not held for loads that are not issued yet",
        story="The engine computes without waiting for a load whose submitter has not run, and reads "
        "blocks that are not loaded.",
        shows_when="A step waits for a load that was submitted just now.",
        breaks=Property.COPY_ORDER,
        edits=(
            Edit(
                f"{_STREAMS}.hold_compute",
                "for transfer in self._issued_among(transfers):",
                "for transfer in [self._live[one] for one in transfers if one in self._live]:",
            ),
        ),
    ),
    Mutant(
        id="M117",
        area=AREA,
        title="replicas leave the last blocks to nobody",
        story="The share of each replica is rounded down, so the blocks of a store that are left over "
        "are written by none of them, and read as stored.",
        shows_when="Two replicas store three blocks.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                "kvsm.copies.replicas:ReplicaCopyEngine._part",
                "ours = slice(*(len(hosts) * number // self._replicas for number in"
                " (self._number, self._number + 1)))",
                """
                share = len(hosts) // self._replicas
                ours = slice(self._number * share, (self._number + 1) * share)
                """,
            ),
        ),
    ),
    Mutant(
        id="M118",
        area=AREA,
        title="the last piece of a copy decides whether it was good",
        story="A copy of which a middle piece failed is reported as good.",
        shows_when="A copy of several pieces on two threads, of which the first one fails and the last "
        "does not.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                "kvsm.copies.threaded:ThreadedCopyEngine._end_piece",
                "transfer.error = transfer.error or error",
                "transfer.error = error",
            ),
        ),
    ),
    Mutant(
        id="M119",
        area=AREA,
        title="waiting for a load does not wait for its proof",
        story="A load from a kept pool whose blocks are still being proved counts as ended for the "
        "one who waits, and the step computes without it.",
        shows_when="After a warm restart a step waits for its load.",
        breaks=Property.COPY_ORDER,
        edits=(
            Edit(
                "kvsm.copies.verifying:VerifyingCopyEngine.wait",
                "self._await_proofs(named)",
            ),
        ),
    ),
    Mutant(
        id="M120",
        area=AREA,
        title="blocks of another engine count although it did not hold them",
        story="A decode engine takes copied blocks for good although the prefill engine says that it "
        "gave them up meanwhile, so they may hold another prompt's KV.",
        shows_when="A hand-over expires while its blocks are copied.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                "kvsm.tiers.hand_over.incoming:IncomingHandOvers._judged",
                "reports = [WorkerReport(each.transfer, each.worker, False, why) for each in reports]",
            ),
        ),
    ),
    Mutant(
        id="M121",
        area=AREA,
        title="a hand-over whose blocks were voided is still confirmed",
        story="A prefill engine goes on promising blocks that a failed load has taken away, and whose "
        "slots are used again.",
        shows_when="Another request's load of the handed-over blocks fails before a decode engine reads "
        "them.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                "kvsm.tiers.hand_over.outgoing:OutgoingHandOvers._hold_or_revoke",
                "self.leases.revoke(lease)",
                "pass",
            ),
        ),
    ),
)
