"""vLLM's modes in a real engine: a table with one row a mode, and what runs in the engine's process.

A mode is a kind of request, such as one with log-probabilities of the prompt, or a setting of an engine, such
as two pipeline stages. Each row has rounds of requests, and says which of them find their prompts in a cache.
Rows that need the same engine share it. Modes have different prompts, so no mode causes hits in another.

One engine without offload serves all rounds. The answers of every other engine are compared with its answers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec

from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA, VOCABULARY, tiny_model
from kvsm.vllm.trial import SHUTDOWN_S, Prompt, Trial, make_engine

MODEL: Mapping[str, Any] = {**LLAMA, "num_hidden_layers": 3}
"""Two pipeline stages get different numbers of layers."""

MAX_TOKENS = 8

REQUESTS, PROMPT_TOKENS = 6, 6 * BLOCK_TOKENS + 20

HOST_BYTES = 64 << 20

COMMON: Mapping[str, Any] = {
    "num_gpu_blocks_override": 30,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "skip_tokenizer_init": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
"""Arguments of every engine. An answer in JSON has no whitespace, so that it ends in time.

The device holds four of the six requests of a round, so a prompt of the round before can only be found in
host memory.
"""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    parts: its prompt. A session has several: each is asked when the one before is answered.
    after: the number of a session that was served, whose tokens are the prompt.
    with_last: whether that prompt keeps the last token of each answer. A session has dropped it.
    sampling: arguments of vLLM's `SamplingParams`. Without any, the answer is greedy.
    """

    parts: list[Prompt] = []
    after: int | None = None
    with_last: bool = False
    sampling: dict[str, Any] = {}
    priority: int = 0
    salt: str | None = None


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are served together.

    finds: where the prompts are found: on the `host`; `nothing`: nowhere; `any`: partly on the device, too.
    sleep: the level at which the engine sleeps before the round, and wakes up again. 0: it does not sleep.
    """

    asked: list[Asked]
    finds: Literal["host", "nothing", "any"]
    sleep: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request.

    name: the request's name, without the suffix that vLLM adds.
    choices: the tokens of each answer, or of each turn of a session.
    logprobs: of all prompt tokens but the first, and of the first choice's tokens, if requested.
    prompt_tokens: the length of its prompt, or of the first part.
    cached: the number of these tokens that were not computed.
    """

    name: str
    prompt_tokens: int
    choices: list[list[int]]
    logprobs: list[float]
    cached: int


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A round that was served. from_host: prompt tokens that were loaded. drafted: tokens of drafts."""

    answers: list[Answer]
    from_host: int
    drafted: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one engine, and the rounds that it serves.

    asynchronous: whether the next step is scheduled while a step computes. vLLM's CPU platform switches this
        off, whatever its arguments say, and here it is switched on again.
    """

    trial: Trial
    rounds: list[Round]
    asynchronous: bool = False


class Engine(NamedTuple):
    """A way to run an engine: arguments of vLLM's `LLM`, and how many processes compute."""

    arguments: Mapping[str, Any]
    ranks: int = 1
    asynchronous: bool = False


ENGINES: Mapping[str, Engine] = {
    "whole prefills": Engine({"scheduling_policy": "priority", "enable_chunked_prefill": False}),
    "n-gram drafts": Engine(
        {
            "max_num_batched_tokens": 128,
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 2,
            },
        }
    ),
    # vLLM makes the buffers between two stages when it warms up, and on a CPU it does not warm up an engine
    # that compiles nothing: such an engine ends at the first request. The tests switch off what compiles.
    "pipeline parallel": Engine(
        {
            "pipeline_parallel_size": 2,
            "max_num_batched_tokens": 128,
            "enforce_eager": False,
            "compilation_config": {"mode": 2, "backend": "eager"},
        },
        ranks=2,
    ),
    "asynchronous scheduling": Engine({"max_num_batched_tokens": 128}, asynchronous=True),
}
"""All engines but the first split prefills."""


class Mode(NamedTuple):
    """A row. engine: its name in `ENGINES`."""

    name: str
    rounds: tuple[Round, ...]
    engine: str = "whole prefills"


