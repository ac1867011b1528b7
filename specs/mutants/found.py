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
AUDITED_CORE = "walk: audited core"
AUDITED_TIERS = "walk: audited tiers"
AUDITED_SERVING = "walk: audited serving"
WRONG_CORE = "walk: wrong books of a core"
WRONG_TIERS = "walk: wrong books of tiers"
LAYERS = "walk: serving with layers"
FREE_QUEUE = "walk: serving from the free queue"
WORKERS = "walk: workers"
LOG_AHEAD = "walk: log ahead"
STARTS = "walk: starts"
HAND_OVER = "walk: hand-over"
ROUTER = "walk: router"
LARGE_CORE = "walk: large core"
POLICIES = "walk: policies"
CROWDED_CORE = "walk: crowded core"
LOADING = "walk: hand-over with loads"
FAILING_LOG = "walk: failing log"
ONE_FUTURE = "exploration: one future"
VLLM = "walk: vllm"
"""Only where vLLM is."""


class Need(Enum):
    """What a checker lacks that would see some mutants: a world, a scope, an action or a check."""

    KEPT = "Offers: a check of what should be on the host, and engines that do more than one thing in a step"
    LAYERS = (
        "Serving scopes with other layers: sliding windows, several groups, drafters, chunks of two blocks"
    )
    SESSIONS = "Serving scopes with sessions, whose prompts grow"
    LOST = "Serving scopes in which transfers are lost"
    LAZY = "The lazy scope: a check when a block is taken"
    DISK = "The disk and tier worlds: real eras, failing resets, uneven ranks"
    WORKERS = "The real `Worker`, and the engines around and beside the one of streams"
    VLLM = "The world around the adapters for vLLM: other engines, longer runs, and more that is checked"


class Missed(NamedTuple):
    """A mutant that no checker sees.

    needs: what is missing.
    seen_by: what of that would see it.
    """

    needs: Need
    seen_by: str


