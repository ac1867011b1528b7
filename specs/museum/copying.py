"""Copies on a device with streams: bugs in the order of queued copies and kernels."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

_ISSUE = "kvsm.copies.streams:StreamCopyEngine._issue"

COPYING = (
    Exhibit(
        id="B03",
        source="vllm#47282",
        title="a load overwrites what the running step still reads",
        story="A sliding window moved on and freed a block, which became the target of a load. The load"
        " started at once and wrote the block while the running forward pass still read it.",
        breaks=Property.COPY_ORDER,
        edits=(
            Edit(
                _ISSUE,
                "stream.wait(transfer.after)",
                """
                if job.direction is Direction.STORE:
                    stream.wait(transfer.after)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B25",
        source="vllm, copy thread",
        title="an error ends the copying silently",
        story="An exception ended the thread that handed copies to the device. No completion came any more,"
        " the error was reported to nobody, and the engine stepped endlessly. In kvsm an error ends its"
        " transfer, both when the device refuses a copy and when it stops during one; the bug drops the"
        " error in both places.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                _ISSUE,
                "transfer.error = described(error)",
                """
                transfer.error = described(error)
                return
                """,
            ),
            Edit(
                "kvsm.copies.streams:StreamCopyEngine._is_over",
                """
                transfer.error = transfer.error or described(error)
                return True
                """,
                "return False",
            ),
        ),
    ),
    Exhibit(
        id="B37",
        source="TensorRT-LLM PR 15546",
        title="a table of ids is reused before the copy has read it",
        story="The copy kernel read the ids of its blocks from pinned host memory. When the call returned,"
        " this memory was reused for the next copy's ids. The first copy had not started yet and read"
        " the wrong ids.",
        breaks=Property.COPY_ORDER,
        edits=(
            Edit(
                _ISSUE,
                "transfer.keep = device.copy(stream, job.transfer, job.direction, prepared)",
                "device.copy(stream, job.transfer, job.direction, prepared)",
            ),
        ),
    ),
)
