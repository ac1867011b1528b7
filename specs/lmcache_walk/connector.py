"""LMCache's multi-process connector, with a server of its own.

The server is another process, and the walk does not control when it answers, so a failure may depend on
timing. Copies are not steps of the simulated device, so only bytes and answers are checked. Each engine of a
walk has a different model name, so that no engine finds blocks of an earlier one.
"""

from __future__ import annotations

import atexit
import copy
import os
import socket
import subprocess
import sys
import time
from functools import cache
from typing import Any

import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS

WAIT_S = 0.005
"""How long a call waits for the server (s)."""

START_S = 300.0
"""The time within which the server must answer (s)."""


@cache
def server_port(*options: str) -> int:
    """Start a server with these options, once in a process, and return its port."""
    ports = []
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(str(free.getsockname()[1]))
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", ports[0]]
    command += ["--http-port", ports[1], "--prometheus-port", ports[2], "--disable-observability"]
    command += ["--chunk-size", str(BLOCK_TOKENS), "--l1-size-gb", "0.25", "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", "engine_driven", *options]
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR"},
    )
    atexit.register(server.kill)
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with socket.socket() as client:
            if not client.connect_ex(("127.0.0.1", int(ports[0]))):
                return int(ports[0])
        time.sleep(0.1)
    raise TimeoutError(f"the server of LMCache does not listen after {START_S:.0f} s")


class Pickled(LMCacheMPConnector):  # type: ignore[misc]
    """Blocks go to the server as pickled bytes."""

    server_options: tuple[str, ...] = ()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        transfer = copy.copy(vllm_config.kv_transfer_config)
        options = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server_port(*self.server_options)}
        transfer.kv_connector_extra_config = {**transfer.kv_connector_extra_config, **options}
        config = copy.copy(vllm_config)
        config.kv_transfer_config = transfer
        config.model_config = copy.copy(vllm_config.model_config)
        config.model_config.model = f"model-{transfer.engine_id}"
        config.cache_config = copy.copy(vllm_config.cache_config)
        config.cache_config.kv_cache_layout = "LBHNC"  # vLLM's engine core would resolve it
        super().__init__(config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Wait a moment if the server has not answered: a step of a walk is shorter than a real one."""
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if answer[0] is None:
            time.sleep(WAIT_S)
        return answer

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Wait a moment, for the same reason."""
        time.sleep(WAIT_S)
        return super().get_transfer_results(finished_req_ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the blocks with the shape [block, head, token, key and value], which `LBHNC` needs."""
        shape = -1, 1, BLOCK_TOKENS, 2
        super().register_kv_caches(
            {name: memory.view(torch.float32).view(shape) for name, memory in kv_caches.items()}
        )


class SharedMemory(Pickled):
    """Blocks go to the server through shared memory."""

    server_options = ("--shm-name", f"kvsm-{os.getpid()}", "--no-l1-use-lazy")