def prompts(mode: str, number: int = REQUESTS, tokens: int = PROMPT_TOKENS) -> list[Prompt]:
    """Return prompts without common prefixes, also with the prompts of other modes."""
    random = Random(f"prompts of {mode}")
    return [[random.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(number)]


def ask(mode: str, *, salt: str | None = None, **sampling: Any) -> list[Asked]:
    """Return a request for every prompt of the mode, with these settings."""
    return [Asked(parts=[prompt], sampling=sampling, salt=salt) for prompt in prompts(mode)]


def twice(mode: str, **sampling: Any) -> tuple[Round, ...]:
    """Return two rounds of the same requests."""
    asked = ask(mode, **sampling)
    return Round(asked=asked, finds="nothing"), Round(asked=asked, finds="host")


GRAMMARS: Sequence[Mapping[str, Any]] = (
    {"regex": "[a-f]{3}-[0-9]{2,12}(yes|no)"},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"enum": ["x", "y"]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
    {"choice": ["alpha", "beta"]},
)

IN_GRAMMAR: Mapping[str, Any] = {"ignore_eos": False, "max_tokens": 24}


def in_grammars(mode: str) -> list[Asked]:
    """Return the prompts, each with one of the grammars for its answer."""
    return [
        Asked(parts=[prompt], sampling={**IN_GRAMMAR, "structured_outputs": GRAMMARS[n % len(GRAMMARS)]})
        for n, prompt in enumerate(prompts(mode))
    ]


def with_logprobs() -> tuple[Round, ...]:
    """vLLM computes a prompt whose log-probabilities are requested, even if it is cached. Its blocks are
    stored for other requests."""
    name = "prompt log-probabilities"
    wanted, plain = ask(name, prompt_logprobs=1, logprobs=1), ask(name)
    return (
        Round(asked=wanted, finds="nothing"),
        Round(asked=wanted, finds="nothing"),
        Round(asked=plain, finds="host"),
    )


def with_salts() -> tuple[Round, ...]:
    """The same prompt with another salt, or with none, finds no block."""
    name = "cache salts"
    first, second = ask(name, salt="of one client"), ask(name, salt="of another client")
    return (
        Round(asked=first, finds="nothing"),
        Round(asked=second, finds="nothing"),
        Round(asked=first, finds="host"),
        Round(asked=second, finds="host"),
        Round(asked=ask(name), finds="nothing"),
    )


URGENT = 0
"""The most urgent priority."""


def with_priorities() -> tuple[Round, ...]:
    """Long answers, for which the device has no room: the least urgent requests are preempted."""
    asked = [
        Asked(parts=[prompt], sampling={"max_tokens": 48}, priority=URGENT + n % 3)
        for n, prompt in enumerate(prompts("priorities"))
    ]
    return Round(asked=asked, finds="any"), Round(asked=asked, finds="host")


def with_sleep(level: int) -> tuple[Round, ...]:
    """No block from before a sleep is matched after it, because the weights may have changed."""
    asked = ask(f"sleep, level {level}")
    return (
        Round(asked=asked, finds="nothing"),
        Round(asked=asked, finds="host"),
        Round(asked=asked, finds="nothing", sleep=level),
        Round(asked=asked, finds="host"),
    )


def in_turns() -> tuple[Round, ...]:
    """Sessions whose second part takes the place of the last token that was sampled.

    That token would have filled a block, so the block gets another hash. Then other requests need the device,
    and what the sessions have said is asked as one prompt: first as it was, then with that token in it.
    """
    random = Random("sessions")
    first = prompts("resumable requests", 2, 7 * BLOCK_TOKENS - MAX_TOKENS)
    second = [[random.randrange(3, VOCABULARY) for _ in range(BLOCK_TOKENS + 9)] for _ in first]
    sessions = range(len(first))
    return (
        Round(asked=[Asked(parts=list(parts)) for parts in zip(first, second)], finds="nothing"),
        Round(asked=ask("what is asked between sessions"), finds="nothing"),
        Round(asked=[Asked(after=number) for number in sessions], finds="host"),
        Round(asked=[Asked(after=number, with_last=True) for number in sessions], finds="any"),
    )


def several(mode: str) -> tuple[Round, ...]:
    """Several answers of each prompt. The second answer finds its prompt on the device."""
    asked = ask(mode, n=3, temperature=2.0, seed=7)
    return Round(asked=asked, finds="any"), Round(asked=asked, finds="host")


MODES = (
    Mode("whole prefills", twice("whole prefills")),
    Mode("several answers", several("several answers")),
    Mode("prompt log-probabilities", with_logprobs()),
    Mode("cache salts", with_salts()),
    Mode(
        "structured output",
        (
            Round(asked=in_grammars("structured output"), finds="nothing"),
            Round(asked=in_grammars("structured output"), finds="host"),
        ),
    ),
    Mode("priorities", with_priorities()),
    Mode("sleep, level 1", with_sleep(1)),
    Mode("sleep, level 2", with_sleep(2)),
    Mode("resumable requests", in_turns()),
    Mode("n-gram drafts", twice("n-gram drafts", max_tokens=24), "n-gram drafts"),
    Mode(
        "structured output with drafts",
        (
            Round(asked=in_grammars("structured output with drafts"), finds="nothing"),
            Round(asked=in_grammars("structured output with drafts"), finds="host"),
        ),
        "n-gram drafts",
    ),
    Mode("pipeline parallel", twice("pipeline parallel"), "pipeline parallel"),
    Mode("asynchronous scheduling", twice("asynchronous scheduling"), "asynchronous scheduling"),
)


# In the engine's process.


def main(answer: str) -> None:
    """Serve the work on stdin, and write what was served to this file."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    if work.asynchronous:
        _schedule_asynchronously()
    with tiny_model(work.trial.model) as model:
        llm = make_engine(model, work.trial)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert isinstance(scheduler, AsyncScheduler) == work.asynchronous
        served = [_serve(llm, one) for one in work.rounds]
        llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_S)
    Path(answer).write_bytes(msgspec.json.encode(served))


def _schedule_asynchronously() -> None:
    from vllm.platforms.cpu import CpuPlatform

    theirs = CpuPlatform.check_and_update_config

    def ours(_platform: type, vllm_config: Any) -> None:
        theirs(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(ours)


def _serve(llm: Any, one: Round) -> Served:
    if one.sleep:
        llm.sleep(level=one.sleep)
        assert llm.llm_engine.is_sleeping()
        llm.wake_up()
    before = _counted(llm)
    sessions = [asked for asked in one.asked if len(asked.parts) > 1]
    answers = [_converse(llm, asked) for asked in sessions] or _generate(llm, one.asked)
    now = _counted(llm)
    return Served(answers=answers, from_host=now[0] - before[0], drafted=now[1] - before[1])


def _counted(llm: Any) -> tuple[int, int]:
    """Return (prompt tokens from host memory, tokens of drafts), since the engine's start."""
    host = drafted = 0
    for metric in llm.get_metrics():
        if metric.name == "vllm:prompt_tokens_cached_by_source" and metric.labels["source"] == "host":
            host += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            drafted += metric.value
    return int(host), int(drafted)


def _sampling(asked: Asked, **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **asked.sampling, **more}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)


