"""vLLM's modes with kvsm's two connectors in a real engine: `modes` has the table of them.

In each mode an engine without offload gives the same answers, what must be found again is found in host
memory, and the event log verifies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from modes import COMMON, ENGINES, GRAMMARS, HOST_BYTES, MODEL, MODES, URGENT, Mode, Round, Served, Work
from scenes import run_session, search_path
from tiny_tokenizer import text_of, write_tokenizer
from workloads import TIMEOUT_S

from kvsm.core.log import LogReader
from kvsm.events import RequestPreempted
from kvsm.explain.story import verify_log
from kvsm.vllm.tiny_model import BLOCK_TOKENS, tiny_model
from kvsm.vllm.trial import Trial, connector_config, environment

NOTHING_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""vLLM compiles a part of its sampler for log-probabilities, which takes longer than these tests."""

ROUNDING = 1e-3
"""Two runs may batch their prompts differently, which changes a log-probability a little."""

FAST = ("whole prefills", "n-gram drafts", "pipeline parallel")
SLOW = ("asynchronous scheduling",)
"""Engines of the table."""

each_engine = pytest.mark.parametrize(
    "engine", [*FAST, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)

IN_TURNS = "resumable requests"

each_mode = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, id=mode.name, marks=[pytest.mark.slow] * (mode.engine in SLOW))
        for mode in MODES
        if mode.engine in (*FAST, *SLOW)
    ],
)


class Run(NamedTuple):
    """What an engine did: its rounds by mode. log: the parent of its event log."""

    rounds: dict[str, list[Served]]
    log: Path


