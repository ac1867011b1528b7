"""Lives of one vLLM engine on one host pool and one log. Each life but the last is killed with -9.

    python tests/in_vllm/restarted_engine.py --directory /dev/shm/kvsm-lives --lives 12 --seed 1 --blocks 400

Half of the lives end in the middle of a copy: the thread that copies kills its process when half of the
blocks are there. The others are killed from outside at a random moment, perhaps while they start. Each life
first asks the prompts of `KNOWN`, then others. A line of JSON tells each answer.

vLLM is imported once, in this process, which runs no engine. Each life is a fork of it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any, NamedTuple, NoReturn

import click

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]

from kvsm.tiers.disk import DiskGeometry  # noqa: E402 (the path comes first)
from kvsm.vllm.tiny_model import ENVIRONMENT, LLAMA, SETTINGS, tiny_model  # noqa: E402 (the path comes first)
from kvsm.vllm.trial import connector_config  # noqa: E402

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # An engine in its own process hears of a dead worker by this alone (s).
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20",
}
BLOCK_BYTES = 32 << 10
"""Of this model, in both layers, keys and values."""

DEVICE_BLOCKS = 24
"""The number of device blocks, so small that most hits are loaded from the host."""

IMPORTED = ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "kvsm.vllm")
"""So that no life has to."""

PROMPTS = 40
KNOWN = (0, 1, 2)
FEW = 6
"""Further prompts in a life of two ranks, which answer slowly where two cores are busy."""

TOKENS = 8
MOST_WAIT_S = 1.5
"""The latest moment of a kill after a life has begun to answer (s)."""


def prompt(number: int) -> list[int]:
    """Return a prompt of up to nine blocks. It shares its first two blocks with one prompt in four."""
    random = Random(number)
    shared = [(number % 4 * 61 + place) % 900 + 50 for place in range(64)]
    return shared + [random.randrange(50, 950) for _ in range(random.randrange(40, 230))]


def engine(model: str, ranks: int = 1, **more: Any) -> Any:
    """An engine in this process; two ranks have processes of their own."""
    from vllm import LLM

    if ranks > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        more |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    settings = {**SETTINGS, "num_gpu_blocks_override": DEVICE_BLOCKS, "disable_log_stats": True}
    return LLM(model, **settings, **more)


def answer(llm: Any, number: int) -> dict[str, Any]:
    """Return the engine's answer to a prompt, and the number of cached tokens."""
    from vllm import SamplingParams

    asked = {"prompt_token_ids": prompt(number)}
    (output,) = llm.generate([asked], SamplingParams(max_tokens=TOKENS, temperature=0), use_tqdm=False)
    return {
        "prompt": number,
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens or 0,
    }


def die_in_copy(which: int) -> None:
    """Let the thread that makes this copy, counted from 1, kill the process when half of it is done."""
    from kvsm.copies.rank_memory import NumpyPools

    real, copies = NumpyPools.copy, iter(range(1, which + 1))

    def copy(self: Any, direction: Any, device_blocks: Any, host_blocks: Any) -> None:
        if next(copies, None) == which:
            half = len(host_blocks) // 2
            real(self, direction, device_blocks[:half], host_blocks[:half])
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, direction, device_blocks, host_blocks)

    NumpyPools.copy = copy  # type: ignore[method-assign]


Say = Callable[[dict[str, Any]], None]