FOUND = {
    "M01": FoundBy(LAYERS, Property.CORRECT_BYTES, 5),
    "M02": FoundBy(LAYERS, Property.STORED_ONCE, 13),
    "M03": FoundBy(LAYERS, Property.STORED_ONCE, 165),
    "M04": FoundBy(SERVING, Property.CORRECT_BYTES, 40),
    "M06": FoundBy(LAYERS, Property.STORED_ONCE, 46),
    "M10": FoundBy(FREE_QUEUE, Property.STORED_ONCE, 5),
    "M11": FoundBy(LAZY, Property.ONE_RELEASE_PER_HOLD, 9),
    "M12": FoundBy(LAYERS, Property.NO_REUSE_IN_FLIGHT, 19),
    "M15": FoundBy(DISTURBED, Property.ONE_RELEASE_PER_HOLD, 4),
    "M16": FoundBy(BARE, Property.CORRECT_BYTES, 7),
    "M17": FoundBy(LAYERS, Property.NO_STALE_DATA, 20),
    "M19": FoundBy(LAYERS, Property.LEGAL_CALLS, 20),
    "M20": FoundBy(LAYERS, Property.LEGAL_CALLS, 20),
    "M23": FoundBy(LAYERS, Property.STORED_ONCE, 22),
    "M24": FoundBy(SERVING, Property.FULL_OFFLOAD, 159),
    "M25": FoundBy(BARE, Property.PROGRESS, 10),
    "M27": FoundBy(SERVING, Property.FULL_OFFLOAD, 154),
    "M28": FoundBy(SERVING, Property.ONE_TOKEN_LEFT, 80),
    "M30": FoundBy(LAYERS, Property.CORRECT_BYTES, 24),
    "M31": FoundBy(CORE, Property.MATCH_HOLDS, 2),
    "M32": FoundBy(CORE, Property.LEGAL_CALLS, 6),
    "M33": FoundBy(BARE, Property.LEGAL_CALLS, 8),
    "M34": FoundBy(CORE, Property.LAST_STEP, 4),
    "M35": FoundBy(CORE, Property.PROGRESS, 5),
    "M36": FoundBy(CORE, Property.PROGRESS, 2),
    "M37": FoundBy(AUDITED_CORE, Property.STORED_ONCE, 11),
    "M38": FoundBy(CROWDED_CORE, Property.NO_STALE_DATA, 11),
    "M39": FoundBy(CORE, Property.NO_STALE_DATA, 12),
    "M40": FoundBy(DISTURBED, Property.NO_STALE_DATA, 11),
    "M41": FoundBy(TIERS, Property.LEGAL_CALLS, 6),
    "M42": FoundBy(LARGE_CORE, Property.MATCH_HOLDS, 6),
    "M43": FoundBy(POLICIES, Property.MATCH_HOLDS, 2),
    "M44": FoundBy(LARGE_CORE, Property.CONSERVATION, 4),
    "M45": FoundBy(CORE, Property.CONSERVATION, 6),
    "M46": FoundBy(TIERS, Property.CONSERVATION, 8),
    "M47": FoundBy(CORE, Property.LEGAL_CALLS, 6),
    "M48": FoundBy(WRONG_CORE, Property.EVENTS_ARE_STATE, 1),
    "M49": FoundBy(CORE, Property.STORED_ONCE, 5),
    "M50": FoundBy(AUDITED_CORE, Property.STORED_ONCE, 2),
    "M51": FoundBy(CORE, Property.STORED_ONCE, 3),
    "M52": FoundBy(CORE, Property.STORED_ONCE, 9),
    "M53": FoundBy(CROWDED_CORE, Property.LEGAL_CALLS, 10),
    "M55": FoundBy(CORE, Property.ONE_RELEASE_PER_HOLD, 6),
    "M56": FoundBy(CORE, Property.NO_STALE_DATA, 13),
    "M57": FoundBy(AUDITED_CORE, Property.STORED_ONCE, 2),
    "M58": FoundBy(CORE, Property.EVENTS_ARE_STATE, 6),
    "M59": FoundBy(TIERS, Property.LEGAL_CALLS, 6),
    "M60": FoundBy(CORE, Property.STORED_ONCE, 2),
    "M61": FoundBy(CORE, Property.NO_REUSE_IN_FLIGHT, 9),
    "M63": FoundBy(TIERS, Property.CONSERVATION, 5),
    "M65": FoundBy(DISK, Property.LEGAL_CALLS, 6),
    "M67": FoundBy(THREADS, Property.FAILURE_IS_NOT_SUCCESS, 15),
    "M68": FoundBy(TIERS, Property.CONSERVATION, 12),
    "M72": FoundBy(TIERS, Property.LEGAL_CALLS, 6),
    "M73": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 4),
    "M74": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 3),
    "M75": FoundBy(AUDITED_TIERS, Property.EVENTS_ARE_STATE, 5),
    "M76": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 7),
    "M77": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 3),
    "M78": FoundBy(AUDITED_SERVING, Property.EVENTS_ARE_STATE, 22),
    "M79": FoundBy(SERVING, Property.CONSERVATION, 12),
    "M80": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 3),
    "M81": FoundBy(ONE_FUTURE, Property.DETERMINISM, 9),
    "M82": FoundBy(KILLED, Property.EVENTS_ARE_STATE, 3),
    "M83": FoundBy(LOG_AHEAD, Property.EVENTS_ARE_STATE, 3),
    "M84": FoundBy(LOG_AHEAD, Property.EVENTS_ARE_STATE, 2),
    "M85": FoundBy(KILLED, Property.NO_STALE_DATA, 6),
    "M86": FoundBy(STARTS, Property.EVENTS_ARE_STATE, 4),
    "M87": FoundBy(FAILING_LOG, Property.EVENTS_ARE_STATE, 9),
    "M88": FoundBy(STARTS, Property.LEGAL_CALLS, 3),
    "M89": FoundBy(CORE, Property.LEGAL_CALLS, 1),
    "M90": FoundBy(CORE, Property.LEGAL_CALLS, 3),
    "M91": FoundBy(STARTS, Property.EVENTS_ARE_STATE, 4),
    "M92": FoundBy(STARTS, Property.EVENTS_ARE_STATE, 2),
    "M93": FoundBy(WRONG_CORE, Property.MATCH_HOLDS, 8),
    "M94": FoundBy(WRONG_CORE, Property.NO_REUSE_IN_FLIGHT, 9),
    "M95": FoundBy(WRONG_CORE, Property.NO_STALE_DATA, 11),
    "M96": FoundBy(AUDITED_SERVING, Property.STORED_ONCE, 16),
    "M97": FoundBy(WRONG_CORE, Property.MATCH_HOLDS, 7),
    "M98": FoundBy(WRONG_CORE, Property.PROGRESS, 3),
    "M99": FoundBy(WRONG_CORE, Property.NO_REUSE_IN_FLIGHT, 11),
    "M100": FoundBy(WRONG_CORE, Property.NO_STALE_DATA, 2),
    "M101": FoundBy(WRONG_CORE, Property.PROGRESS, 1),
    "M102": FoundBy(WRONG_CORE, Property.ONE_RELEASE_PER_HOLD, 8),
    "M103": FoundBy(WRONG_TIERS, Property.STALE_REPORTS, 6),
    "M104": FoundBy(WORKERS, Property.PROGRESS, 15),
    "M105": FoundBy(WORKERS, Property.PROGRESS, 2),
    "M106": FoundBy(WORKERS, Property.COPY_ORDER, 4),
    "M107": FoundBy(WORKERS, Property.PROGRESS, 2),
    "M108": FoundBy(ROUTER, Property.EVENTS_ARE_STATE, 44),
    "M109": FoundBy(ROUTER, Property.EVENTS_ARE_STATE, 7),
    "M110": FoundBy(ROUTER, Property.EVENTS_ARE_STATE, 23),
    "M111": FoundBy(STARTS, Property.NO_STALE_DATA, 5),
    "M112": FoundBy(STARTS, Property.CORRECT_BYTES, 5),
    "M113": FoundBy(STARTS, Property.CORRECT_BYTES, 4),
    "M114": FoundBy(THREADS, Property.LEGAL_CALLS, 20),
    "M115": FoundBy(WORKERS, Property.NO_REUSE_IN_FLIGHT, 2),
    "M116": FoundBy(COPIES, Property.COPY_ORDER, 4),
    "M117": FoundBy(WORKERS, Property.CORRECT_BYTES, 2),
    "M118": FoundBy(THREADS, Property.FAILURE_IS_NOT_SUCCESS, 10),
    "M119": FoundBy(THREADS, Property.COPY_ORDER, 5),
    "M120": FoundBy(HAND_OVER, Property.PUBLISH_AFTER_COMMIT, 19),
    "M121": FoundBy(LOADING, Property.PUBLISH_AFTER_COMMIT, 33),
    "M124": FoundBy(VLLM, Property.COPY_ORDER, 4),
    "M131": FoundBy(VLLM, Property.CORRECT_BYTES, 45),
}

