"""Processes of engines as forks of one that has imported vLLM: that takes longer than the start of an engine.

    with forking(environment()):
        process = begin(["-m", "kvsm.vllm.trial", "7"], environment(), [7], stdout=file)

The process is a child of the caller, with an environment and a session of its own. vLLM's own processes, its
core and its workers, are forks too. Alone, vLLM for CPUs starts each of them as a new Python. It does so
where a user's command is tested: `test_check.py`, `test_serve.py`, `test_disaggregated_engines.py`.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader.default_loader",
    "kvsm.vllm.connector",
)
"""So that no engine has to. A version of vLLM that lacks one of them only starts its engines later."""

LATE = frozenset(
    {
        "OMP_NUM_THREADS",
        "PYTEST_CURRENT_TEST",
        "PYTHONPATH",
        "TMPDIR",
        "TORCHDYNAMO_DISABLE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
    }
)
"""Variables that are read when an engine starts."""

OF_VLLM = frozenset(
    {
        "AITER_SITUV2_A4W4",
        "LD_PRELOAD",
        "LOCAL_WORLD_SIZE",
        "NCCL_GRAPH_REGISTER",
        "NUMEXPR_MAX_THREADS",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_DIST_IDENT",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "VLLM_WORKER_MULTIPROC_METHOD",
    }
)
"""Variables that vLLM sets in each process that makes a configuration. A test is such a process."""

STANDARD = ("stdin", "stdout", "stderr")
BUSY_S = 0.02
PR_SET_CHILD_SUBREAPER = 36
HIGH = 500
"""Above all numbers of files that a test has open."""


# In the caller's process.


class Fork:
    """A process that began as a fork. It has what the tests need of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(BUSY_S)
        return self.returncode


class EngineForks:
    """The caller's end of the process that forks. It starts when it is first needed.

    settings: the environment in which vLLM is imported.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        self._server: subprocess.Popen[bytes] | None = None

    def may_fork(self, env: Mapping[str, str]) -> bool:
        """Whether a process in this environment would have imported the same."""
        return {name for name, _ in env.items() ^ self._settings.items()} <= LATE | OF_VLLM

    def fork(self, asked: Sequence[object], files: Sequence[int]) -> Fork:
        if self._server is None:
            self._start()
        socket.send_fds(self._socket, [json.dumps(asked).encode()], files)
        told = self._socket.recv(100)
        assert told, "the process that forks has ended"
        return Fork(int(told))

    def _start(self) -> None:
        # What that process forks loses its parent at once, and gets this one.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._server = subprocess.Popen(command, env=self._settings, pass_fds=[theirs.fileno()])

    def close(self) -> None:
        if self._server is not None:
            self._socket.close()
            self._server.wait()


_forks: EngineForks | None = None


@contextmanager
def forking(settings: Mapping[str, str]) -> Iterator[None]:
    """For the time of a `with` block processes begin as forks. settings: where vLLM is imported for them."""
    global _forks
    _forks = EngineForks(settings)
    try:
        yield
    finally:
        _forks.close()
        _forks = None


def begin(
    arguments: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = (), **files: IO[bytes]
) -> Any:
    """Begin a program in a session of its own, as a fork if that makes no difference.

    arguments: as for Python: `-m module`, `-c code`, or a file. files: its `stdin`, `stdout`, `stderr`.
    """
    if _forks is None or not _forks.may_fork(env):
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, start_new_session=True, **files)
    numbers = {STANDARD.index(name): file.fileno() for name, file in files.items()}
    numbers |= {number: number for number in pass_fds}
    return _forks.fork([arguments, dict(env), os.getcwd(), [*numbers]], [*numbers.values()])


# In the process that forks.


def serve(asking: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """Fork for each program that is asked for. Returns in a fork, with what it is to run; at the end None."""
    while True:
        asked, files, _, _ = socket.recv_fds(asking, 1 << 20, 20)
        if not asked:
            return None
        arguments, env, directory, numbers = json.loads(asked)
        reads, writes = os.pipe()
        if not (between := os.fork()):
            if own := os.fork():
                os.write(writes, str(own).encode())
                os._exit(0)
            asking.close()
            os.close(reads)
            os.close(writes)
            os.setsid()
            os.chdir(directory)
            _place(files, numbers)
            return arguments, env
        for number in (*files, writes):
            os.close(number)
        os.waitpid(between, 0)
        asking.send(os.read(reads, 100))
        os.close(reads)


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in files]
    for number in files:
        os.close(number)
    for own, number in zip(high, numbers, strict=True):
        os.dup2(own, number)
        os.close(own)


def become(arguments: Sequence[str], env: Mapping[str, str], paths: Sequence[str]) -> None:
    """Run a program as a new Python would. paths: where Python finds what is installed."""
    os.environ.clear()
    os.environ.update(env)
    if "|" in (bound := env.get("VLLM_CPU_OMP_THREADS_BIND", "")):
        os.sched_setaffinity(0, set(map(int, bound.split("|"))))
    first, *rest = arguments
    start = str(Path(first).parent) if first.endswith(".py") else ""
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [start or os.getcwd(), *given, *paths]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(rest[0], vars(main))
    else:
        sys.argv = [*arguments]
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in sys.path[1:] if path not in given]
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    for module in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    asking = socket.socket(fileno=int(sys.argv[1]))
    if (asked := serve(asking)) is not None:
        become(*asked, paths)


if __name__ == "__main__":
    main()