def fork(act: Callable[[Say], None]) -> tuple[int, int]:
    """Run this in a child. Returns its process id, and where its lines can be read."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        _live(act, writes)
    os.close(writes)
    return child, reads


def _live(act: Callable[[Say], None], writes: int) -> NoReturn:
    def say(line: dict[str, Any]) -> None:
        os.write(writes, (json.dumps(line) + "\n").encode())

    try:
        act(say)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def read_lines(child: int, reads: int, kill_after_s: float | None, said: Callable[[str], None]) -> int:
    """Pass on what a child writes until it ends. kill_after_s: after its first line. Returns its status."""
    kill_at, buffer = None, b""
    while True:
        ready, _, _ = select.select([reads], [], [], 0.01 if kill_at is not None else None)
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
            kill_at = kill_after_s = None
        data = os.read(reads, 1 << 16) if ready else None
        if data == b"":
            break
        if data and kill_after_s is not None and kill_at is None:
            kill_at = time.monotonic() + kill_after_s
        *lines, buffer = (buffer + (data or b"")).split(b"\n")
        for line in lines:
            said(line.decode())
    os.close(reads)
    return os.waitpid(child, 0)[1]


class Life(NamedTuple):
    """One life of the engine.

    which: the number of the copy in which it dies; None: it is killed from outside, or ends.
    ranks: the number of workers. With two, only one worker is killed, and its loss ends the engine.
    """

    number: int
    is_last: bool
    which: int | None
    seed: int
    ranks: int

    def live(self, model: str, transfer: dict[str, Any], say: Say) -> None:
        """Answer the known prompts, then others; the last life ends after some."""
        if self.which is not None:
            die_in_copy(self.which)
        llm = engine(model, self.ranks, kv_transfer_config=transfer)
        side = llm.llm_engine.engine_core.engine_core.scheduler.connector._side
        core, disk = side._core, side._disk
        kept = core.offloader if disk is None else disk.tier.disk
        differs = [] if disk is None else disk.last_log.told()
        say({"life": self.number, "kept": len(kept.ledger.index), "differs": differs})
        others = Random(self.seed)
        for number in KNOWN:
            say({"life": self.number, **answer(llm, number)})
        ends_itself = self.is_last or self.ranks > 1
        for _ in range(FEW if self.ranks > 1 else PROMPTS) if ends_itself else count():
            say({"life": self.number, **answer(llm, others.randrange(PROMPTS))})
        if not self.is_last:
            self._lose_worker(llm)
        if disk is not None:
            say({"life": self.number, "disk": disk.counts()})
        side.shutdown()

    def _lose_worker(self, llm: Any) -> NoReturn:
        """Kill one worker in the middle of its work, and end by its loss."""
        workers = llm.llm_engine.engine_core.engine_core.model_executor.workers
        victim = workers[self.seed % len(workers)].proc.pid
        Timer(self.seed % 100 / 1000, os.kill, (victim, signal.SIGKILL)).start()
        try:
            for number in count():
                answer(llm, number % PROMPTS)
        except Exception:
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("an engine goes on without one of its workers")


@click.command()
@click.option("--directory", required=True, help="Of the pool; it is made.")
@click.option("--lives", default=6, show_default=True, help="How many lives; the last one ends well.")
@click.option("--blocks", default=400, show_default=True, help="Blocks of the host pool.")
@click.option("--seed", default=0, show_default=True)
@click.option("--flip", is_flag=True, help="Flip a bit of each block of the pool after the first life.")
@click.option("--disk", default=0, show_default=True, help="Blocks of a disk tier; the pool is cold then.")
@click.option("--disk-write", default="through", show_default=True, help="When blocks go to it.")
@click.option("--keep-pool", is_flag=True, help="Keep the pool too, with a disk tier.")
@click.option("--ranks", default=1, show_default=True, help="Workers; of two, one is killed alone.")
def main(
    directory: str,
    lives: int,
    blocks: int,
    seed: int,
    flip: bool,
    disk: int,
    disk_write: str,
    keep_pool: bool,
    ranks: int,
) -> None:
    """Run an engine without kvsm, then the lives."""
    os.environ.update({**ENVIRONMENT, **QUIET})
    for module in IMPORTED:
        import_module(module)
    random = Random(seed)
    tier: dict[str, Any] = {"pool_dir": directory}
    if disk:
        size = DiskGeometry(BLOCK_BYTES // ranks, disk).file_bytes * ranks
        kept = tier if keep_pool else {"event_log": f"{directory}/logs"}
        tier = {"disk_dir": f"{directory}/disk", "disk_bytes": size, "disk_write": disk_write, **kept}
        Path(directory).mkdir()
    transfer = connector_config(cpu_bytes_to_use=blocks * BLOCK_BYTES, transfer_timeout_s=0, **tier)
    with tiny_model(LLAMA) as model:
        read_lines(*fork(partial(_reference, model)), None, click.echo)
        for number in range(1, lives + 1):
            is_last, dies_in_copy = number == lives, random.random() < 0.5 and ranks == 1
            which = random.randrange(1, 40) if dies_in_copy and not is_last else None
            life = Life(number, is_last, which, random.randrange(1 << 30), ranks)
            is_killed = not (is_last or dies_in_copy or ranks > 1)
            kill_after_s = random.random() * MOST_WAIT_S if is_killed else None
            status = read_lines(*fork(partial(life.live, model, transfer)), kill_after_s, click.echo)
            click.echo(json.dumps({"life": number, "status": status, "in_copy": which is not None}))
            if flip and number == 1:
                flip_bits(Path(directory) / "engine0-rank0", blocks)


def flip_bits(pool: Path, blocks: int) -> None:
    """Flip one bit of each block, at another place in each."""
    with open(pool, "r+b") as file:
        for block in range(blocks):
            place = block * BLOCK_BYTES + block * 7919 % BLOCK_BYTES
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << block % 8]))


def _reference(model: str, say: Say) -> None:
    llm = engine(model)
    for number in range(PROMPTS):
        say({"life": 0, **answer(llm, number)})


if __name__ == "__main__":
    main()
