"""KvsmConnector and another connector in vLLM's MultiConnector, in either order.

The other is vLLM's ExampleConnector. It keeps whole prompts in files, loads them before the step computes,
and does not know KV cache groups.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from unittest.mock import patch

from scenes import HOST_BYTES, MAX_TOKENS, MODELS, PROMPTS, expected
from scheduler_shapes import BLOCK_TOKENS, Shape, make_configs, make_scheduler
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from kvsm.explain.story import verify_log
from kvsm.vllm.trial import Trial, TrialOutcome, connector_config, run_trial


def beside_example(tmp_path: Path) -> list[dict[str, Any]]:
    """kvsm, and vLLM's ExampleConnector."""
    ours = connector_config(cpu_bytes_to_use=HOST_BYTES, event_log=str(tmp_path / "logs"))
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }
    return [ours, other]


def serve(*children: dict[str, Any]) -> TrialOutcome:
    """Serve three rounds of prompts with too few device blocks for all of them."""
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
    engine = {"num_gpu_blocks_override": 40, "disable_hybrid_kv_cache_manager": True}
    return run_trial(
        Trial(
            rounds=[PROMPTS, PROMPTS, PROMPTS],
            max_tokens=MAX_TOKENS,
            kv_transfer=both,
            model=dict(MODELS["llama"]),
            engine=engine,
            in_process=False,
        )
    )


@pytest.mark.parametrize("kvsm_first", [True, False], ids=["kvsm first", "kvsm second"])
def test_tokens_hits_and_statistics_beside_another(kvsm_first: bool, tmp_path: Path) -> None:
    """What kvsm matched and the other connector loads is released. Statistics cross the processes."""
    ours, other = beside_example(tmp_path)
    outcome = serve(ours, other) if kvsm_first else serve(other, ours)
    assert outcome.tokens == expected("llama") * 3
    assert sum(outcome.cached_tokens) >= 192 * len(PROMPTS)
    assert any((tmp_path / "files").iterdir())
    assert outcome.metric("vllm:kvsm_blocks_stored") >= 6 * len(PROMPTS)
    assert outcome.metric("vllm:kvsm_copied_bytes", "store") > 0
    loaded = outcome.metric("vllm:kvsm_blocks_loaded")
    assert loaded > 0 if kvsm_first else loaded == 0
    (log,) = (tmp_path / "logs").iterdir()
    verification = verify_log(log)
    assert verification.good, verification


def test_two_connectors_of_kvsm_serve_side_by_side(tmp_path: Path) -> None:
    """Each stores all blocks in its own pool, and only the first one loads. Their metrics add up."""
    options = {"cpu_bytes_to_use": HOST_BYTES, "event_log": str(tmp_path)}
    outcome = serve(connector_config(**options), connector_config(policy="arc", **options))
    assert outcome.tokens == expected("llama") * 3
    assert sum(outcome.cached_tokens) >= 192 * len(PROMPTS)
    assert outcome.metric("vllm:kvsm_blocks_stored") >= 2 * 6 * len(PROMPTS)
    assert outcome.metric("vllm:kvsm_blocks_loaded") > 0
    logs = [*tmp_path.iterdir()]
    assert len(logs) == 2
    for log in logs:
        verification = verify_log(log)
        assert verification.good, verification


def test_what_another_connector_still_loads_is_not_stored(tmp_path: Path) -> None:
    """Order of copies (S12): vLLM counts the tokens of a load as computed when it begins. The request is
    aborted then."""
    init_none_hash(sha256)
    shape = Shape()
    config, kv_cache = make_configs(shape, str(tmp_path))
    scheduler = make_scheduler(shape, config, kv_cache)
    connector, prompt = scheduler.connector, list(range(10, 10 + 4 * BLOCK_TOKENS + 1))
    give = connector.update_state_after_alloc
    request = Request(
        "r",
        prompt,
        SamplingParams(max_tokens=2),
        None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )
    with (
        patch.object(connector, "get_num_new_matched_tokens", lambda *_: (4 * BLOCK_TOKENS, True)),
        # This is how a MultiConnector calls the connectors that do not load.
        patch.object(connector, "update_state_after_alloc", lambda one, blocks, _: give(one, blocks, 0)),
    ):
        scheduler.add_request(request)
        scheduler.schedule()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.num_computed_tokens == 4 * BLOCK_TOKENS
    scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    ledger = connector._side._core.offloader.ledger
    assert not ledger.transfers
    assert not ledger.index
    scheduler.shutdown()


@pytest.mark.parametrize("hint", [{"session_id": "s", "cache_control": {"ttl": 60}}, {"session_id": 7}])
def test_two_connectors_of_kvsm_tell_a_client_once_of_its_hint(hint: object, tmp_path: Path) -> None:
    """A MultiConnector stops the engine if two of its connectors answer under one key. Clients send hints."""
    init_none_hash(sha256)
    shape = Shape()
    config, kv_cache = make_configs(shape, str(tmp_path))
    alone = config.kv_transfer_config
    child = {
        "kv_connector": alone.kv_connector,
        "kv_connector_module_path": alone.kv_connector_module_path,
        "kv_role": alone.kv_role,
        "kv_connector_extra_config": alone.kv_connector_extra_config,
    }
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=alone.kv_role,
        kv_load_failure_policy=alone.kv_load_failure_policy,
        kv_connector_extra_config={"connectors": [child, child]},
    )
    scheduler = make_scheduler(shape, config, kv_cache)
    parameters = {"kv_transfer_params": {"agent_hint": hint}}
    sampling = SamplingParams(max_tokens=2, extra_args=parameters)
    request = Request("r", list(range(10, 30)), sampling, None)
    scheduler.connector.on_new_request(request)
    request.status = RequestStatus.FINISHED_STOPPED
    _, answer = scheduler.connector.request_finished_all_groups(request, ([],) * shape.groups)
    assert answer["agent_hint"]["outcome"] == "refused"
    scheduler.shutdown()


def test_kvsm_tells_nothing_if_another_connector_hands_the_request_over(tmp_path: Path) -> None:
    """With vLLM 0.32 a second answer stops the engine, whatever its keys are."""
    init_none_hash(sha256)
    shape = Shape()
    config, kv_cache = make_configs(shape, str(tmp_path))
    scheduler = make_scheduler(shape, config, kv_cache)
    given = {"do_remote_decode": True, "agent_hint": {"session_id": 7}}
    sampling = SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": given})
    request = Request("r", list(range(10, 30)), sampling, None)
    scheduler.connector.on_new_request(request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, answer = scheduler.connector.request_finished_all_groups(request, ([],) * shape.groups)
    assert answer is None
    scheduler.shutdown()
