"""What the host holds is what its keys mean, on every rank, also if nobody reads it (correct bytes, S15).

A wrong block on the host shows in a run only if a later request reads it before it is evicted. So each check
of the world compares all blocks that kvsm's core calls readable with what requests have computed for their
keys. A key of a request that was forgotten is not compared.

Only for engines with one core of kvsm's, whose keys name one block each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvsm.check.vllm_fuzz.word_model import KnownTokens, Words
from kvsm.core.ledger import readable_keys
from kvsm.core.offloader import Offloader
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

_GROUP_BYTES = 4
"""A key is a hash of vLLM's, and the number of its KV cache group (big endian)."""


class _Meaning(NamedTuple):
    """What a key stands for. words: before a rank is mixed in."""

    told: str
    words: Words


class StoredBytes:
    """The host pools of one engine.

    connector: its scheduler's side.
    ranks: each has the `host_words` of its pool.
    """

    def __init__(self, connector: Any, ranks: Sequence[Any], groups: int) -> None:
        cores = list(cores_of(connector))
        self._core = cores[0] if len(cores) == 1 and cores[0].config.blocks_per_chunk == 1 else None
        self._ranks, self._groups = ranks, groups

    def check(self, asked: Mapping[str, Any], truths: Mapping[str, KnownTokens], runner: Any) -> None:
        """Raises `PropertyBroken` for a readable block with another content.

        asked: the requests by name. truths: what each of them must compute. runner: the model.
        """
        if self._core is None:
            return
        ledger = self._core.ledger
        readable = readable_keys(ledger)
        meanings = _meanings(set(readable), asked, truths, runner, self._groups)
        for key in readable:
            if key in meanings:
                self._compare(ledger.index[key], meanings[key])

    def _compare(self, slot: int, meaning: _Meaning) -> None:
        for number, rank in enumerate(self._ranks):
            words = rank.host_words(slot)
            if words is not None and not np.array_equal(words, rank.mixed(meaning.words)):
                raise PropertyBroken(
                    Property.CORRECT_BYTES,
                    f"rank {number}, host block {slot} can be read, and does not hold {meaning.told}",
                )


def cores_of(connector: Any) -> Iterator[Offloader]:
    """Kvsm's cores behind the scheduler's side of a connector, or of its children."""
    for one in getattr(connector, "_connectors", None) or [connector]:
        core = getattr(getattr(one, "_side", None), "_core", None)
        if core is None:
            manager = getattr(getattr(one, "connector_scheduler", None), "manager", None)
            core = getattr(manager, "_engine_core", None)
        offloader = getattr(core, "offloader", None)
        if isinstance(offloader, Offloader):
            yield offloader


def _meanings(
    keys: set[bytes], asked: Mapping[str, Any], truths: Mapping[str, KnownTokens], runner: Any, groups: int
) -> dict[bytes, _Meaning]:
    found: dict[bytes, _Meaning] = {}
    for name, request in asked.items():
        for block, hash in enumerate(request.block_hashes):
            for group in range(groups):
                key = hash + group.to_bytes(_GROUP_BYTES, "big")
                if key in keys and key not in found:
                    words = runner.block_words(group, block, truths[name])
                    found[key] = _Meaning(f"block {block} of request {name} in group {group}", words)
    return found
