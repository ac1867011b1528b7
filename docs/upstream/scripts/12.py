"""TieringOffloadingSpec with an fs tier: a miss is still returned after its key is stored."""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

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
    with tempfile.TemporaryDirectory() as root:
        tier = {"type": "fs", "root_dir": root, "n_read_threads": 1, "n_write_threads": 1}
        extra = {
            "cpu_bytes_to_use": 10 * 4096,
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [tier],
        }
        scheduler = make_scheduler(
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra, "engine_id": "report"}
        )
        loaded = {}  # request -> tokens that were loaded and not computed

        def run(steps):
            for _ in range(steps):
                output = scheduler.schedule()
                meta = output.kv_connector_metadata
                for job in meta.load_jobs.values():
                    loaded[job.req_id] = loaded.get(job.req_id, 0) + len(job.dst_spec.block_ids) * BLOCK
                done = dict.fromkeys([*meta.store_jobs, *meta.load_jobs], 1)
                received = {job.req_id for job in meta.load_jobs.values()}
                report = OffloadingWorkerMetadata(done)
                answer(scheduler, output, kv_connector_worker_meta=report, finished_recving=received)
                time.sleep(0.005)  # the threads of the tier

        prompt = list(range(8 * BLOCK))
        arrive(scheduler, "long", prompt, max_tokens=500)
        run(20)  # the tier is asked for its first block: a miss. It is computed, and stored in the tier.
        arrive(scheduler, "other", list(range(500, 500 + 10 * BLOCK)))
        run(20)  # the host evicts the prompt
        scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts "long", and empties the GPU
        run(20)
        by_long = loaded.get("long", 0)
        scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
        arrive(scheduler, "evicts", list(range(700, 700 + 10 * BLOCK)))
        run(20)
        assert scheduler.reset_prefix_cache()
        arrive(scheduler, "after", [*prompt, 1])
        run(20)
        scheduler.connector.shutdown()
    assert loaded["after"] == 8 * BLOCK, "the tier did not have the prompt"
    if by_long < 8 * BLOCK:
        return f"'long' asked again when the tier had its 8 blocks, and loaded {by_long} tokens"
    return None


if __name__ == "__main__":
    failure = main()
    print(f"FAILS: {failure}" if failure else "passes")
    sys.exit(bool(failure))
