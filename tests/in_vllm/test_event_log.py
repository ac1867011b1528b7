"""The event log of a real vLLM engine.

It replays to the state in which the engine ended, keeps every property, and agrees with the metrics and KV
events that vLLM published.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from published_events import folded_kv_events, published, readable
from workloads import CASES, END_DIGEST, case_name, make_rounds

import kvsm
from kvsm.core.kv_events import MEDIUM_CPU
from kvsm.core.ledger.snapshot import digest
from kvsm.core.log import LogReader
from kvsm.explain.metrics import Metrics
from kvsm.explain.report.log_report import make_report
from kvsm.explain.story import rebuild, verify_log
from kvsm.vllm.tiny_model import BLOCK_TOKENS

each_case = pytest.mark.parametrize("case", CASES, ids=case_name)
each_described = pytest.mark.parametrize(
    "case", [case for case in CASES if case[1].describes_kv_events], ids=case_name
)


@each_case
def test_replay_gives_the_state_of_the_end(engines: Any, case: Any) -> None:
    served = engines.served(*case)
    ended = (served.notes / END_DIGEST).read_text()
    rebuilt = rebuild(served.log)
    assert rebuilt.events > 1000
    assert digest(rebuilt.ledger) == ended


@each_case
def test_the_log_keeps_every_property(engines: Any, case: Any) -> None:
    found = verify_log(engines.served(*case).log)
    assert found.violations == ()
    assert found.good
    assert found.condition.notes() == []  # The engine closed its log, too.


@each_case
def test_the_log_tells_what_vllm_exported(engines: Any, case: Any) -> None:
    """A load ends before its request. A store may end after vLLM's last output, which carries the numbers."""
    served = engines.served(*case)
    reader = LogReader(served.log)
    told = Metrics.of(reader).values()
    metric = served.outcome.metric
    assert told["blocks_loaded"] == metric("vllm:kvsm_blocks_loaded")
    assert told["preemptions"] == metric("vllm:num_preemptions")
    assert told["requests"]["finished"] == len(served.outcome.tokens) == metric("vllm:kvsm_requests")
    assert told["transfers_ended"]["load"]["failed"] == told["transfers_ended"]["store"]["failed"] == 0
    if served.row.own_process:
        assert told["blocks_stored"] >= metric("vllm:kvsm_blocks_stored")
    else:
        assert told["blocks_stored"] == metric("vllm:kvsm_blocks_stored")


@each_case
def test_one_run_has_one_truth(engines: Any, case: Any) -> None:
    """vLLM, the metrics that it exported, those of the log, and `kvsm report` count the same host hits: each
    request once, when it gets its blocks."""
    served = engines.served(*case)
    reader, metric = LogReader(served.log), served.outcome.metric
    found = Metrics.of(reader).values()["blocks_asked"]
    tokens = reader.head.config.block_tokens
    assert tokens % BLOCK_TOKENS == 0
    assert found["on the device"]
    assert found["on the host"] * tokens == metric("vllm:external_prefix_cache_hits")
    assert sum(found.values()) == metric("vllm:kvsm_blocks_asked")
    with kvsm.open(served.log) as log:
        hits = make_report(log, verify=False).hits
    assert (hits.on_device, hits.on_host, hits.missed) == tuple(found.values())


@each_case
def test_kv_events_fold_to_what_is_resident(engines: Any, case: Any) -> None:
    """With either form of block hashes. No key is stored twice, and none is removed that is not stored."""
    served = engines.served(*case)
    found = readable(rebuild(served.log).ledger, served.row.whole_hashes)
    assert len(found) > 50
    assert folded_kv_events(served.notes, MEDIUM_CPU) == found


@each_described
def test_described_kv_events_say_the_tokens(engines: Any, case: Any) -> None:
    """The tokens of each event are those of one block of a prompt and its answer."""
    served = engines.served(*case)
    prompts = [prompt for prompts in make_rounds() for prompt in prompts]
    asked = [prompt + answer for prompt, answer in zip(prompts, served.outcome.tokens)]
    blocks = {tuple(block) for tokens in asked for block in blocks_of(tokens)}
    stored = [event for event in published(served.notes, MEDIUM_CPU) if event["type"] == "BlockStored"]
    assert stored
    for event in stored:
        assert event["block_size"] == BLOCK_TOKENS
        assert len(event["token_ids"]) == BLOCK_TOKENS * len(event["block_hashes"])
        assert {tuple(block) for block in blocks_of(event["token_ids"])} <= blocks


def blocks_of(tokens: list[int]) -> list[list[int]]:
    return [tokens[at : at + BLOCK_TOKENS] for at in range(0, len(tokens), BLOCK_TOKENS)]
