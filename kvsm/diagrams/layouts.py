"""Where each state of each machine is drawn, and how: data, chosen by eye."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How one machine is drawn: a caption, the centre of each state in pixels, its tone, and frames.

    A frame gathers states that share rows: a row that holds in all of them is drawn once, at the frame.
    `frames` stand inner first. `meanings` says what each tone stands for in this machine.
    """

    caption: str
    places: Mapping[str, tuple[float, float]]
    tones: Mapping[str, str]
    meanings: Mapping[str, str]
    frames: Mapping[str, tuple[str, ...]]


LAYOUTS = {
    "block": Layout(
        "what a host slot holds, from allocate to evict",
        {
            "FREE": (0, 0),
            "ALLOCATED": (210, 0),
            "STORING": (566, 0),
            "STORED": (936, 110),
            "EVICTED": (210, 225),
            "QUARANTINED": (566, 225),
            "LOADING": (566, 400),
            "RETIRED": (210, 400),
        },
        {
            "FREE": "rest",
            "EVICTED": "rest",
            "ALLOCATED": "waiting",
            "STORING": "copying",
            "LOADING": "copying",
            "STORED": "good",
            "QUARANTINED": "held",
            "RETIRED": "lost",
        },
        {
            "rest": "holds nothing",
            "waiting": "planned",
            "copying": "a copy is in flight",
            "good": "readable",
            "held": "unwanted, but a copy still touches it",
            "lost": "never used again",
        },
        {"touched by a copy": ("STORING", "QUARANTINED", "LOADING")},
    ),
    "transfer": Layout(
        "one asynchronous copy, until its last worker has reported",
        {
            "PLANNED": (0, 0),
            "SUBMITTED": (320, 0),
            "COMPLETED": (820, -110),
            "FAILED": (820, 0),
            "CANCELLED": (0, 180),
            "ABANDONED": (320, 180),
            "DRAINED": (820, 200),
            "LOST": (820, 100),
        },
        {
            "PLANNED": "waiting",
            "SUBMITTED": "copying",
            "COMPLETED": "good",
            "FAILED": "lost",
            "CANCELLED": "rest",
            "ABANDONED": "held",
            "DRAINED": "rest",
            "LOST": "lost",
        },
        {
            "waiting": "planned",
            "copying": "in flight",
            "good": "done",
            "held": "in flight, unwanted",
            "lost": "failed",
            "rest": "of no effect",
        },
        {},
    ),
    "lease": Layout(
        "a copy's hold on a device block",
        {"NONE": (0, 0), "READING": (340, -95), "WRITING": (340, 95), "RETIRED": (640, 95)},
        {"NONE": "rest", "READING": "copying", "WRITING": "copying", "RETIRED": "lost"},
        {"rest": "no copy touches it", "copying": "a copy is in flight", "lost": "never used again"},
        {},
    ),
    "request": Layout(
        "what offload knows of a request",
        {
            "NEW": (0, 0),
            "RUNNING": (0, 130),
            "PREEMPTED": (0, 290),
            "DEFERRED": (400, 0),
            "MATCHED": (400, 130),
            "LOADING": (400, 290),
            "FINISHED": (780, 50),
            "RELEASED": (780, 250),
        },
        {
            "NEW": "rest",
            "RUNNING": "good",
            "MATCHED": "waiting",
            "DEFERRED": "waiting",
            "LOADING": "copying",
            "PREEMPTED": "held",
            "FINISHED": "copying",
            "RELEASED": "rest",
        },
        {
            "rest": "holds nothing",
            "waiting": "holds pins, or waits",
            "copying": "a copy is in flight",
            "good": "told that nothing is to wait for",
            "held": "its device blocks are taken",
        },
        {
            "may ask": ("NEW", "RUNNING", "PREEMPTED"),
            "holds, or waits": ("DEFERRED", "MATCHED", "LOADING"),
            "alive": ("NEW", "RUNNING", "PREEMPTED", "MATCHED", "LOADING", "DEFERRED"),
        },
    ),
}
