"""Check that each readable block on the host holds the words of its key on every rank (correct bytes, S15).

Without this check a wrong block on the host would be detected only if a later request reads it before it is
evicted. So each check of the world compares all readable blocks of kvsm's core with the words that requests
compute for their keys. Keys that belong to no remembered request are not compared.

Only engines with a single core of kvsm's are checked, and only if a key stands for one block.
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
"""A key is vLLM's block hash followed by the number of the KV cache group (big endian, this many bytes)."""


class _Meaning(NamedTuple):
    """The block that a key stands for.

    text: a description for people.
    versions: all words that the block may have, before a rank mixes them.
    """

    text: str
    versions: Sequence[Words]


class StoredBytes:
    """Checks the host pools of one engine.

    connector: the scheduler side of its connector.
    ranks: the ranks, whose `host_words` returns the words of a block of their pool.
    """

    def __init__(self, connector: Any, ranks: Sequence[Any], groups: int) -> None:
        cores = list(cores_of(connector))
        self._core = cores[0] if len(cores) == 1 and cores[0].config.blocks_per_chunk == 1 else None
        self._ranks, self._groups = ranks, groups

    def check(self, asked: Mapping[str, Any], truths: Mapping[str, KnownTokens], runner: Any) -> None:
        """Raises `PropertyBroken` for a readable block with wrong words.

        asked: name -> request.
        truths: name -> the tokens of the request.
        runner: the `ModelRunner`.
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
            versions = map(rank.mixed, meaning.versions)
            if words is not None and not any(np.array_equal(words, right) for right in versions):
                raise PropertyBroken(
                    Property.CORRECT_BYTES,
                    f"rank {number}, host block {slot} can be read, and does not hold {meaning.text}",
                )


def cores_of(connector: Any) -> Iterator[Offloader]:
    """The cores of kvsm behind the scheduler side of a connector, or of its children."""
    for part in getattr(connector, "_connectors", None) or [connector]:
        core = getattr(getattr(part, "_side", None), "_core", None)
        if core is None:
            manager = getattr(getattr(part, "connector_scheduler", None), "manager", None)
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
                    versions = runner.block_versions(group, block, truths[name])
                    found[key] = _Meaning(f"block {block} of request {name} in group {group}", versions)
    return found
