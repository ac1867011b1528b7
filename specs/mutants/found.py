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
STARTS = "walk: restarts"
HAND_OVER = "walk: hand-over"
ROUTER = "walk: router"
LARGE_CORE = "walk: large core"
POLICIES = "walk: policies"
CROWDED_CORE = "walk: crowded core"
LOADING = "walk: hand-over with loads"
FAILING_LOG = "walk: log"
ERAS = "walk: eras"
PARTIAL = "walk: serving, partial hits"
DRAFTS = "walk: serving, chunks and drafts"
NAMES = "walk: serving, names and sessions"
THOUGHTS = "walk: serving, second thoughts"
LAYERS_AGAIN = "walk: serving with layers, again"
DRAFTS_AGAIN = "walk: serving, chunks and drafts, again"
LOST = "walk: serving, lost loads"
WHOLE = "walk: whole"
LAZY_AND_EAGER = "walk: serving, lazy and eager"
VLLM, VLLM_LIVES, VLLM_TROUBLES = "walk: vllm", "walk: vllm lives", "walk: vllm troubles"
"""Only where vLLM is."""


class Need(Enum):
    """What a checker lacks that would see some mutants: a world, a scope, an action or a check."""

    WORKERS = "The real `Worker`, and the engines around and beside the one of streams"
    SAVED = "An exploration that takes each state in several ways, of more scopes"
    RUNS = "More runs of a walk that draws what shows them"


class Missed(NamedTuple):
    """A mutant that no checker sees.

    needs: what is missing.
    seen_by: what of that would see it.
    """

    needs: Need
    seen_by: str


