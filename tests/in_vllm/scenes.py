"""Disturbances of a real vLLM engine, step by step, in its own process. Scenes report facts, and tests judge
them.

`play` runs this module's `main` in a new process. There engine, scheduler and connector share one process, so
a scene can inspect them between two steps. A scene decides when copies run (`faulty_connectors`): nothing
depends on time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import msgspec
from engine_forks import begin

from kvsm.core.ledger.invariants import check_ledger, check_rest
from kvsm.core.ledger.snapshot import digest
from kvsm.events import Direction
from kvsm.vllm.tiny_model import BLOCK_TOKENS, GEMMA, LLAMA, VOCABULARY, tiny_model
from kvsm.vllm.trial import Trial, connector_config, environment, make_engine, run_trial

MODELS: Mapping[str, Mapping[str, Any]] = {"llama": LLAMA, "gemma": GEMMA}

MAX_TOKENS = 8

POOL: Mapping[str, Any] = {"num_gpu_blocks_override": 128}
"""Arguments of the engine, with slightly more device blocks than all prompts need together."""

HOST_BYTES = 1 << 25

MOST_STEPS = 200
"""Every scene settles in about 20 steps."""


def prompt(number: int) -> list[int]:
    """Return a prompt of a bit more than six blocks, different for each number."""
    random = Random(f"prompt {number}")
    return [random.randrange(3, VOCABULARY) for _ in range(212)]


PROMPTS = [prompt(number) for number in range(12)]


@cache
def expected(model: str) -> list[list[int]]:
    """Return the answers of an engine without offload to `PROMPTS`."""
    plain = Trial(rounds=[PROMPTS], max_tokens=MAX_TOKENS, model=dict(MODELS[model]), engine=dict(POOL))
    return run_trial(plain).tokens


def steered(
    load_failure: str = "recompute", name: str = "SteeredConnector", **options: Any
) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for a connector of `faulty_connectors`."""
    given = connector_config(load_failure, **{"cpu_bytes_to_use": HOST_BYTES, **options})
    return {**given, "kv_connector": name, "kv_connector_module_path": "faulty_connectors"}


def spec_config(name: str = "RecordingSpec", **options: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for its OffloadingConnector with a spec of kvsm."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": name, "spec_module_path": "kvsm.vllm", **options},
    }