def _generate(llm: Any, asked: Sequence[Asked]) -> list[Answer]:
    outputs = llm.generate(
        [
            {"prompt_token_ids": _prompt(one), **({"cache_salt": one.salt} if one.salt else {})}
            for one in asked
        ],
        [_sampling(one) for one in asked],
        priority=[one.priority for one in asked],
        use_tqdm=False,
    )
    return [
        Answer(
            name=output.request_id,
            choices=[list(choice.token_ids) for choice in output.outputs],
            logprobs=_logprobs(output),
            prompt_tokens=len(output.prompt_token_ids),
            cached=output.num_cached_tokens or 0,
        )
        for output in outputs
    ]


def _logprobs(output: Any) -> list[float]:
    if output.prompt_logprobs is None:
        return []
    told = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    tokens = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
    return [of_place[token].logprob for of_place, token in zip(told, tokens)]


_SAID: list[tuple[Prompt, Prompt]] = []
"""The tokens of each session that was served, without and with the token that it has dropped."""


def _prompt(asked: Asked) -> Prompt:
    return asked.parts[0] if asked.after is None else _SAID[asked.after][asked.with_last]


def _converse(llm: Any, asked: Asked) -> Answer:
    """A session as vLLM's asynchronous front end makes it of streamed input: one request, part after part."""
    from vllm.sampling_params import RequestOutputKind

    engine, name = llm.llm_engine, f"session {len(_SAID)}"
    sampling = _sampling(asked, output_kind=RequestOutputKind.DELTA)

    def send(part: Prompt, resumable: bool) -> None:
        request = engine.input_processor.process_inputs(
            name, {"prompt_token_ids": part}, sampling, engine.get_supported_tasks(), resumable=resumable
        )
        request.external_req_id = name
        # Both sides extend this list, and a core in another process has its own.
        engine.output_processor.add_request(deepcopy(request), None)
        engine.engine_core.add_request(request)

    turns: list[list[int]] = []
    cached = 0
    for part in asked.parts:
        send(list(part), resumable=True)
        turns.append([])
        while len(turns[-1]) < sampling.max_tokens:
            for output in engine.step():
                turns[-1] += output.outputs[0].token_ids
                cached = max(cached, output.num_cached_tokens or 0)
    send([0], resumable=False)
    while engine.has_unfinished_requests():
        engine.step()
    first, second = asked.parts
    _SAID.append(([*first, *turns[0][:-1], *second], [*first, *turns[0], *second]))
    return Answer(name=name, choices=turns, logprobs=[], prompt_tokens=len(first), cached=cached)