class Runs:
    """Engines that run once each, also those that fail."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer = write_tokenizer(directory / "tokenizer")
        self._runs: dict[tuple[str, bool], Run | AssertionError] = {}

    def run(self, engine: str, offloads: bool = True) -> Run:
        """The run of an engine, with kvsm or without. Without kvsm it serves the rounds of every mode."""
        key = (engine, offloads)
        if key not in self._runs:
            try:
                self._runs[key] = self._serve(engine, offloads)
            except AssertionError as error:
                self._runs[key] = error
        run = self._runs[key]
        if isinstance(run, AssertionError):
            raise run
        return run

    def reference(self, mode: Mode) -> list[Served]:
        return self.run("whole prefills", offloads=False).rounds[mode.name]

    def _serve(self, name: str, offloads: bool) -> Run:
        engine, log = ENGINES[name], self._directory / f"log of {name}"
        modes = [mode for mode in MODES if mode.engine == name or not offloads]
        transfer = connector_config(cpu_bytes_to_use=HOST_BYTES, event_log=str(log))
        trial = Trial(
            engine={**COMMON, **engine.arguments, "tokenizer": self._tokenizer},
            model=dict(MODEL),
            kv_transfer=transfer if offloads else None,
        )
        rounds = [one for mode in modes for one in mode.rounds]
        work = Work(trial=trial, rounds=rounds, asynchronous=engine.asynchronous)
        answer = self._directory / "served.json"
        run_session(
            ["-c", f"import modes; modes.main({str(answer)!r})"],
            msgspec.json.encode(work),
            {**environment(ranks=engine.ranks), "PYTHONPATH": search_path(), **NOTHING_COMPILED},
            TIMEOUT_S,
        )
        served = iter(msgspec.json.decode(answer.read_bytes(), type=list[Served]))
        return Run({mode.name: [next(served) for _ in mode.rounds] for mode in modes}, log)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("modes"))


def mode_named(name: str) -> Mode:
    return next(mode for mode in MODES if mode.name == name)


def rounds_of(runs: Runs, mode: Mode) -> Iterator[tuple[Round, Served]]:
    yield from zip(mode.rounds, runs.run(mode.engine).rounds[mode.name])


def test_every_engine_serves_a_mode() -> None:
    assert {mode.engine for mode in MODES} == set(ENGINES) == {*FAST, *SLOW}
    assert len({mode.name for mode in MODES}) == len(MODES)


@each_mode
def test_answers_are_those_without_offload(runs: Runs, mode: Mode) -> None:
    """Tokens are equal in every round, and log-probabilities where they are wanted."""
    for ours, theirs in zip(runs.run(mode.engine).rounds[mode.name], runs.reference(mode)):
        for one, right in zip(ours.answers, theirs.answers, strict=True):
            assert one.choices == right.choices
            assert one.logprobs == pytest.approx(right.logprobs, abs=ROUNDING)


@each_mode
def test_hits_are_where_they_must_be(runs: Runs, mode: Mode) -> None:
    """Most of a prompt that is asked again is found, and the device alone could not hold it.

    A prompt that must not be found is computed whole. It is new, or has another salt, or its
    log-probabilities are wanted, or the engine has slept.
    """
    for number, (asked, served) in enumerate(rounds_of(runs, mode)):
        cached = [answer.cached for answer in served.answers]
        if asked.finds == "nothing":
            assert cached == [0] * len(cached), f"round {number}"
            assert served.from_host == 0, f"round {number}"
        if asked.finds == "host":
            whole = [answer.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS for answer in served.answers]
            assert sum(cached) > sum(whole) / 2, f"round {number}: {cached} of {whole}"
            assert served.from_host > sum(whole) / 4, f"round {number}: {served.from_host} of {whole}"


@each_engine
def test_the_log_verifies(runs: Runs, engine: str) -> None:
    (log,) = runs.run(engine).log.iterdir()
    found = verify_log(log)
    assert found.good, found
    assert found.condition.complete


# Each mode was in effect: without these, a mode that vLLM ignores would pass.


def test_without_offload_little_is_found(runs: Runs) -> None:
    """The hits above are kvsm's: of the same prompts the device alone keeps the last ones of a round.

    Where one prompt has several answers, they find it on the device, one after the other.
    """
    for mode in MODES:
        for asked, served in zip(mode.rounds, runs.reference(mode)):
            if asked.finds == "host" and "n" not in asked.asked[0].sampling:
                prompt_tokens = sum(answer.prompt_tokens for answer in served.answers)
                assert sum(answer.cached for answer in served.answers) < prompt_tokens / 2, mode.name


def test_several_answers_differ(runs: Runs) -> None:
    for served in runs.reference(mode_named("several answers")):
        assert all(len(answer.choices) == 3 for answer in served.answers)
        assert any(answer.choices[0] != answer.choices[1] for answer in served.answers)


def test_every_token_of_the_prompt_has_a_log_probability(runs: Runs) -> None:
    """A hit would leave out the tokens that it covers."""
    mode = mode_named("prompt log-probabilities")
    for asked, served in [*rounds_of(runs, mode)][:2]:
        for one, answer in zip(asked.asked, served.answers):
            assert len(answer.logprobs) == len(one.parts[0]) - 1 + len(answer.choices[0])


def test_a_session_is_found_again_without_the_token_that_it_dropped(runs: Runs) -> None:
    """Correct bytes: a block whose last token was replaced has the hash of what it holds now, and no block
    has the other hash."""
    mode = mode_named(IN_TURNS)
    *_, as_it_was, with_last = [served for _, served in rounds_of(runs, mode)]
    # The first six blocks are the first part's. The seventh would have ended with the token.
    assert [answer.cached for answer in as_it_was.answers] == [8 * BLOCK_TOKENS] * 2
    assert [answer.cached for answer in with_last.answers] == [6 * BLOCK_TOKENS] * 2


@pytest.mark.parametrize("name", ["structured output", "structured output with drafts"])
def test_answers_fit_their_grammar(runs: Runs, name: str) -> None:
    fitting: tuple[Any, ...] = (
        lambda text: re.fullmatch(GRAMMARS[0]["regex"], text),
        lambda text: json.loads(text)["a"] in ("x", "y"),
        lambda text: text in GRAMMARS[2]["choice"],
    )
    for served in runs.reference(mode_named(name)):
        for number, answer in enumerate(served.answers):
            text = text_of(answer.choices[0])
            assert fitting[number % len(fitting)](text), text


def test_the_least_urgent_are_preempted(runs: Runs) -> None:
    """By their names in the log: requests are preempted, and none of the most urgent ones."""
    mode = mode_named("priorities")
    priorities = {
        answer.name: one.priority
        for asked, served in rounds_of(runs, mode)
        for one, answer in zip(asked.asked, served.answers)
    }
    (log,) = runs.run(mode.engine).log.iterdir()
    names = [event.request for event in LogReader(log).events() if isinstance(event, RequestPreempted)]
    preempted = [priorities[name.partition("-")[0]] for name in names if name.partition("-")[0] in priorities]
    assert preempted
    assert URGENT not in preempted


def test_drafts_were_made(runs: Runs) -> None:
    for _, served in rounds_of(runs, mode_named("n-gram drafts")):
        assert served.drafted > 0


def test_sleep_mode_that_frees_memory_is_refused_on_a_cpu() -> None:
    """vLLM says so at start-up. If it no longer does, this mode is to be run as well."""
    from vllm.config import ModelConfig
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        pytest.skip("this platform has a sleep mode")
    with tiny_model() as model, pytest.raises(ValueError, match="Sleep mode is not supported"):
        ModelConfig(model=model, skip_tokenizer_init=True, enable_sleep_mode=True)
