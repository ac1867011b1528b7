"""Texts of the page: why a key is gone, and what a request does in each state."""

from __future__ import annotations

from kvsm.explain.tables.row_kinds import Gone
from kvsm.states import RequestState

WHY_GONE: dict[Gone, str] = {
    Gone.NEVER_STORED: "it was never stored",
    Gone.SKIPPED: "it was offered for a store and skipped at event {cause}",
    Gone.IN_FLIGHT: "{transfer} still copies it",
    Gone.EVICTED: "it was evicted at event {cause} to make room for {transfer}",
    Gone.RESET: "the cache was reset at event {cause}",
    Gone.RESTART: "{transfer} had not ended when another process went on at event {cause}",
    Gone.STORE_FAILED: "{transfer} failed at event {cause}",
    Gone.LOAD_FAILED: "{transfer} failed at event {cause}, so what it read is not believed any more",
    Gone.CANCELLED: "{transfer} was cancelled at event {cause}, before it left for the workers",
    Gone.LOST: "{transfer} was given up at event {cause}: a worker did not report",
    Gone.BEFORE_LOG: "the log does not tell: it would stand before the log begins, or in a gap",
}
"""Why a key cannot be read. {cause} is an event, {transfer} a name such as `store 12 of requests r1, r2`."""

ACTIVITY: dict[RequestState, str | None] = {
    RequestState.NEW: "queued",
    RequestState.MATCHED: "queued",
    RequestState.DEFERRED: "deferred",
    RequestState.LOADING: "loading",
    RequestState.RUNNING: "running",
    RequestState.PREEMPTED: "preempted",
    RequestState.FINISHED: "finishing",
    RequestState.RELEASED: None,
}
"""The page's name for what a request does in each state. None: the request is over, and nothing is drawn."""

ACTIVITIES: dict[str, str] = {
    "queued": "It waits for its turn: the engine asks for it, or cannot place it yet.",
    "deferred": "It waits for a copy that another transfer makes.",
    "loading": "It waits for its own load from the host.",
    "running": "It runs on the device.",
    "preempted": "The engine took its device blocks. It has not been asked for again.",
    "finishing": "It has finished. Its load is still in flight.",
}
"""The meaning of each activity, as a sentence."""


def why_gone(why: str, cause: int | None, transfer: str | None) -> str:
    """Explain why a key is gone, with the event and the transfer that caused it.

    why: a `Gone`.
    cause: the event; None: unknown.
    transfer: the transfer's name, such as `store 12 of request r1`; None: unknown.
    """
    event = "that the log does not tell" if cause is None else f"{cause:,}"
    return WHY_GONE[Gone(why)].format(cause=event, transfer=transfer or "a transfer")
