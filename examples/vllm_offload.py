"""vLLM with kvsm: conversations that lost their device blocks return, and are not computed again.

    python examples/vllm_offload.py [MODEL]

On the command line the short way is

    KVSM_OFFLOAD=1 vllm serve MODEL --shutdown-timeout 30 --kv-offloading-size 16

(docs/vllm.md).

Without MODEL, the engine serves a tiny model with random weights. Nothing is downloaded then. Needs vLLM and
kvsm.
"""

from __future__ import annotations

import random
import sys
import tempfile

from vllm import LLM, SamplingParams

from kvsm.vllm.tiny_model import tiny_model


def main(model: str, **settings: object) -> None:
    log = tempfile.mkdtemp(prefix="kvsm-log-")
    llm = LLM(
        model,
        max_model_len=512,
        max_num_seqs=4,
        num_gpu_blocks_override=80,  # too few for all conversations
        kv_transfer_config={
            "kv_connector": "KvsmConnector",
            "kv_connector_module_path": "kvsm.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28, "event_log": log},
        },
        **settings,
    )
    drawn = random.Random(0)
    conversations = [[drawn.randrange(3, 1000) for _ in range(400)] for _ in range(16)]
    for turn in ("first turn", "second turn"):
        outputs = llm.generate(
            [{"prompt_token_ids": one} for one in conversations], SamplingParams(max_tokens=8), use_tqdm=False
        )
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        print(f"{turn}: {cached} of {sum(map(len, conversations))} prompt tokens came from a cache")
    llm.llm_engine.engine_core.shutdown()
    print(f"the event log is in {log}; now: kvsm verify {log}/*")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with tiny_model() as directory:
            small = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32"}
            main(directory, gpu_memory_utilization=0.2, **small)