def steered_spec(name: str, **options: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for its OffloadingConnector over a spec of `faulty_connectors`."""
    given = {"cpu_bytes_to_use": HOST_BYTES, **options}
    return spec_config(name, **given, spec_module_path="faulty_connectors")


def search_path() -> str:
    """The PYTHONPATH with which an engine's processes find `faulty_connectors` and what it imports."""
    here = Path(__file__).resolve().parent
    return os.pathsep.join([str(here), str(here.parent / "support"), os.environ.get("PYTHONPATH", "")])


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The report of the scenes.

    answers: (number of the prompt, tokens, why it ended) of each request that was not aborted.
    cached: for each of these requests, the number of prompt tokens that were not computed.
    facts: values that scenes have noted, by name.
    left: the resources that a scene did not release; empty if it released all.
    digest: the digest of the ledger at the very end.
    """

    answers: list[tuple[int, list[int], str]]
    cached: list[int]
    facts: dict[str, Any]
    left: list[str]
    digest: str


def play(
    scenes: Sequence[str], log: Path, *, model: str = "llama", timeout_s: float = 300, **given: Any
) -> Told:
    """Run these scenes one after the other on one engine.

    log: the parent of its event log.
    """
    transfer = steered(given.pop("load_failure", "recompute"), event_log=str(log), **given)
    trial = Trial(
        rounds=[], max_tokens=MAX_TOKENS, kv_transfer=transfer, model=dict(MODELS[model]), engine=dict(POOL)
    )
    with TemporaryDirectory(prefix="kvsm-scene-") as directory:
        answer = Path(directory) / "told.json"
        run_session(
            ["-c", f"import scenes; scenes.main({str(answer)!r}, {list(scenes)!r})"],
            msgspec.json.encode(trial),
            {**environment(), "PYTHONPATH": search_path()},
            timeout_s,
        )
        return msgspec.json.decode(answer.read_bytes(), type=Told)


def run_session(
    arguments: Sequence[str], given: bytes, settings: Mapping[str, str], timeout_s: float
) -> None:
    """Run a program to its end. A timeout kills its whole session: vLLM's workers outlive a killed parent.

    arguments: of Python. given: its input. settings: its environment.
    Raises `AssertionError` with the last lines of its output if it fails.
    """
    with TemporaryFile() as asked, TemporaryFile() as said:
        asked.write(given)
        asked.seek(0)
        process = begin(arguments, settings, stdin=asked, stdout=said, stderr=said)
        try:
            status = process.wait(timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        said.seek(0)
        last = "\n".join(said.read().decode(errors="replace").splitlines()[-60:])
        assert status == 0, f"exit code {status}:\n{last}"


def main(answer: str, scenes: Sequence[str]) -> None:
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    with tiny_model(trial.model) as model:
        stage = Stage(make_engine(model, trial))
        for name in scenes:
            SCENES[name](stage)
        ledger = stage.ledger
        stage.engine.engine_core.shutdown()
    told = Told(
        answers=stage.answers, cached=stage.cached, facts=stage.facts, left=stage.left, digest=digest(ledger)
    )
    Path(answer).write_bytes(msgspec.json.encode(told))


class Stage:
    """A vLLM engine that runs step by step, with both of kvsm's sides in it."""

    def __init__(self, llm: Any) -> None:
        from faulty_connectors import SteeredConnector

        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.ledger = self.scheduler.connector._side._core.offloader.ledger
        self.copies = SteeredConnector.copies
        self.answers: list[tuple[int, list[int], str]] = []
        self.cached: list[int] = []
        self.facts: dict[str, Any] = {}
        self.left: list[str] = []
        self._asked: dict[str, int] = {}
        """Request -> number of its prompt."""
        pool = self.scheduler.kv_cache_manager.block_pool
        self.free_blocks: Callable[[], int] = pool.get_num_free_blocks
        self._all_blocks = self.free_blocks()

    def ask(self, *numbers: int, more: int = 0) -> list[str]:
        """Add requests with these prompts, each with this number of output tokens. Returns their names."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        names = []
        for number in numbers:
            names.append(f"{len(self._asked)}")
            self._asked[names[-1]] = number
            self.engine.add_request(names[-1], {"prompt_token_ids": PROMPTS[number] + more * [3]}, greedy)
        return names

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.step():
                if output.finished:
                    ended = output.outputs[0]
                    number = self._asked[output.request_id]
                    self.answers.append((number, list(ended.token_ids), str(ended.finish_reason)))
                    self.cached.append(output.num_cached_tokens or 0)

    def settle(self) -> int:
        """Step until no request and no copy is left. Returns how many steps it took."""
        for steps in range(MOST_STEPS):
            if not self.scheduler.has_requests():
                return steps
            self.step()
        raise AssertionError(f"after {MOST_STEPS} steps there is still work: {self.scheduler.requests}")

    def serve(self, *numbers: int) -> list[int]:
        """Serve these prompts, and settle. Returns the cached tokens of each, in the order in which they
        ended."""
        before = len(self.cached)
        self.ask(*numbers)
        self.settle()
        return self.cached[before:]

    def only_the_host_knows(self, *numbers: int) -> None:
        """Store these prompts, and let the device forget them."""
        self.serve(*numbers)
        self.settle()
        assert self.engine.reset_prefix_cache(), "blocks are held, although nothing is in flight"

    def hold(self, *directions: Direction) -> None:
        self.copies.held = set(directions)

    def go_on(self) -> None:
        """Release the held copies, and hold no more."""
        self.copies.held, self.copies.failing = set(), set()
        self.copies.release()

    def loading(self) -> int:
        """Return the number of requests that wait for their load."""
        return sum(
            request.status.name == "WAITING_FOR_REMOTE_KVS" for request in self.scheduler.requests.values()
        )

    def note(self, name: str, fact: Any) -> None:
        self.facts.setdefault(name, []).append(fact)

    def end_of(self, scene: str) -> None:
        """Return the resources that a scene has not released."""
        self.go_on()
        self.settle()
        broken = check_ledger(self.ledger) + check_rest(self.ledger)
        self.left += [f"{scene}: {violation.property}: {violation.message}" for violation in broken]
        if self.free_blocks() != self._all_blocks:
            self.left.append(f"{scene}: {self._all_blocks - self.free_blocks()} device blocks are not free")
        if self.scheduler.requests:
            self.left.append(f"{scene}: requests {list(self.scheduler.requests)}")


def abort_in_mid_load(stage: Stage) -> None:
    """Abort two of four requests, one of them twice. Its prompt is sent again while its load is still
    held."""
    stage.only_the_host_knows(0, 1, 2, 3)
    stage.hold(Direction.LOAD)
    first, second, *_ = stage.ask(0, 1, 2, 3)
    stage.step(2)
    stage.note("loading", stage.loading())
    stage.engine.abort_request([first])
    stage.engine.abort_request([second, first])
    stage.step()
    stage.note("loading after two aborts", stage.loading())
    stage.note("blocks held after two aborts", stage._all_blocks - stage.free_blocks())
    stage.ask(0)
    stage.step(2)
    stage.go_on()
    stage.settle()
    stage.end_of("abort in mid-load")


def abort_all_in_mid_load(stage: Stage) -> None:
    """Abort all requests during their loads: no request is left that waits for them."""
    stage.only_the_host_knows(0, 1, 2, 3)
    stage.hold(Direction.LOAD)
    names = stage.ask(0, 1, 2, 3)
    stage.step()
    stage.engine.abort_request(names)
    stage.step()
    stage.note("requests while aborted loads run", len(stage.scheduler.requests))
    stage.end_of("abort all in mid-load")


def abort_before_the_load_fails(stage: Stage) -> None:
    """Let two loads fail, and abort one of the requests before the failure is reported."""
    stage.only_the_host_knows(4, 5)
    stage.hold(Direction.LOAD)
    stage.copies.failing = {Direction.LOAD}
    aborted, _ = stage.ask(4, 5)
    stage.step()
    stage.engine.abort_request([aborted])
    stage.step()
    stage.end_of("abort before the load fails")


def abort_when_the_load_has_ended(stage: Stage) -> None:
    """Abort a request whose load, good or bad, has ended, before vLLM has scheduled it again, or has received
    the end."""
    for failing in (set(), {Direction.LOAD}):
        stage.only_the_host_knows(0, 1)
        stage.copies.failing = failing
        aborted, _ = stage.ask(0, 1)
        stage.step()
        stage.note("waiting, with no copy in flight", (stage.loading(), len(stage.ledger.transfers)))
        stage.engine.abort_request([aborted])
        stage.end_of("abort when the load has ended")


def reset_under_load(stage: Stage) -> None:
    """Twice: reset the whole cache while some requests load and the blocks of another one are stored."""
    for new in (6, 7):
        stage.only_the_host_knows(0, 1, 2, 3)
        stage.hold(Direction.LOAD, Direction.STORE)
        stage.ask(0, 1, 2, 3, new)
        stage.step(3)
        stage.note("loading at the reset", stage.loading())
        stage.note("drained at once", _reset(stage))
        stage.step()
        # vLLM's answer above is False, whatever kvsm's is: blocks are held.
        stage.note("drained while held", stage.scheduler.reset_connector_cache())
        stage.go_on()
        stage.settle()
        stage.note("drained at last", _reset(stage))
        stage.note("cached after the reset", stage.serve(0, 1, 2, 3, new))
        stage.end_of("reset under load")


def _reset(stage: Stage, **how: bool) -> bool:
    return bool(stage.engine.reset_prefix_cache(reset_connector=True, **how))


def reset_running_requests(stage: Stage) -> None:
    """Reset the caches with `reset_running_requests`: running requests lose their blocks, and start again.

    vLLM refuses the reset while a copy holds a block. By then it has preempted the requests; it continues.
    """
    stage.ask(0, 1, 7)
    stage.step(3)
    stage.note("reset while running", _reset(stage, reset_running_requests=True))
    stage.settle()
    stage.hold(Direction.STORE)
    stage.ask(8, 9)
    stage.step(3)
    try:
        _reset(stage, reset_running_requests=True)
    except RuntimeError as error:
        stage.note("refused", str(error))
    stage.step()
    stage.end_of("reset running requests")


def sleep(stage: Stage) -> None:
    """Put the engine to sleep. On a CPU, vLLM frees no memory: it only resets its caches and kvsm's."""
    stage.only_the_host_knows(0, 1)
    stage.note("cached before sleep", stage.serve(0, 1))
    stage.engine.sleep(level=1)
    stage.note("asleep", stage.engine.is_sleeping())
    stage.engine.wake_up()
    stage.note("asleep after waking", stage.engine.is_sleeping())
    stage.note("cached after sleep", stage.serve(0, 1))
    stage.end_of("sleep")


def pause(stage: Stage) -> None:
    """Sleep at level 0: requests wait. A load in flight ends meanwhile, and is used afterwards."""
    stage.only_the_host_knows(2, 3)
    stage.hold(Direction.LOAD)
    stage.ask(2, 3)
    stage.step()
    stage.engine.sleep(level=0, mode="keep")
    stage.go_on()
    before = len(stage.answers)
    stage.step(2 * MAX_TOKENS)
    stage.note("answers while paused", len(stage.answers) - before)
    stage.engine.wake_up(tags=["scheduling"])
    stage.end_of("pause")


def fail_loads(stage: Stage) -> None:
    """Let every load of stored prompts fail. Then serve the same prompts again, with good copies."""
    numbers: Iterable[int] = range(6)
    stage.only_the_host_knows(*numbers)
    stage.copies.failing = {Direction.LOAD}
    stage.ask(*numbers)
    stage.note("steps with failed loads", stage.settle())
    stage.copies.failing = set()
    assert stage.engine.reset_prefix_cache()
    stage.note("cached after failed loads", stage.serve(*numbers))
    stage.end_of("fail loads")


def serve_once(stage: Stage) -> None:
    """Serve a prompt whose last step completes a block, without any step after the answer."""
    more = (1 - MAX_TOKENS - len(PROMPTS[0])) % BLOCK_TOKENS
    stage.ask(0, more=more)
    while not stage.answers:
        stage.step()
    # The last token has no KV cache.
    stage.note("full blocks", (len(PROMPTS[0]) + more + MAX_TOKENS - 1) // BLOCK_TOKENS)
    stage.note("in flight after the last answer", len(stage.ledger.transfers))
    readable = [slot for slot in stage.ledger.index.values() if stage.ledger.readable(slot)]
    stage.note("blocks on the host", len(readable))
    stage.end_of("serve once")


def shut_down_in_mid_copy(stage: Stage) -> None:
    """Shut the engine down with loads and stores in flight. This is the last scene."""
    stage.only_the_host_knows(0, 1)
    stage.hold(Direction.LOAD, Direction.STORE)
    stage.ask(0, 1, 10)
    stage.step(3)
    live = stage.ledger.transfers.values()
    stage.note("in flight at shutdown", sorted({transfer.direction.name for transfer in live}))


DISTURBANCES = (
    abort_in_mid_load,
    abort_all_in_mid_load,
    abort_before_the_load_fails,
    abort_when_the_load_has_ended,
    reset_under_load,
    reset_running_requests,
    sleep,
    pause,
    fail_loads,
    shut_down_in_mid_copy,
)
"""In this order on one engine. The last one shuts it down. All answers are to the prompts as they are."""

SCENES: Mapping[str, Callable[[Stage], None]] = {
    scene.__name__: scene for scene in (*DISTURBANCES, serve_once)
}