MISSED = {
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
    "M07": Missed(
        Need.LAYERS, "A small engine that drafts: a rejected draft rewrites the last block of the group."
    ),
    "M18": Missed(
        Need.LAYERS, "A full and a window group, and an engine that accepts less than it was offered."
    ),
    "M21": Missed(Need.LAYERS, "Two window groups, of which each loses another block."),
    "M22": Missed(
        Need.LAYERS,
        "Chunks of two blocks, a hit that ends within one, and evictions while the request decodes.",
    ),
    "M29": Missed(
        Need.SESSIONS,
        "A next part that replaces the last output token; stored bytes are compared with the tokens.",
    ),
    "M05": Missed(
        Need.LOST,
        "Lost loads in a scope; an engine that takes `LoadEnded.num_computed_tokens` at its word "
        "after a loss.",
    ),
    "M26": Missed(
        Need.LOST,
        "The core loses a load between two steps; an engine that asks `has_pending_work` before each step.",
    ),
    "M09": Missed(
        Need.LAZY,
        "No block leaves the head of the free queue while the host lacks it and has room: checked "
        "when it is taken.",
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
    "M122": Missed(
        Need.VLLM, "A model with mamba layers and a reset: at rest each block's references are zero."
    ),
    "M123": Missed(Need.VLLM, "A state that is offered in the step in which its request is preempted."),
    "M125": Missed(Need.VLLM, "A request that is preempted and resumed, whose stored bytes are compared."),
    "M126": Missed(Need.VLLM, "An engine with a disk tier and a step that only fetches."),
    "M127": Missed(Need.VLLM, "A change of weights by name, and a warm start with the old ones."),
    "M128": Missed(Need.VLLM, "Lookups and stores of several requests in one step, with a full host."),
    "M129": Missed(Need.VLLM, "The same: after `on_schedule_end` no promise holds a pin."),
    "M130": Missed(Need.VLLM, "A store that fails, and the same offer again."),
    "M132": Missed(Need.VLLM, "A reset under load in a model with a window."),
    "M133": Missed(Need.VLLM, "A load that hangs, and a pool that must not give its blocks away."),
}
