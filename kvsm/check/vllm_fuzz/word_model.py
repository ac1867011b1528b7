"""A model whose KV cache consists of predictable words, so that a wrong byte is detected where it is read.

The word of a token depends on all tokens up to it, the salt of its request, the KV cache group, the epoch of
the weights, and the rank (which mixes the words). The output of a request depends on its prompt alone, so its
tokens can be checked.

A mamba layer has a state instead of a word for each token. The state depends on all tokens before it. A step
reads the state after the last computed token, and writes the state after its own last token, into the same
block or into the next one of the request's table. vLLM lets prefill steps end at block boundaries, so that a
cached block holds the state at its end.

A drafter's layer computes the word of a token from the model's hidden state at the token and from the next
token, as EAGLE and MTP do. So the word depends on one more token, and the last word of a cached block may
belong to any continuation of the block's prefix that was computed. vLLM and its connectors accept each of
them: at worst, a draft is rejected. All other words are right. Each further draft writes a word behind the
tokens of its step, which the next step overwrites.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, MOST_TOKENS, STATES, VOCABULARY, WINDOW
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

Words = NDArray[np.uint64]


class KnownTokens:
    """The tokens of a request, with its endless output, and the hash of the prefix up to each token.

    salt: requests with different salts have different hashes.
    """

    def __init__(self, prompt: Sequence[int], salt: int = 0) -> None:
        self.tokens: list[int] = []
        self._hashes: list[int] = []
        self._salt = salt
        for token in prompt:
            self._append(token)

    def token(self, place: int) -> int:
        """The token at this position of the prompt or the output."""
        while place >= len(self.tokens):
            self._append((self._hashes[-1] >> 33) % VOCABULARY)
        return self.tokens[place]

    def hashes(self, first: int, last: int) -> list[int]:
        """The hashes of the prefixes up to each token from `first` to before `last`."""
        self.token(last)
        return self._hashes[first:last]

    def _append(self, token: int) -> None:
        before = self._hashes[-1] if self._hashes else self._salt
        self.tokens.append(token)
        self._hashes.append((before * 0x5851F42D4C957F2D + 2 * token + 1) % 2**64)


class Places(NamedTuple):
    """Tokens in the KV cache: the block and offset of each, its word before a rank mixes it, and its name."""

    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    words: Words
    names: tuple[str, ...]
    versions: Mapping[int, Collection[int]] = {}
    """Index of a token in these arrays -> all words that it may have, for last tokens of drafter blocks."""


class EngineStep(NamedTuple):
    """A step in flight.

    output, metadata: vLLM's scheduler output, and the pickled metadata of the connector.
    before: words that it reads before it writes.
    reads: words that it reads after it has written.
    writes: words that it writes.
    sampled: request -> tokens that it samples.
    finished: requests that have finished since the previous step.
    drafted: requests for which it drafts tokens.
    """

    output: Any
    metadata: bytes
    before: Places
    reads: Places
    writes: Places
    sampled: dict[str, list[int]]
    finished: set[str]
    drafted: tuple[str, ...]


class RunnerRow:
    """A request in a model runner: the block table of each group, and the number of tokens with KV cache."""

    def __init__(self, tables: Sequence[Sequence[int]], computed: int) -> None:
        self.tables, self.computed = [list(table) for table in tables], computed


class ModelRunner:
    """Turns each scheduler output into the words that ranks read and write; the same for all ranks.

    drafts: speculative tokens of each step.
    random: decides how many of them are accepted.
    windows: the sliding window of each KV cache group (tokens); 0 for full attention, `STATES` for mamba
        states.
    drafter: the group that has only layers of a drafter.
    """

    def __init__(
        self,
        drafts: int,
        random: Random,
        windows: Sequence[int] = (0, WINDOW),
        drafter: int | None = None,
    ) -> None:
        self._drafts, self._random, self._windows = drafts, random, windows
        self._drafter = drafter
        self._last_words: dict[int, set[int]] = {}
        """The model's word at the end of a block -> the words that the drafter has computed for this token.
        The key identifies the epoch and all tokens so far."""
        self._rows: dict[str, RunnerRow] = {}
        self.epoch = 0
        """The epoch of the weights. Different weights compute different words."""

    def step(self, output: Any, requests: Mapping[str, Any], truths: Mapping[str, KnownTokens]) -> EngineStep:
        """The step of a new scheduler output."""
        if output.kv_cache_block_copies:
            raise AssertionError("blocks are copied on write; that is not simulated")
        self._take_rows(output)
        before, reads, writes = _PlaceList(), _PlaceList(), _PlaceList()
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            is_last = not requests[name].is_prefill_chunk
            accepted = self._random.randint(0, drafts) if is_last else drafts
            row, truth = self._rows[name], truths[name]
            begin, right = row.computed, row.computed + count - (drafts - accepted)
            for group, table in enumerate(row.tables):
                window = self._windows[group]
                if window == STATES:
                    before.add_state(name, table, begin, truth, self._salt(group))
                    writes.add_state(name, table, right, truth, self._salt(group))
                    continue
                first = max(0, begin - window + 1) if window else 0
                unverified = drafts - accepted
                if group == self._drafter:
                    self._note_last_words(truth, begin, right)
                    reads.add_versions(first, begin, partial(self._versions, truth))
                    # Each draft but the first one writes a word.
                    room = min(len(table) * BLOCK_TOKENS, MOST_TOKENS) - right
                    unverified = min(max(unverified, self._drafts - 1), room)
                reads.add(name, table, first, self._hashes(group, truth, first, begin), self._salt(group))
                writes.add(name, table, begin, self._hashes(group, truth, begin, right), self._salt(group))
                garbage = [self._random.getrandbits(64) for _ in range(unverified)]
                writes.add(name, table, right, garbage, 0)
            row.computed = right
            # Each accepted draft is a token, and one more token is sampled after it.
            sampled[name] = [truth.token(right - n) for n in range(accepted, -1, -1)] if is_last else []
        return EngineStep(
            output,
            pickle.dumps(output.kv_connector_metadata),
            before.places(),
            reads.places(),
            writes.places(),
            sampled,
            set(output.finished_req_ids),
            tuple(name for name, tokens in sampled.items() if tokens and self._drafts),
        )

    def _take_rows(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._rows[new.req_id] = RunnerRow(new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if name in cached.resumed_req_ids:
                self._rows[name] = RunnerRow(blocks, computed)
                continue
            row = self._rows[name]
            for table, more in zip(row.tables, blocks or ()):
                table += more
            # With drafts in flight, the scheduler assumes that all of them were accepted.
            if computed != row.computed and not self._drafts:
                raise PropertyBroken(
                    Property.CORRECT_BYTES, f"request {name} has {row.computed} tokens, vLLM says {computed}"
                )

    def block_versions(self, group: int, block: int, truth: KnownTokens) -> list[Words]:
        """All right words of a full block of these tokens in this group, before a rank mixes them."""
        first, end, salt = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS, self._salt(group)
        if self._windows[group] == STATES:
            return [np.array(_state_words(truth, end, salt), np.uint64)]
        words = [_word(hash, salt) for hash in self._hashes(group, truth, first, end)]
        last = self._versions(truth, end - 1) if group == self._drafter else words[-1:]
        return [np.array([*words[:-1], word], np.uint64) for word in last]

    def _hashes(self, group: int, truth: KnownTokens, first: int, end: int) -> list[int]:
        """For each of these tokens, the hash of all tokens that its word in this group depends on."""
        behind = int(group == self._drafter)
        return truth.hashes(first + behind, end + behind)

    def _note_last_words(self, truth: KnownTokens, begin: int, end: int) -> None:
        """Note the words that the drafter computes for the last tokens of blocks."""
        for token in range(begin + BLOCK_TOKENS - 1 - begin % BLOCK_TOKENS, end, BLOCK_TOKENS):
            word = self._drafted(truth, token)
            self._last_words.setdefault(self._prefix(truth, token), set()).add(word)

    def _versions(self, truth: KnownTokens, token: int) -> Collection[int]:
        """The words that the drafter's layers have computed for the last token of a block."""
        return self._last_words.get(self._prefix(truth, token), ())

    def _prefix(self, truth: KnownTokens, token: int) -> int:
        (hash,) = truth.hashes(token, token + 1)
        return _word(hash, self._salt(0))

    def _drafted(self, truth: KnownTokens, token: int) -> int:
        assert self._drafter is not None
        (hash,) = self._hashes(self._drafter, truth, token, token + 1)
        return _word(hash, self._salt(self._drafter))

    def _salt(self, group: int) -> int:
        return (self.epoch << 8) + group


