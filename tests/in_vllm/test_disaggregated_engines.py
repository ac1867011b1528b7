"""Disaggregated prefill with two real engines in two processes: one engine gives the same answers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from paired_engines import PairedEngine, paired_engine

from kvsm.core.log import LogReader
from kvsm.events import LoadPlanned, OffloadingEvent, RequestFinished, StorePlanned
from kvsm.explain.story import verify_log
from kvsm.ids import to_list
from kvsm.vllm.tiny_model import BLOCK_TOKENS, tiny_model
from kvsm.vllm.trial import connector_config, environment

PROMPTS = [[10 + number] * 70 + list(range(30 * number, 30 * number + 50)) for number in range(4)]
REMOTE, TOKENS = {"do_remote_decode": True}, 8
READY_S = 900
"""How long two servers may take to start (s): two minutes, on a machine that does nothing else."""


def full(prompt: list[int]) -> int:
    """The blocks that a hit may have: one token is left to compute (S18)."""
    return (len(prompt) - 1) // BLOCK_TOKENS


def verified(notes: Path) -> list[OffloadingEvent]:
    """The events of an engine's log, which verifies."""
    [log] = (notes / "log").iterdir()
    found = verify_log(log)
    assert found.good, found
    return [event for segment in LogReader(log).segments() for event in segment.events()]


def hand_overs(events: list[OffloadingEvent]) -> list[bool]:
    """Of each hand-over of a prefill engine whether it was aborted."""
    ended = [
        one for one in events if isinstance(one, RequestFinished) and one.request.startswith("hand-over-")
    ]
    return [one.aborted for one in ended]


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A directory on tmpfs. Its name is short, as the path of a socket must be."""
    directory = Path("/dev/shm", f"kvsm-test-{os.getpid()}")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_engines_answer_as_one(tmp_path: Path, shared_memory: Path, ranks: int) -> None:
    """The decode engine loads every full block, and computes none of them. Then the prefill engine is killed
    with a hand-over out: its request is computed, and one line says so."""
    directory = shared_memory
    with tiny_model() as model, ExitStack() as stack:
        started: list[PairedEngine] = [
            stack.enter_context(paired_engine(model, role, tmp_path / role, ranks, directory))
            for role in ("kv_producer", "kv_consumer")
        ]
        for engine in started:
            engine.wait()
        prefill, decode = started
        *taken, late = PROMPTS
        asked = prefill.serve(taken, 1, [REMOTE] * len(taken))
        answers = decode.serve(taken, TOKENS, [one.handed for one in asked])
        alone = prefill.serve(PROMPTS, TOKENS, [None] * len(PROMPTS))
        assert [one.tokens for one in answers] == [one.tokens for one in alone[:-1]]
        [asked_late] = prefill.serve([late], 1, [REMOTE])
        prefill.kill()
        [answer] = decode.serve([late], TOKENS, [asked_late.handed])
        assert answer.tokens == alone[-1].tokens
        decode.end()
        said = decode.said.read_text()
        assert said.count("computes its prompt: nothing was handed over by engine") == 1
        assert sorted(one.suffix for one in directory.iterdir()) == sorted([".pool"] * ranks + [".sock"])
    assert hand_overs(verified(tmp_path / "kv_producer"))[: len(taken)] == [False] * len(taken)
    # vLLM tells the client what the prefill engine had cached, so the log says what was loaded here.
    decoded = verified(tmp_path / "kv_consumer")
    wanted = [full(prompt) for prompt in taken]
    assert [len(to_list(one.slots)) for one in decoded if isinstance(one, LoadPlanned)] == wanted
    assert [len(one.keys) for one in decoded if isinstance(one, StorePlanned) and one.source] == wanted


# Over HTTP.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(model: str, port: int, role: str, directory: Path, log: Path) -> list[str]:
    transfer = connector_config(
        cpu_bytes_to_use=1 << 22, event_log=str(log), hand_over_directory=str(directory)
    )
    options = {
        "model": model,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "block-size": BLOCK_TOKENS,
        "max-model-len": 512,
        "dtype": "float32",
        "num-gpu-blocks-override": 40,
        "kv-transfer-config": json.dumps(transfer | {"kv_role": role}),
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*program, "--skip-tokenizer-init", "--enforce-eager", *flags]


def complete(port: int, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"return_token_ids": True} | options).encode()
    address = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def kill_all(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        assert process.poll() is None, "the server has ended"
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        time.sleep(0.5)
    raise AssertionError("the server is not ready")


@pytest.mark.slow
def test_clients_of_the_proxy_are_answered_as_by_one_server(tmp_path: Path, shared_memory: Path) -> None:
    """vLLM's own servers and the proxy of the examples, started as the page says. A request that the decode
    server rejects gives its hand-over up."""
    ports = {role: free_port() for role in ("kv_producer", "kv_consumer")}
    proxy, running = free_port(), []
    with tiny_model() as model, ExitStack() as stack:
        for role, port in ports.items():
            said = stack.enter_context((tmp_path / f"{role}.said").open("wb"))
            running.append(
                subprocess.Popen(
                    server(model, port, role, shared_memory, tmp_path / role / "log"),
                    env=environment(in_process=False),
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            stack.callback(kill_all, running[-1])
        address = [f"--{name}=127.0.0.1:{port}" for name, port in zip(("prefill", "decode"), ports.values())]
        program = Path(__file__).parents[2] / "examples" / "disaggregated_proxy.py"
        between = subprocess.Popen([sys.executable, str(program), *address, f"--port={proxy}"])
        stack.callback(between.kill)
        for port, process in zip(ports.values(), running):
            wait_for(port, process)
        prefill_port, decode_port = ports.values()
        for prompt in PROMPTS[:3]:
            with_proxy = complete(proxy, prompt)["choices"][0]["token_ids"]
            assert with_proxy == complete(prefill_port, prompt)["choices"][0]["token_ids"]
        handed = complete(prefill_port, PROMPTS[3], max_tokens=1, kv_transfer_params=REMOTE)
        with pytest.raises(urllib.error.HTTPError):
            complete(decode_port, PROMPTS[3], max_tokens=-1, kv_transfer_params=handed["kv_transfer_params"])
        # A step of the prefill engine releases what was taken.
        complete(prefill_port, PROMPTS[0])
        for process in running:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    taken = hand_overs(verified(tmp_path / "kv_producer"))
    assert taken[:3] == [False] * 3
    decoded = verified(tmp_path / "kv_consumer")
    assert sum(isinstance(one, StorePlanned) and bool(one.source) for one in decoded) == 3
