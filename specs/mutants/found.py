"""What the checkers find of the mutants, and what is missing to find the others.

A slow test looks for a sample of the mutants and compares; README.md is written from it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from museum.found import BARE, COPIES, CORE, DISK, DISTURBED, KILLED, LAZY, TIERS, FoundBy

from kvsm.properties import Property

MACHINE = "machine: scheduler"
SERVING = "walk: serving"
THREADS = "exploration: threads"


class Need(Enum):
    """What a checker lacks that would see some mutants: a world, a scope, an action or a check."""

    KEPT = "Offers: a check of what should be on the host, and engines that do more than one thing in a step"
    LAYERS = (
        "Serving scopes with other layers: sliding windows, several groups, drafters, chunks of two blocks"
    )
    SESSIONS = "Serving scopes with sessions, whose prompts grow"
    LOST = "Serving scopes in which transfers are lost"
    LAZY = "The lazy scope: a check when a block is taken"
    EPOCHS = "Resets while the device holds what loads have brought"
    BATCHES = "The core walk: batches of more than sixteen, and policies that protect"
    WITNESS = "The second book beside the ledger in every world, and forged logs"
    DISK = "The disk and tier worlds: real eras, failing resets, uneven ranks"
    SAVED = "A world that saves and restores in the middle, and goes on"
    LOG = "The killed scope on the real log, with kills between any two writes"
    CHECKS = "Checks of the checks: forged logs and forged ledgers, in which each check must object"
    WORKERS = "The real `Worker`, and the engines around and beside the one of streams"
    ROUTER = "The router scope with chunks of two blocks and descriptions"
    STARTS = "The real start of a process on kept pools"
    HAND_OVER = "The hand-over world, which exists, among the museum's checkers"
    VLLM = "A world around the adapters for vLLM, with real vLLM or a model of its calls"


class Missed(NamedTuple):
    """A mutant that no checker sees.

    needs: what is missing.
    seen_by: what of that would see it.
    """

    needs: Need
    seen_by: str


FOUND = {
    "M04": FoundBy(SERVING, Property.CORRECT_BYTES, 40),
    "M11": FoundBy(LAZY, Property.ONE_RELEASE_PER_HOLD, 9),
    "M15": FoundBy(DISTURBED, Property.ONE_RELEASE_PER_HOLD, 4),
    "M16": FoundBy(BARE, Property.CORRECT_BYTES, 7),
    "M24": FoundBy(SERVING, Property.FULL_OFFLOAD, 159),
    "M25": FoundBy(BARE, Property.PROGRESS, 10),
    "M27": FoundBy(SERVING, Property.FULL_OFFLOAD, 154),
    "M28": FoundBy(SERVING, Property.ONE_TOKEN_LEFT, 80),
    "M30": FoundBy(MACHINE, Property.PUBLISH_AFTER_COMMIT, 3),
    "M31": FoundBy(CORE, Property.MATCH_HOLDS, 2),
    "M32": FoundBy(CORE, Property.LEGAL_CALLS, 6),
    "M33": FoundBy(BARE, Property.LEGAL_CALLS, 8),
    "M34": FoundBy(CORE, Property.LAST_STEP, 4),
    "M35": FoundBy(CORE, Property.PROGRESS, 5),
    "M36": FoundBy(CORE, Property.PROGRESS, 2),
    "M39": FoundBy(CORE, Property.NO_STALE_DATA, 12),
    "M40": FoundBy(DISTURBED, Property.NO_STALE_DATA, 11),
    "M41": FoundBy(TIERS, Property.LEGAL_CALLS, 6),
    "M45": FoundBy(CORE, Property.CONSERVATION, 6),
    "M46": FoundBy(TIERS, Property.CONSERVATION, 8),
    "M47": FoundBy(CORE, Property.LEGAL_CALLS, 6),
    "M49": FoundBy(CORE, Property.STORED_ONCE, 5),
    "M51": FoundBy(CORE, Property.STORED_ONCE, 3),
    "M52": FoundBy(CORE, Property.STORED_ONCE, 9),
    "M55": FoundBy(CORE, Property.ONE_RELEASE_PER_HOLD, 6),
    "M56": FoundBy(CORE, Property.NO_STALE_DATA, 13),
    "M58": FoundBy(CORE, Property.EVENTS_ARE_STATE, 6),
    "M59": FoundBy(TIERS, Property.LEGAL_CALLS, 6),
    "M60": FoundBy(CORE, Property.STORED_ONCE, 2),
    "M61": FoundBy(CORE, Property.NO_REUSE_IN_FLIGHT, 9),
    "M63": FoundBy(TIERS, Property.CONSERVATION, 5),
    "M65": FoundBy(DISK, Property.LEGAL_CALLS, 6),
    "M67": FoundBy(THREADS, Property.FAILURE_IS_NOT_SUCCESS, 15),
    "M68": FoundBy(TIERS, Property.CONSERVATION, 12),
    "M72": FoundBy(TIERS, Property.LEGAL_CALLS, 6),
    "M79": FoundBy(SERVING, Property.CONSERVATION, 12),
    "M85": FoundBy(KILLED, Property.NO_STALE_DATA, 6),
    "M89": FoundBy(CORE, Property.LEGAL_CALLS, 1),
    "M90": FoundBy(CORE, Property.LEGAL_CALLS, 3),
    "M114": FoundBy(THREADS, Property.LEGAL_CALLS, 20),
    "M115": FoundBy(THREADS, Property.NO_REUSE_IN_FLIGHT, 15),
    "M116": FoundBy(COPIES, Property.COPY_ORDER, 4),
    "M118": FoundBy(THREADS, Property.FAILURE_IS_NOT_SUCCESS, 10),
    "M119": FoundBy(THREADS, Property.COPY_ORDER, 5),
}

MISSED = {
    "M02": Missed(
        Need.KEPT,
        "At the end of a request each block that the device still holds is on the host, in "
        "flight, or had no room.",
    ),
    "M08": Missed(
        Need.KEPT, "A chunk that waits is offered in the first step in which the host has room for it."
    ),
    "M13": Missed(
        Need.KEPT,
        "An engine without references that preempts a request in the step that admitted it, and "
        "gives its blocks away.",
    ),
    "M14": Missed(
        Need.KEPT,
        "A name that is used again while the earlier request's blocks are kept, without references.",
    ),
    "M23": Missed(
        Need.KEPT,
        "Several chunks of one request wait at once; at its end none may be missing without a skip after it.",
    ),
    "M01": Missed(
        Need.LAYERS,
        "A scope with a window that is no multiple of a block, whose bytes are compared for every "
        "token that the window needs.",
    ),
    "M06": Missed(
        Need.LAYERS, "A drafting group in a scope; at rest the last full chunk must be on the host."
    ),
    "M07": Missed(
        Need.LAYERS, "A small engine that drafts: a rejected draft rewrites the last block of the group."
    ),
    "M18": Missed(
        Need.LAYERS, "A full and a window group, and an engine that accepts less than it was offered."
    ),
    "M19": Missed(Need.LAYERS, "Two groups and chunks of two blocks, with a hit that begins within a chunk."),
    "M20": Missed(
        Need.LAYERS,
        "Chunks of two blocks and a prompt that ends within one: what was promised must be loaded.",
    ),
    "M21": Missed(Need.LAYERS, "Two window groups, of which each loses another block."),
    "M22": Missed(
        Need.LAYERS,
        "Chunks of two blocks, a hit that ends within one, and evictions while the request decodes.",
    ),
    "M03": Missed(Need.SESSIONS, "A request that goes on with a next part after its blocks were evicted."),
    "M29": Missed(
        Need.SESSIONS,
        "A next part that replaces the last output token; stored bytes are compared with the tokens.",
    ),
    "M05": Missed(
        Need.LOST,
        "Lost loads in a scope; an engine that takes `LoadEnded.num_computed_tokens` at its word "
        "after a loss.",
    ),
    "M12": Missed(Need.LOST, "Lost loads with references: no block of a lost load may be given to anybody."),
    "M26": Missed(
        Need.LOST,
        "The core loses a load between two steps; an engine that asks `has_pending_work` before each step.",
    ),
    "M09": Missed(
        Need.LAZY,
        "No block leaves the head of the free queue while the host lacks it and has room: checked "
        "when it is taken.",
    ),
    "M10": Missed(Need.LAZY, "The same, with requests that take more blocks at once than the surplus."),
    "M17": Missed(Need.EPOCHS, "A reset between the end of a load and the next blocks of its request."),
    "M37": Missed(
        Need.EPOCHS,
        "Chunks of two blocks, of which a load before a reset brought the first one alone. The "
        "core walk has both, but seldom together.",
    ),
    "M38": Missed(
        Need.EPOCHS, "A reset when the host is empty and the device still holds what a load brought."
    ),
    "M42": Missed(
        Need.BATCHES,
        "A walk with pools of some hundred slots and offers of more than sixteen keys, under each policy.",
    ),
    "M43": Missed(
        Need.BATCHES,
        "ARC with a high target and protected blocks in its first queue; no offer may evict what "
        "it found resident.",
    ),
    "M44": Missed(
        Need.BATCHES,
        "The same walk with large offers, or a model of `SlotQueue` that is checked with batches "
        "above sixteen.",
    ),
    "M48": Missed(
        Need.WITNESS,
        "A check that the fold refuses a log without one of its events: forged logs, each with "
        "one event cut out.",
    ),
    "M50": Missed(
        Need.WITNESS, "The second book (`Witness.compare`) after each event of a walk: it keeps `ended_at`."
    ),
    "M53": Missed(
        Need.WITNESS,
        "Two requests that match one block whose load is lost. The second book and `check_ledger` "
        "both see the pin.",
    ),
    "M57": Missed(
        Need.WITNESS,
        "The second book after each event: it keeps `forgotten_at`. Or the check of the lazy store above.",
    ),
    "M54": Missed(
        Need.DISK,
        "A host pool that outlives its process, with a disk tier below it: a kill while a block "
        "is copied to the disk.",
    ),
    "M62": Missed(
        Need.DISK,
        "A count of what should be on the disk: what the host stored, and no copy failed, is there at rest.",
    ),
    "M64": Missed(Need.DISK, "A `void` that raises: the disk is full when a reset writes its era."),
    "M66": Missed(
        Need.DISK, "The same key stored twice into one slot around a reset, and a kill between the two ranks."
    ),
    "M69": Missed(
        Need.DISK,
        "Resets that go through `OpenEra`, as a scheduler makes them. The disk world writes its era itself.",
    ),
    "M70": Missed(
        Need.DISK,
        "Ranks whose files were opened a different number of times: a kill between the opening of two files.",
    ),
    "M71": Missed(
        Need.DISK,
        "Resets to other weights that go through `OpenEra`, and a start with the first weights again.",
    ),
    "M73": Missed(
        Need.SAVED,
        "A walk that saves and restores the ledger at a drawn event and goes on beside the "
        "original; both must decide alike. `transfer_ticks` is set.",
    ),
    "M74": Missed(Need.SAVED, "The same, while a request waits."),
    "M75": Missed(Need.SAVED, "The same with a disk tier below."),
    "M76": Missed(Need.SAVED, "The same after a load and a reset."),
    "M77": Missed(Need.SAVED, "The same: the next slots of both must be equal."),
    "M78": Missed(Need.SAVED, "The same with ARC and a ghost whose store is in flight."),
    "M80": Missed(Need.SAVED, "The same with store_threshold and a full history."),
    "M81": Missed(
        Need.SAVED,
        "An exploration that merges no states, of a scope that is small enough, must reach the "
        "same verdicts and states.",
    ),
    "M82": Missed(
        Need.LOG, "A kill at each event: the log must say of each copy that a worker has seen that it left."
    ),
    "M83": Missed(Need.LOG, "The killed scope with `flush_within_ms` and a clock that is chosen."),
    "M84": Missed(
        Need.LOG,
        "The killed scope with a copy that hangs: what a step has told the engine is in the log "
        "after its end.",
    ),
    "M86": Missed(
        Need.LOG, "The real `LogWriter` in a world: what was appended before a good end is read back."
    ),
    "M87": Missed(
        Need.LOG,
        "The real `LogWriter` on a disk whose sync fails and drops pages, and then a write: the "
        "history of the museum's disk world has such a disk.",
    ),
    "M88": Missed(Need.LOG, "The killed scope on the real log instead of a model of it."),
    "M91": Missed(
        Need.LOG, "The same, with a kill right after the jobs left, and two steps within a sync interval."
    ),
    "M92": Missed(Need.LOG, "The same, with kills in the middle of a write."),
    "M93": Missed(Need.CHECKS, "A log in which an eviction names a pinned slot."),
    "M94": Missed(Need.CHECKS, "A log in which a store names a device block of a load in flight."),
    "M95": Missed(Need.CHECKS, "A log in which a chunk begins with a block of an older epoch."),
    "M96": Missed(
        Need.CHECKS, "A walk that runs the second book on good logs with failed stores: it must be silent."
    ),
    "M97": Missed(Need.CHECKS, "A log in which a voided match is loaded."),
    "M98": Missed(Need.CHECKS, "A ledger whose `since` was changed."),
    "M99": Missed(Need.CHECKS, "A ledger in which a load and a store share a device block."),
    "M100": Missed(Need.CHECKS, "A ledger in which a transfer of an older epoch is not abandoned."),
    "M101": Missed(Need.CHECKS, "A ledger at rest with a leased device block."),
    "M102": Missed(Need.CHECKS, "A ledger with a pin that no match holds."),
    "M103": Missed(Need.CHECKS, "Two ledgers of which one lacks a report."),
    "M104": Missed(
        Need.WORKERS,
        "The real `Worker` over an engine that refuses jobs: every job that was taken is reported once.",
    ),
    "M105": Missed(Need.WORKERS, "The same, if nothing else is in flight."),
    "M106": Missed(
        Need.WORKERS,
        "The real `Worker` in the copies world, with plans that flush: no load before the awaited "
        "store has ended.",
    ),
    "M107": Missed(Need.WORKERS, "The same: at rest `unreported` is empty."),
    "M117": Missed(
        Need.WORKERS,
        "Replica engines in a world: the ranks' host pool is compared after a store of an odd "
        "number of blocks.",
    ),
    "M108": Missed(
        Need.ROUTER, "Self-describing events with chunks of two blocks, and prompts that part within a chunk."
    ),
    "M109": Missed(Need.ROUTER, "The same: the removal must name all blocks of the chunk."),
    "M110": Missed(Need.ROUTER, "A request with prompt embeddings beside another one in one store."),
    "M111": Missed(Need.STARTS, "The real `kvsm.restart.start` in the killed scope, with other weights."),
    "M112": Missed(Need.STARTS, "The same, with a pool that was made again."),
    "M113": Missed(Need.STARTS, "The same, with a rank that says that its pool is cold."),
    "M120": Missed(Need.HAND_OVER, "A lease that ends while its blocks are copied."),
    "M121": Missed(Need.HAND_OVER, "A load of the handed-over blocks that fails."),
    "M122": Missed(
        Need.VLLM, "A model with mamba layers and a reset: at rest each block's references are zero."
    ),
    "M123": Missed(Need.VLLM, "A state that is offered in the step in which its request is preempted."),
    "M124": Missed(Need.VLLM, "Two requests with one prompt in one step."),
    "M125": Missed(Need.VLLM, "A request that is preempted and resumed, whose stored bytes are compared."),
    "M126": Missed(Need.VLLM, "An engine with a disk tier and a step that only fetches."),
    "M127": Missed(Need.VLLM, "A change of weights by name, and a warm start with the old ones."),
    "M128": Missed(Need.VLLM, "Lookups and stores of several requests in one step, with a full host."),
    "M129": Missed(Need.VLLM, "The same: after `on_schedule_end` no promise holds a pin."),
    "M130": Missed(Need.VLLM, "A store that fails, and the same offer again."),
    "M131": Missed(Need.VLLM, "A copy that fails on one of two ranks."),
    "M132": Missed(Need.VLLM, "A reset under load in a model with a window."),
    "M133": Missed(Need.VLLM, "A load that hangs, and a pool that must not give its blocks away."),
}
