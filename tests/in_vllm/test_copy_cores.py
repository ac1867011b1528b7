"""Where the copying threads of a worker run whose model computes on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.utils.ompmultiprocessing import OMPProcessManager

from kvsm.vllm import copy_cores as module
from kvsm.vllm.copy_cores import copy_cores
from kvsm.vllm.rank_copies import make_copies

PARENT = 1 << 30
"""A process id that no thread of this process has."""


class Parent:
    pid = PARENT


def bound(monkeypatch: pytest.MonkeyPatch, cores: Mapping[int, set[int]]) -> None:
    """This process has a parent, and these threads: thread -> the cores on which it may run."""
    monkeypatch.setattr(module, "parent_process", Parent)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda thread: set(cores[thread]))
    threads = [str(thread) for thread in cores if thread != PARENT]
    monkeypatch.setattr(module.os, "listdir", lambda _: threads)


@pytest.mark.parametrize(
    ("given", "threads", "expected"),
    [
        ({0, 1, 2, 3}, [{0}, {1}], {2, 3}),
        ({0, 1}, [{0}, {1}], {0, 1}),
        ({0, 1}, [{0, 1}], {0, 1}),
        ({4, 5}, [{4}, {4}], {5}),
    ],
    ids=["cores are left", "all cores compute", "not bound", "a user gave two cores"],
)
def test_copies_run_where_the_model_does_not(
    monkeypatch: pytest.MonkeyPatch, given: set[int], threads: list[set[int]], expected: set[int]
) -> None:
    """Otherwise each copy would hold up the model. No core is used that the user did not give."""
    bound(monkeypatch, {PARENT: given, **dict(enumerate(threads))})
    assert copy_cores() == expected


def test_a_process_that_the_user_started_is_left_alone() -> None:
    """vLLM binds no thread there, and the parent is the user's shell."""
    assert copy_cores() is None


def _copy(answer: Any) -> None:
    """Tell on which cores the copying threads of this process run."""
    copies = make_copies([torch.zeros(4, 64, dtype=torch.int8)], 4, verify=False)
    threads = copies.engine._threads  # type: ignore[attr-defined]
    answer.send([sorted(os.sched_getaffinity(thread.native_id)) for thread in threads])
    copies.close()


def test_the_threads_of_a_bound_worker_leave_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that vLLM's own code binds to its first core, with real threads."""
    first, *others = sorted(os.sched_getaffinity(0))
    library = next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(first))
    parallel = SimpleNamespace(local_world_size=1, data_parallel_rank_local=None, _api_process_count=1)
    parallel.assigned_physical_gpu_ids = None
    manager = OMPProcessManager(SimpleNamespace(parallel_config=parallel, kv_transfer_config=None))
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_copy, args=[theirs])
    with manager.configure_omp_envs(rank=0, local_rank=0):
        worker.start()
    assert ours.poll(60)
    found = ours.recv()
    worker.join()
    assert found == [others or [first]] * 2