FOUND = {
    "M01": FoundBy(LAYERS, Property.CORRECT_BYTES, 5),
    "M02": FoundBy(SERVING, Property.STORED_ONCE, 73),
    "M03": FoundBy(LAYERS_AGAIN, Property.STORED_ONCE, 33),
    "M04": FoundBy(SERVING, Property.CORRECT_BYTES, 63),
    "M05": FoundBy(LOST, Property.FAILURE_IS_NOT_SUCCESS, 25),
    "M06": FoundBy(LAYERS, Property.STORED_ONCE, 46),
    "M07": FoundBy(DRAFTS, Property.CORRECT_BYTES, 81),
    "M08": FoundBy(DRAFTS, Property.STORED_ONCE, 88),
    "M09": FoundBy(LAZY_AND_EAGER, Property.STORED_ONCE, 115),
    "M10": FoundBy(SERVING, Property.STORED_ONCE, 6),
    "M11": FoundBy(LAZY, Property.ONE_RELEASE_PER_HOLD, 9),
    "M12": FoundBy(LAYERS, Property.NO_REUSE_IN_FLIGHT, 19),
    "M13": FoundBy(THOUGHTS, Property.CORRECT_BYTES, 51),
    "M14": FoundBy(NAMES, Property.NO_REUSE_IN_FLIGHT, 33),
    "M15": FoundBy(DISTURBED, Property.ONE_RELEASE_PER_HOLD, 4),
    "M16": FoundBy(BARE, Property.CORRECT_BYTES, 7),
    "M17": FoundBy(LAYERS, Property.NO_STALE_DATA, 20),
    "M18": FoundBy(PARTIAL, Property.LEGAL_CALLS, 23),
    "M19": FoundBy(LAYERS, Property.LEGAL_CALLS, 20),
    "M20": FoundBy(SERVING, Property.STORED_SO_SERVED, 124),
    "M21": FoundBy(PARTIAL, Property.LEGAL_CALLS, 31),
    "M22": FoundBy(DRAFTS_AGAIN, Property.STORED_ONCE, 40),
    "M23": FoundBy(LAYERS, Property.STORED_ONCE, 22),
    "M24": FoundBy(SERVING, Property.FULL_OFFLOAD, 159),
    "M25": FoundBy(BARE, Property.PROGRESS, 10),
    "M26": FoundBy(LOST, Property.PROGRESS, 23),
    "M27": FoundBy(SERVING, Property.FULL_OFFLOAD, 154),
    "M28": FoundBy(SERVING, Property.ONE_TOKEN_LEFT, 85),
    "M29": FoundBy(SERVING, Property.STORED_ONCE, 9),
    "M30": FoundBy(LAYERS, Property.CORRECT_BYTES, 66),
    "M31": FoundBy(CORE, Property.PUBLISH_AFTER_COMMIT, 10),
    "M32": FoundBy(CORE, Property.LEGAL_CALLS, 11),
    "M33": FoundBy(BARE, Property.LEGAL_CALLS, 8),
    "M34": FoundBy(CORE, Property.LAST_STEP, 4),
    "M35": FoundBy(AUDITED_CORE, Property.PROGRESS, 5),
    "M36": FoundBy(CORE, Property.PROGRESS, 2),
    "M38": FoundBy(CROWDED_CORE, Property.NO_STALE_DATA, 11),
    "M39": FoundBy(CORE, Property.NO_STALE_DATA, 9),
    "M40": FoundBy(DISTURBED, Property.NO_STALE_DATA, 11),
    "M41": FoundBy(TIERS, Property.LEGAL_CALLS, 6),
    "M42": FoundBy(LARGE_CORE, Property.MATCH_HOLDS, 11),
    "M43": FoundBy(POLICIES, Property.MATCH_HOLDS, 2),
    "M44": FoundBy(LARGE_CORE, Property.CONSERVATION, 4),
    "M45": FoundBy(CORE, Property.CONSERVATION, 6),
    "M46": FoundBy(TIERS, Property.CONSERVATION, 10),
    "M47": FoundBy("exploration: serving, in chunks", Property.STORED_SO_SERVED, 10),
    "M48": FoundBy(WRONG_CORE, Property.EVENTS_ARE_STATE, 1),
    "M49": FoundBy(CORE, Property.STORED_ONCE, 5),
    "M50": FoundBy(AUDITED_CORE, Property.STORED_ONCE, 2),
    "M51": FoundBy(CORE, Property.STORED_ONCE, 3),
    "M52": FoundBy(CORE, Property.STORED_ONCE, 9),
    "M53": FoundBy(CROWDED_CORE, Property.LEGAL_CALLS, 10),
    "M54": FoundBy(ERAS, Property.CONSERVATION, 4),
    "M55": FoundBy(CORE, Property.ONE_RELEASE_PER_HOLD, 5),
    "M56": FoundBy(TIERS, Property.NO_STALE_DATA, 8),
    "M57": FoundBy(SERVING, Property.STORED_ONCE, 73),
    "M58": FoundBy(CORE, Property.EVENTS_ARE_STATE, 7),
    "M59": FoundBy(TIERS, Property.LEGAL_CALLS, 6),
    "M60": FoundBy(CORE, Property.STORED_ONCE, 2),
    "M61": FoundBy(CORE, Property.NO_REUSE_IN_FLIGHT, 7),
    "M62": FoundBy(ERAS, Property.STORED_ONCE, 13),
    "M63": FoundBy(TIERS, Property.CONSERVATION, 5),
    "M64": FoundBy(ERAS, Property.NO_STALE_DATA, 5),
    "M65": FoundBy(DISK, Property.LEGAL_CALLS, 6),
    "M66": FoundBy(ERAS, Property.NO_STALE_DATA, 10),
    "M67": FoundBy(THREADS, Property.FAILURE_IS_NOT_SUCCESS, 15),
    "M68": FoundBy(TIERS, Property.CONSERVATION, 8),
    "M69": FoundBy(ERAS, Property.NO_STALE_DATA, 7),
    "M70": FoundBy(ERAS, Property.STORED_ONCE, 9),
    "M71": FoundBy(ERAS, Property.STORED_ONCE, 7),
    "M72": FoundBy(TIERS, Property.LEGAL_CALLS, 7),
    "M73": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 4),
    "M74": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 3),
    "M75": FoundBy(AUDITED_TIERS, Property.EVENTS_ARE_STATE, 5),
    "M76": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 12),
    "M77": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 3),
    "M78": FoundBy(AUDITED_SERVING, Property.EVENTS_ARE_STATE, 58),
    "M79": FoundBy(SERVING, Property.CONSERVATION, 9),
    "M80": FoundBy(AUDITED_CORE, Property.EVENTS_ARE_STATE, 3),
    "M82": FoundBy(LOG_AHEAD, Property.EVENTS_ARE_STATE, 2),
    "M83": FoundBy(LOG_AHEAD, Property.EVENTS_ARE_STATE, 5),
    "M84": FoundBy(LOG_AHEAD, Property.EVENTS_ARE_STATE, 2),
    "M85": FoundBy(KILLED, Property.NO_STALE_DATA, 6),
    "M86": FoundBy(STARTS, Property.EVENTS_ARE_STATE, 4),
    "M87": FoundBy(FAILING_LOG, Property.EVENTS_ARE_STATE, 9),
    "M88": FoundBy(STARTS, Property.LEGAL_CALLS, 2),
    "M89": FoundBy(CORE, Property.LEGAL_CALLS, 4),
    "M90": FoundBy(CORE, Property.LEGAL_CALLS, 3),
    "M91": FoundBy(STARTS, Property.EVENTS_ARE_STATE, 4),
    "M92": FoundBy(STARTS, Property.EVENTS_ARE_STATE, 2),
    "M93": FoundBy(WRONG_CORE, Property.MATCH_HOLDS, 8),
    "M94": FoundBy(WRONG_CORE, Property.NO_REUSE_IN_FLIGHT, 9),
    "M95": FoundBy(WRONG_CORE, Property.NO_STALE_DATA, 11),
    "M96": FoundBy(AUDITED_SERVING, Property.STORED_ONCE, 16),
    "M97": FoundBy(WRONG_CORE, Property.MATCH_HOLDS, 7),
    "M98": FoundBy(WRONG_CORE, Property.PROGRESS, 3),
    "M99": FoundBy(WRONG_CORE, Property.NO_REUSE_IN_FLIGHT, 8),
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
    "M110": FoundBy(ROUTER, Property.EVENTS_ARE_STATE, 32),
    "M111": FoundBy(STARTS, Property.NO_STALE_DATA, 4),
    "M112": FoundBy(STARTS, Property.CORRECT_BYTES, 5),
    "M113": FoundBy(STARTS, Property.CORRECT_BYTES, 4),
    "M114": FoundBy(THREADS, Property.LEGAL_CALLS, 13),
    "M115": FoundBy(WORKERS, Property.NO_REUSE_IN_FLIGHT, 2),
    "M116": FoundBy(COPIES, Property.COPY_ORDER, 4),
    "M117": FoundBy(WORKERS, Property.CORRECT_BYTES, 2),
    "M118": FoundBy(THREADS, Property.FAILURE_IS_NOT_SUCCESS, 10),
    "M119": FoundBy(THREADS, Property.COPY_ORDER, 5),
    "M120": FoundBy(HAND_OVER, Property.PUBLISH_AFTER_COMMIT, 36),
    "M121": FoundBy(LOADING, Property.PUBLISH_AFTER_COMMIT, 43),
    "M122": FoundBy(VLLM, Property.ONE_RELEASE_PER_HOLD, 15),
    "M123": FoundBy(VLLM, Property.COPY_ORDER, 4),
    "M124": FoundBy(VLLM_LIVES, Property.COPY_ORDER, 4),
    "M125": FoundBy(VLLM_LIVES, Property.CORRECT_BYTES, 4),
    "M126": FoundBy(VLLM_LIVES, Property.PROGRESS, 2),
    "M127": FoundBy(VLLM_LIVES, Property.CORRECT_BYTES, 5),
    "M128": FoundBy(LAYERS, Property.STORED_SO_SERVED, 31),
    "M129": FoundBy(BARE, Property.STORED_SO_SERVED, 7),
    "M130": FoundBy(SERVING, Property.CORRECT_BYTES, 92),
    "M131": FoundBy(BARE, Property.STORED_SO_SERVED, 8),
    "M132": FoundBy(LAYERS, Property.STORED_SO_SERVED, 10),
    "M133": FoundBy(DISTURBED, Property.STORED_SO_SERVED, 7),
    "M134": FoundBy(LAYERS, Property.STORED_SO_SERVED, 10),
    "M135": FoundBy(AUDITED_SERVING, Property.STORED_SO_SERVED, 36),
    "M136": FoundBy(LAYERS, Property.STORED_ONCE, 46),
    "M140": FoundBy(WHOLE, Property.STORED_SO_SERVED, 43),
    "M141": FoundBy(WHOLE, Property.STORED_SO_SERVED, 53),
    "M142": FoundBy(WHOLE, Property.PROGRESS, 2),
    "M143": FoundBy(WHOLE, Property.STORED_SO_SERVED, 67),
    "M144": FoundBy(WHOLE, Property.STORED_SO_SERVED, 25),
    "M150": FoundBy(THREADS, Property.FAILURE_IS_NOT_SUCCESS, 16),
    "M151": FoundBy(FAILING_LOG, Property.EVENTS_ARE_STATE, 31),
    "M152": FoundBy(HAND_OVER, Property.ONE_RELEASE_PER_HOLD, 5),
    "M153": FoundBy(CORE, Property.EVENTS_ARE_STATE, 9),
    "M160": FoundBy(WRONG_CORE, Property.STALE_REPORTS, 6),
    "M161": FoundBy(WRONG_CORE, Property.PROGRESS, 3),
    "M162": FoundBy(WRONG_CORE, Property.PROGRESS, 2),
}

MISSED = {
    "M37": Missed(Need.RUNS, "1,500 runs of the walk of the core; 48 are walked."),
    "M81": Missed(
        Need.SAVED,
        "Two ways to a state that differ only in whether its waiting store was tried. The exploration of "
        "one future saw it until the scheduler began to note offers that lack room.",
    ),
}
