"""What the engines of these tests serve, and under which settings.

The workload has a few hundred prompts with greedy answers. Each round asks for the same prefixes in another
order. Between two uses of a prefix lies several times what the device holds, so without offload nearly every
prefix is computed again. Some prefixes are used twice in a row, and some prompts share nothing.

The seed was chosen so that the two best tokens are never nearly equal. In none of the three models are they
closer than 0.0004 of their usual distance, which is a few hundred times the rounding error. So tokens that
differ are wrong, however a run has split its prefills.
"""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any, NamedTuple

from kvsm.vllm.tiny_model import BLOCK_TOKENS, GEMMA, LLAMA, VOCABULARY
from kvsm.vllm.trial import Prompt, Trial

ROUNDS, PREFIXES, TWINS, LONERS = 6, 24, 6, 6
PREFIX_BLOCKS = 6

MISTRAL: dict[str, Any] = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 2 * BLOCK_TOKENS,
}
"""A sliding window of two blocks in every layer: one group, and no full attention."""

ROOMY, TIGHT = 64 << 20, 5 << 20
"""Bytes of host memory: for all that is ever stored, and for about half of it."""

TIMEOUT_S = 900
"""For one engine, which takes about 10 s alone. Other work on the machine must not fail a test."""

END_DIGEST, KV_EVENTS = "digest.txt", "kv_events.msgpack"
"""The files that `watched` writes beside an engine's event log."""


class Row(NamedTuple):
    """One engine with offload.

    batched_tokens: most tokens that one step computes; 128 splits every prefill.
    own_process: whether vLLM's engine core has its own process.
    """

    store: str = "eager"
    policy: str = "lru"
    ranks: int = 1
    batched_tokens: int = 512
    blocks_per_chunk: int = 1
    host_bytes: int = ROOMY
    own_process: bool = False

    @property
    def describes_kv_events(self) -> bool:
        """Whether KV events include the tokens of a block. A lazy store does not know them."""
        return self.store == "eager"

    @property
    def whole_hashes(self) -> bool:
        """Whether KV events have whole block hashes; otherwise they are integers. This changes nothing else
        in kvsm."""
        return self.own_process

    @property
    def name(self) -> str:
        batched = "split" if self.batched_tokens < 512 else "whole"
        host = "roomy" if self.host_bytes == ROOMY else "tight"
        chunk = f"chunk{self.blocks_per_chunk}"
        own = ["own"] if self.own_process else []
        return "-".join([self.store, self.policy, f"tp{self.ranks}", batched, chunk, host, *own])


PAIRWISE = (
    Row(),
    Row("lazy", "arc", 2, 512, 1, ROOMY, True),
    Row("eager", "arc", 1, 128, 2, TIGHT, True),
    Row("lazy", "lru", 1, 128, 1, TIGHT, False),
    Row("eager", "arc", 2, 128, 2, ROOMY, False),
    Row("eager", "lru", 2, 512, 2, TIGHT, True),
)
"""Every two values of two settings meet in one row, except a lazy store of chunks, which is refused."""

ROWS = (
    *PAIRWISE,
    Row("eager", "s3fifo", 1, 512, 1, TIGHT, False),
    Row("lazy", "slru", 1, 128, 1, TIGHT, False),
)

HYBRID: tuple[tuple[dict[str, Any], Row], ...] = (
    (dict(GEMMA), Row()),
    (dict(GEMMA), Row("lazy", "arc", 1, 128, 1, TIGHT, True)),
    (MISTRAL, Row("eager", "lru", 1, 128, 2, ROOMY, False)),
)

CASES = (*((dict(LLAMA), row) for row in ROWS), *HYBRID)
"""Every model with each of its rows."""


def case_name(case: tuple[dict[str, Any], Row]) -> str:
    model, row = case
    return f"{model['model_type']}-{row.name}"


def pairs_missed(rows: tuple[Row, ...]) -> set[tuple[Any, ...]]:
    """Two values of two settings that both occur, but meet in no row."""
    missed: set[tuple[Any, ...]] = set()
    for first, second in combinations(range(len(Row._fields)), 2):
        met = {(row[first], row[second]) for row in rows}
        wanted = {(row[first], other[second]) for row in rows for other in rows}
        missed |= {(Row._fields[first], Row._fields[second], *pair) for pair in wanted - met}
    return missed


def make_rounds(seed: int = 3) -> list[list[Prompt]]:
    """Prompts, round after round; the same for the same seed."""
    random = Random(seed)

    def tokens(count: int) -> Prompt:
        return [random.randrange(3, VOCABULARY) for _ in range(count)]

    prefixes = [tokens(PREFIX_BLOCKS * BLOCK_TOKENS) for _ in range(PREFIXES)]
    rounds = []
    for _ in range(ROUNDS):
        heads: list[list[Prompt]] = [[prefix] for prefix in prefixes] + [[[]] for _ in range(LONERS)]
        for twin in random.sample(range(PREFIXES), TWINS):
            heads[twin] *= 2
        random.shuffle(heads)
        rounds.append(
            [head + tokens(random.randrange(5, 60 if head else 120)) for pair in heads for head in pair]
        )
    return rounds


def reusable_tokens(rounds: list[list[Prompt]], chunk_tokens: int) -> int:
    """How many tokens of the prompts were computed in an earlier round, in whole chunks from the start on."""
    seen: set[tuple[int, ...]] = set()
    reusable = 0
    for prompts in rounds:
        starts = [
            [tuple(prompt[:end]) for end in range(chunk_tokens, len(prompt), chunk_tokens)]
            for prompt in prompts
        ]
        for of_prompt in starts:
            reusable += chunk_tokens * sum(start in seen for start in of_prompt)
        seen.update(start for of_prompt in starts for start in of_prompt)
    return reusable


def make_trial(model: dict[str, Any], row: Row, device_blocks: int = 40, **more: Any) -> Trial:
    """The workload for this model, under the engine's settings of a row.

    device_blocks: by default room for about six requests, which is too little for what they generate.
    """
    engine = {
        "num_gpu_blocks_override": device_blocks,
        "max_num_batched_tokens": row.batched_tokens,
        "max_num_seqs": 16,
        "tensor_parallel_size": row.ranks,
    }
    return Trial(
        rounds=more.pop("rounds", None) or make_rounds(),
        max_tokens=12,
        engine=engine | more.pop("engine", {}),
        model=model,
        in_process=not row.own_process,
        **more,
    )
