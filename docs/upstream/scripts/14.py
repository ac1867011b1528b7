"""OffloadingConnector: with a drafter and a sliding window, most prompts are stored and never loaded."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


class Scheduler(VllmScheduler):
    """Of an engine whose first KV cache group also has the layers of an EAGLE drafter."""

    def __init__(self, config, kv_cache_config, *args, **options):
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=2,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=ParallelConfig(),
        )
        config.speculative_config.method = "eagle"  # the constructor would load the drafter
        kv_cache_config.kv_cache_groups[0].is_eagle_group = True
        super().__init__(config, kv_cache_config, *args, **options)


# An engine without a model: vLLM's own scheduler and connector, and this script in place of the workers.
BLOCK = 16


def make_scheduler(transfer, *, blocks=64, step_tokens=256, windows=(0,), events=False, policy="fcfs"):
    """A scheduler with `blocks` GPU blocks. windows: one KV cache group each, 0 for full attention."""
    with tempfile.TemporaryDirectory() as model:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
        Path(model, "config.json").write_text(
            json.dumps({**sizes, **names, "vocab_size": 1024, "max_position_embeddings": 1024})
        )
        model_config = ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=1024)
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=step_tokens,
            max_model_len=1024,
            is_encoder_decoder=False,
            policy=policy,
            async_scheduling=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
    )
    config.cache_config.num_gpu_blocks = blocks
    common = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    specs = [
        SlidingWindowSpec(**common, sliding_window=window) if window else FullAttentionSpec(**common)
        for window in windows
    ]
    page = specs[0].page_size_bytes
    size = blocks * page
    tensors = [
        KVCacheTensor(size, [f"layer.{n}"], layer_stride=size, block_stride=page) for n in range(len(specs))
    ]
    groups = [KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
    kv_cache_config = KVCacheConfig(blocks, tensors, groups)
    manager = StructuredOutputManager(config)
    return Scheduler(
        config, kv_cache_config, manager, block_size=BLOCK, hash_block_size=BLOCK, log_stats=True
    )


def arrive(scheduler, name, tokens, max_tokens=1, priority=0):
    init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
    hasher = get_request_block_hasher(BLOCK, sha256)
    scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=hasher, priority=priority))


def answer(scheduler, output, **connector):
    """Hand the scheduler what the workers would return for this step."""
    names = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    computed = [request.num_computed_tokens >= request.num_tokens for request in requests]
    sampled = [[7] if is_computed else [] for is_computed in computed]
    of_connector = KVConnectorOutput(**connector)
    index = {name: place for place, name in enumerate(names)}
    result = ModelRunnerOutput(names, index, sampled, kv_connector_output=of_connector)
    return scheduler.update_from_output(output, result)


# End of the engine.


def main():
    scheduler = make_scheduler(
        {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 256 * 4096},
        },
        windows=(0, 2 * BLOCK),
    )
    prompt, stored, loaded = list(range(4 * BLOCK + 8)), 0, 0
    for name in ("first", "second"):
        arrive(scheduler, name, prompt)
        for _ in range(4):
            output = scheduler.schedule()
            stores, loads = (
                getattr(output.kv_connector_metadata, kind) for kind in ("store_jobs", "load_jobs")
            )
            stored += sum(len(job.src_spec.block_ids) for job in stores.values())
            loaded += len(loads)
            done = OffloadingWorkerMetadata(dict.fromkeys([*stores, *loads], 1))
            received = {job.req_id for job in loads.values()}
            answer(scheduler, output, kv_connector_worker_meta=done, finished_recving=received)
        assert not scheduler.requests
        assert scheduler.reset_prefix_cache()  # of the GPU: the host keeps its blocks
    if not loaded:
        return f"a request with the same prompt loads none of the {stored} GPU blocks that were stored"
    return None


if __name__ == "__main__":
    failure = main()
    print(f"FAILS: {failure}" if failure else "passes")
    sys.exit(bool(failure))
