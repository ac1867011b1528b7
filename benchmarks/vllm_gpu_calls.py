"""Compute a Llama under vLLM's CUDA platform without a GPU, and print which operations it calls.

    PYTHONPATH=SITE python benchmarks/vllm_gpu_calls.py

SITE is an unpacked pack of `vllm_gpu_pack.py`. Tensors are torch's fake ones: they have shapes and say that
they are on a GPU, but hold no numbers. So a compiled operation that is missing raises an error here, and not
only on the GPU. Questions about the device are answered as by an H200. Attention itself is not entered, as in
vLLM's own profile run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvsm.vllm.tiny_model import LLAMA

TOKENS = 32

IMPORTED = (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.kv_offload.cpu.gpu_worker",
    "vllm.v1.simple_kv_offload.worker",
    "kvsm.vllm.connector",
)
"""Modules that an engine on a GPU imports, also of vLLM's own connectors."""


class Recorder(TorchDispatchMode):
    """Counts the calls of operations that are not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if function.namespace not in ("aten", "prim"):
            self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


def choose_cuda() -> None:
    """Make vLLM use its CUDA platform. What it would ask the driver has the answers of an H200."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM uses Triton without a GPU if this is set and empty.
    platforms, cuda = import_module("vllm.platforms"), import_module("vllm.platforms.cuda")
    capability = import_module("vllm.platforms.interface").DeviceCapability
    answers: dict[str, Any] = {
        "get_device_capability": capability(9, 0),
        "get_device_name": "NVIDIA H200",
        "get_device_total_memory": 140 << 30,
        "device_count": 1,
        "is_integrated_gpu": False,
    }
    methods = {
        name: classmethod(lambda cls, *_, answer=answer, **__: answer)  # noqa: ARG005
        for name, answer in answers.items()
    }
    platforms._current_platform = type("ToldPlatform", (cuda.CudaPlatform,), methods)()


def calls_of_a_step(directory: Path) -> Counter[str]:
    """Compute one step of a Llama, and return the calls. directory: an empty one."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.platforms import current_platform

    (directory / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    config = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},
        block_size=16,
        max_model_len=512,
        dtype="bfloat16",
        attention_backend="TRITON_ATTN",
    ).create_engine_config()
    recorder = Recorder()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{directory / 'ranks'}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1, backend="gloo")
        current_platform.import_ir_kernels()
        for name in IMPORTED:
            import_module(name)
        llama = import_module("vllm.model_executor.models.llama").LlamaForCausalLM
        torch.set_default_dtype(torch.bfloat16)
        priority = config.kernel_config.ir_op_priority
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, torch.device("cuda"), priority.set_priority():
            model = llama(vllm_config=config)
            ids = torch.zeros(TOKENS, dtype=torch.int64)
            with set_forward_context(None, config), recorder:
                model.compute_logits(model(ids, ids))
    return recorder.calls


@click.command(help=__doc__)
def main() -> None:
    choose_cuda()
    with TemporaryDirectory(prefix="kvsm-vllm-gpu-calls-") as directory:
        calls = calls_of_a_step(Path(directory))
    for name, count in sorted(calls.items()):
        click.echo(f"{count:6} {name}")


if __name__ == "__main__":
    main()