def _word(hash: int, salt: int) -> int:
    return (hash + salt * 0x9E3779B97F4A7C15) % 2**64


def _state_words(truth: KnownTokens, tokens: int, salt: int) -> list[int]:
    """The state after this number of tokens, as the words of its whole block."""
    (word,) = truth.hashes(tokens - 1, tokens)
    return [(_word(word, salt) + offset) % 2**64 for offset in range(BLOCK_TOKENS)]


class _PlaceList:
    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._offsets: list[int] = []
        self._words: list[int] = []
        self._names: list[str] = []
        self._versions: dict[int, Collection[int]] = {}

    def add_versions(self, first: int, end: int, versions: Callable[[int], Collection[int]]) -> None:
        """Set the words that the last tokens of blocks may have, among the tokens that are added next."""
        for token in range(first + BLOCK_TOKENS - 1 - first % BLOCK_TOKENS, end, BLOCK_TOKENS):
            self._versions[len(self._words) + token - first] = versions(token)

    def add(self, name: str, table: Sequence[int], first: int, words: Sequence[int], salt: int) -> None:
        for place, word in enumerate(words, first):
            block, offset = divmod(place, BLOCK_TOKENS)
            self._blocks.append(table[block])
            self._offsets.append(offset)
            self._words.append(_word(word, salt))
            self._names.append(f"token {place} of request {name}")

    def add_state(self, name: str, table: Sequence[int], tokens: int, truth: KnownTokens, salt: int) -> None:
        """Add the state after this number of tokens; nothing for 0 tokens."""
        if not tokens:
            return
        for offset, word in enumerate(_state_words(truth, tokens, salt)):
            self._blocks.append(table[(tokens - 1) // BLOCK_TOKENS])
            self._offsets.append(offset)
            self._words.append(word)
            self._names.append(f"the state of request {name} after {tokens} tokens")

    def places(self) -> Places:
        return Places(
            np.array(self._blocks, np.int64),
            np.array(self._offsets, np.int64),
            np.array(self._words, np.uint64),
            tuple(self._names),
            self._versions,
        )
