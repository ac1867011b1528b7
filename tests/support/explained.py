"""All questions of `kvsm why` about a log, and the life of `kvsm show` that a line of evidence refers to."""

from __future__ import annotations

from collections.abc import Iterator

import kvsm
from kvsm.explain.story import BlockLife, KeyLife, RequestLife, TransferLife
from kvsm.explain.why.causes import Explanation
from kvsm.explain.why.questions import explain_block, explain_keys, explain_request, explain_transfer

Life = BlockLife | KeyLife | RequestLife | TransferLife


def life_of(option: str, value: str) -> Life:
    """Return the life that `kvsm show` prints for this option."""
    if option == "--request":
        return RequestLife(value)
    if option == "--key":
        return KeyLife(value)
    return TransferLife(int(value)) if option == "--transfer" else BlockLife(int(value))


def explanations(log: kvsm.OpenedLog) -> Iterator[Explanation]:
    """Return an explanation of each request, transfer, key and slot."""
    yield from (explain_request(log, name) for name in {row.request for row in log.requests()})
    yield from (explain_transfer(log, row.transfer) for row in log.transfers())
    for key in {row.key for row in log.blocks()}:
        yield from explain_keys(log, key)
    yield from (explain_block(log, slot) for slot in range(log.config.host_blocks))
