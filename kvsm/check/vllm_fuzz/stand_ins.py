"""Replace the device accesses of vLLM's workers by a simulated device.

==========================================  ===================================================
in vLLM                                     here
==========================================  ===================================================
CPUOffloadingSpec.get_worker                its own worker, with a KV cache in host memory
streams and events of that worker           `runtime.Stream`, `runtime.Event`
its swap_blocks_batch                       `Runtime.copy`
streams and events of SimpleCPUOffload      `runtime.Stream`, `runtime.Event`
its cuMemcpyBatchAsync                      `Runtime.copy`
its copying thread                          a submitter of the simulated device: each item is a step
==========================================  ===================================================

kvsm's own workers create their copy engine on the same device (`rank.py`). The other code of a connector is
unchanged. A connector that is not in this table copies within host memory at once. So with such a connector
each step computes before the next call of the connector (`is_simulated`).

The replacements stay for the rest of the process, so it must not run a real engine afterwards.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.simple_kv_offload import copy_backend
from vllm.v1.simple_kv_offload import worker as simple_worker

from kvsm.check.vllm_fuzz.runtime import Event, Stream, acting, current_stream, stream
from kvsm.check.vllm_fuzz.shape import BLOCK_BYTES, EngineShape
from kvsm.copies.simulated import SimulatedSubmitter
from kvsm.vllm.connector import KvsmConnector

_OVER_THE_RUNTIME = (OffloadingConnector, SimpleCPUOffloadConnector, KvsmConnector)


def is_simulated(connector: Any) -> bool:
    """Whether all copies of this connector (a worker side) are steps of the simulated device."""
    if isinstance(connector, MultiConnector):
        return all(is_simulated(child) for child in connector._connectors)
    return isinstance(connector, _OVER_THE_RUNTIME)


def host_bytes(connector: type, shape: EngineShape, extra: Mapping[str, Any]) -> int:
    """`cpu_bytes_to_use` for all ranks, so that each rank has `host_blocks` in host memory.

    vLLM's CPUOffloadingSpec rounds a block of all ranks up to whole pages.

    extra: the options of the connector.
    """
    blocks, ranks = shape.host_blocks, shape.ranks
    if issubclass(connector, OffloadingConnector) and issubclass(
        OffloadingSpecFactory.get_spec_cls(extra), CPUOffloadingSpec
    ):
        chunk = BLOCK_BYTES * ranks * int(extra.get("blocks_per_chunk", 1))
        page = int(CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT)
        return blocks * (-(-chunk // page) * page)
    return blocks * BLOCK_BYTES * ranks


@cache
def install() -> None:
    """Install the replacements. A second call does nothing."""
    if not (log := logging.getLogger("vllm")).handlers:
        log.setLevel(logging.CRITICAL)  # vLLM has not set up logging, so each warning would be printed
    events = _With(torch, Event=Event, cuda=_With(torch.cuda, Stream=Stream, current_stream=current_stream))
    platform = {"Stream": Stream, "current_stream": current_stream, "stream": stream}
    stand_ins: dict[Any, dict[str, Any]] = {
        gpu_worker: {"torch": events, "ops": _With(gpu_worker.ops, swap_blocks_batch=_swap_blocks)},
        simple_worker: {"torch": events},
        copy_backend: {
            "torch": events,
            "build_params": _build_params,
            "copy_blocks": _copy_blocks,
            "queue": SimpleNamespace(SimpleQueue=_SubmitterQueue),
            "threading": _With(threading, Thread=_SubmitterThread),
        },
    }
    for module, names in stand_ins.items():
        for name, stand_in in names.items():
            setattr(module, name, stand_in)
    for module in (gpu_worker, copy_backend):
        module.current_platform = _With(module.current_platform, set_device=_nothing, **platform)
    CPUOffloadingSpec.get_worker = _get_worker


@contextmanager
def shared_memory_of(engine: str) -> Iterator[None]:
    """A `with` block in which an engine starts. At its end the file of the engine's shared memory is
    unlinked, so that the memory is freed with the engine."""
    try:
        yield
    finally:
        Path(f"/dev/shm/vllm_offload_{engine}.mmap").unlink(missing_ok=True)


class _With:
    """A module or an object with some of its names replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _DeviceTensor(torch.Tensor):
    """A tensor in host memory whose `is_cuda` is True, as vLLM's worker asserts."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def _nothing(*_args: object) -> None:
    pass


def _get_worker(self: Any, kv_caches: Any) -> Any:
    if self._worker is None:
        tensors = [
            replace(cache, tensor=cache.tensor.as_subclass(_DeviceTensor)) for cache in kv_caches.tensors
        ]
        self._worker = self.create_worker(replace(kv_caches, tensors=tensors))
    return self._worker


def _swap_blocks(sources: Any, destinations: Any, sizes: Any, **_options: object) -> None:
    runtime = acting()
    copies = list(zip(sources.tolist(), destinations.tolist(), sizes.tolist()))
    runtime.copy(runtime.current_stream, "copy of blocks", copies)


class _CopyParams(NamedTuple):
    """A stream, and pairs of regions: (first source address, first destination address, bytes of a block)."""

    regions: list[tuple[int, int, int]]
    stream: Stream


def _build_params(
    sources: Mapping[str, Any], destinations: Mapping[str, Any], stream: Stream, **_options: object
) -> _CopyParams:
    regions = [
        (source.data_ptr(), destination.data_ptr(), source.stride(0) * source.element_size())
        for source, destination in zip(sources.values(), destinations.values(), strict=True)
    ]
    return _CopyParams(regions, stream)


def _copy_blocks(sources: Sequence[int], destinations: Sequence[int], params: _CopyParams) -> None:
    copies = [
        (from_ + size * source, to + size * destination, size)
        for from_, to, size in params.regions
        for source, destination in zip(sources, destinations, strict=True)
    ]
    acting().copy(params.stream.simulated, "copy of blocks", copies)


class _SubmitterThread:
    """Replaces the thread of vLLM's `DmaCopyBackend`. Each item of its queue is a step of the device."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        assert daemon
        args[0].serve(target, args[1:])

    def start(self) -> None:
        pass

    def join(self, timeout: float) -> None:
        pass


class _SubmitterQueue:
    def __init__(self) -> None:
        self._runtime = acting()
        self._submitter: SimulatedSubmitter = self._runtime.device.new_submitter("copying thread", _raise)
        self._loop: Callable[[_Items], None] = _nothing

    def serve(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._loop = lambda items: target(items, *args)

    def put(self, item: Any) -> None:
        if item is not None:
            self._submitter.put(lambda: self._carry_out(item))

    def _carry_out(self, item: Any) -> None:
        with self._runtime.acting():
            self._loop(_Items([item, None]))


class _Items:
    """A queue with a fixed list of items."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def get(self) -> Any:
        return self._items.pop(0)


def _raise(reason: str) -> None:
    raise RuntimeError(reason)
