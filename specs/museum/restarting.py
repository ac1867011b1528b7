"""Restarts: bugs in the state that a process takes over from the last one, and in what a reset leaves."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

_NEXT_LEDGER = "kvsm.core.ledger.restart:restarted"
_NEXT_CORE = "kvsm.core.offloader.offloader:Offloader.restarted"
_GIVEN_BACK = "given_back = np.flatnonzero((ledger.blocks.view == EVICTED_WORD) & (before != EVICTED_WORD))"

RESTARTING = (
    Exhibit(
        id="B41",
        source="LMCache#1175",
        title="the index is lost when the process ends",
        story="Blocks were written to disk, and which block is where was known in memory only. After a"
        " restart the index was empty, so lookups missed blocks that were still on disk. Their prefixes"
        " were computed and written again.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                _NEXT_CORE,
                "core.config, core.publisher = config, publisher",
                """
                core.config, core.publisher = config, publisher
                core.reset()
                """,
            ),
        ),
    ),
    Exhibit(
        id="B42",
        source="LMCache#4564",
        title="what earlier processes have stored does not count for eviction",
        story="After a restart the usage of the SSD was counted from zero, although its directory held the"
        " files of earlier processes. The eviction began too late, and did not know these files. In kvsm"
        " the next process begins with an empty eviction policy.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                _NEXT_LEDGER,
                """
                _let_go(ledger.policy, [slot for slot in used if slot not in ledger.policy], held)
                """,
                "ledger.policy = make_policy(config.policy, config.host_blocks)",
            ),
        ),
    ),
    Exhibit(
        id="B43",
        source="Mooncake#1336",
        title="stored data is taken for empty space",
        story="The master process was restarted and had forgotten which objects there were. Their data was"
        " still in the memory of the clients. The master took this memory for empty space and let new data"
        " be written over it.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                _NEXT_LEDGER,
                _GIVEN_BACK,
                """
                given_back = np.flatnonzero(
                    readable | ((ledger.blocks.view == EVICTED_WORD) & (before != EVICTED_WORD))
                )
                """,
            ),
        ),
    ),
    Exhibit(
        id="B44",
        source="DingoCache PR 82",
        title="the space of a write that was cut off is lost forever",
        story="A process was killed while it wrote a block. The next process skipped the unfinished file: it"
        " was not indexed, did not count as used space, and was never evicted. Each such kill took some"
        " space forever.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                _NEXT_LEDGER,
                _GIVEN_BACK,
                """
                given_back = np.flatnonzero(
                    (ledger.blocks.view == EVICTED_WORD) & (before != EVICTED_WORD) & ~are_indexed(before)
                )
                """,
            ),
        ),
    ),
    Exhibit(
        id="B45",
        source="Rapid-MLX PR 187",
        title="the saved index names old content where new content is being written",
        story="A prefix cache was saved by rewriting its files in place. A kill in the middle left the old"
        " index beside new files. The next process believed the index, and its answers were garbage. In"
        " kvsm a plan leaves for the workers before the log has it.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.core.offloader.emitter:EventEmitter.flush_log",
                "ledger = self.ledger",
                """
                ledger = self.ledger
                if reason in (LogFlush.JOBS_LEAVE, LogFlush.STEP_ENDED):
                    return
                """,
            ),
        ),
    ),
    Exhibit(
        id="B46",
        source="dynamo#1056",
        title="after a restart the router never hears of what is stored",
        story="A router learned from events which blocks its workers held. Once its side was restarted, it"
        " knew none of the blocks from before, and nobody told it again. New blocks named parents that it"
        " had never heard of. In kvsm the next process does not tell what it has kept.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(Edit(_NEXT_CORE, "publisher.stored(ledger.seq, readable_keys(ledger))", "pass"),),
    ),
    Exhibit(
        id="B47",
        source="vllm#49829",
        title="a request waits for a write in flight without end",
        story="A lookup found a block whose write was in flight, so the request had to wait and ask again."
        " Nothing limited this wait. A write that never completed kept every request with this prefix"
        " waiting until its client gave up.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.core.offloader.matching:may_defer",
                "return ticks > 0 and (entry is None or entry.patience < 0 or entry.patience > now)",
                "return ticks > 0",
            ),
        ),
    ),
    Exhibit(
        id="B48",
        source="vllm#57727",
        title="a reset succeeds, and the tier below keeps serving",
        story="A reset of the prefix cache cleared the device, and its answer said that all went well. The"
        " tier in host memory had not been reset. The next request with the same prompt was served from"
        " it.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler.reset_cache",
                "done = self.offloader.reset(weights)",
                "done = True",
            ),
        ),
    ),
)
