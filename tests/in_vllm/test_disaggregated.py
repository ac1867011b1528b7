"""Disaggregated prefill: one engine computes a prompt, another one decodes it, and copies the blocks.

First under vLLM's real schedulers, with every copy and every step of both engines chosen; `real_scheduler`
checks that each step reads the right content. Then with two real engines in two processes.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from real_scheduler import Engine
from scheduler_shapes import BLOCK_TOKENS, VOCABULARY, Shape, valid

from kvsm.core.log import LogReader
from kvsm.events import OffloadingEvent, RequestFinished, StorePlanned
from kvsm.testing import assert_at_rest

ROOMY = Shape(device_blocks=48, host_blocks=40, step_tokens=16)

PROMPT = [7] * 21 + [1, 2, 3]
FULL = (len(PROMPT) - 1) // BLOCK_TOKENS
"""Blocks that a hit of the prompt may have: one token is left to compute (S18)."""


def until(reached: Callable[[], bool], *engines: Engine) -> None:
    """Step these engines until something is reached. The threads of hand-overs need some time."""
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end, "the hand-over does not go on"
        for engine in engines:
            engine.step()
            engine.check()
        time.sleep(0.0005)


class Pair:
    """A prefill engine and a decode engine in one process, with one directory.

    now: what the prefill engine's leases take as the time (s).
    """

    def __init__(self, directory: Path, prefill: Shape, decode: Shape, seed: int = 0, **options: Any) -> None:
        self.engines = []
        for number, shape in enumerate((prefill, decode)):
            extra = {**shape.extra, "hand_over_directory": str(directory), **options}
            self.engines.append(Engine(shape._replace(extra=extra), seed + number))
        self.prefill, self.decode = self.engines
        self.outgoing = self.prefill.scheduler.connector._side._outgoing
        self.incoming = self.decode.scheduler.connector._side._incoming
        self.now = 0.0
        self.outgoing.leases.clock = lambda: self.now

    def prefilled(self, prompt: list[int], stored: bool = True, adapter: str = "") -> dict[str, Any]:
        """Prefill this prompt. stored: wait until the blocks are on the host. Returns the answer."""
        name = self.prefill.ask(prompt, 1, {"do_remote_decode": True}, adapter)
        until(lambda: name in self.prefill.handed, self.prefill)
        if stored:
            until(lambda: not self.prefill.ledger.transfers, self.prefill)
        answer = self.prefill.handed[name]
        assert answer is not None
        return json.loads(json.dumps(answer))  # type: ignore[no-any-return]

    def decoded(
        self, prompt: list[int], answer: dict[str, Any] | None, outputs: int = 5, adapter: str = ""
    ) -> int:
        """Decode it, to the end. Returns how many blocks were loaded for it."""
        before = self.loaded
        name = self.decode.ask(prompt, outputs, answer, adapter)
        until(lambda: name in self.decode.handed, *self.engines)
        return self.loaded - before

    @property
    def loaded(self) -> int:
        return int(self.decode.scheduler.connector._side._core.metrics.values()["blocks_loaded"])

    def counts(self) -> tuple[dict[str, int], int]:
        """What the metrics say: (hand-overs by their end, prompts missed)."""
        gave, got = (engine.scheduler.connector._side for engine in self.engines)
        missed = got._counts_beside_events()["hand_overs_missed"]
        ended = gave._core.metrics.values()["hand_overs"]
        return {end: count for end, count in ended.items() if count}, missed

    def _is_over(self) -> bool:
        self.now += 1.0
        busy = any(engine.scheduler.has_unfinished_requests() for engine in self.engines)
        return not busy and not self.outgoing._out and not self.incoming._by_ticket

    def close(self) -> list[list[OffloadingEvent]]:
        """End both: every request has its tokens, nothing is pinned, both logs verify. Returns the logs."""
        until(self._is_over, *self.engines)
        logs = []
        for engine in self.engines:
            engine.drain()
            (log,) = Path(engine._directory.name, "events").iterdir()
            engine._core.offloader.log.flush()
            logs.append([event for one in LogReader(log).segments() for event in one.events()])
            engine.close()
        return logs


@pytest.fixture
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def made(prefill: Shape = ROOMY, decode: Shape = ROOMY, seed: int = 0, **options: Any) -> Pair:
        pairs.append(Pair(tmp_path_factory.mktemp("m") / "m", prefill, decode, seed, **options))
        return pairs[-1]

    yield made
    for pair in pairs:
        for engine in pair.engines:
            engine.scheduler.shutdown()
            engine.discard()


@pytest.mark.parametrize(
    "shape",
    [
        ROOMY,
        ROOMY._replace(shards=2),
        ROOMY._replace(groups=2, is_async=True),
        ROOMY._replace(stages=2),
        ROOMY._replace(extra={"blocks_per_chunk": 2}),
        ROOMY._replace(extra={"store": "lazy"}),
        ROOMY._replace(extra={"last_step": "flush"}),
    ],
    ids=lambda shape: (
        ",".join(f"{k}={v}" for k, v in shape._asdict().items() if v != getattr(ROOMY, k)) or "-"
    ),
)
def test_the_decode_engine_hits_every_full_block(make_pair: Callable[..., Pair], shape: Shape) -> None:
    """Each rank copies its share; a group with a sliding window hands over what its window needs. The client
    sends its request on at once, while the last stores are in flight."""
    pair = make_pair(shape, shape)
    answer = pair.prefilled(PROMPT, stored=False)
    loaded = pair.decoded(PROMPT, answer)
    chunk = shape.extra.get("blocks_per_chunk", 1)
    window = 2 if shape.groups == 2 else 0
    assert loaded == -(-FULL // chunk) + window
    prefill, decode = pair.close()
    [over] = [
        event for event in prefill if isinstance(event, RequestFinished) and "hand-over" in event.request
    ]
    assert not over.aborted
    assert over.request.startswith(f"hand-over-{answer['remote_hand_over'][:8]}-of-r0")
    [store] = [event for event in decode if isinstance(event, StorePlanned) and event.source]
    assert store.source == f"engine {answer['remote_engine_id']}"


def test_reports_of_the_disk_are_followed_by_a_look_at_the_hand_overs(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand-over may wait for a block that comes from the disk, and an idle engine takes no further step."""
    pair = make_pair(ROOMY._replace(disk_blocks=64))
    side = pair.prefill.scheduler.connector._side
    update, take, look = side.update_connector_output, side._disk.take, pair.outgoing.look
    calls: list[str] = []

    def taken(reports: Any) -> None:
        calls.extend(["disk"] if reports else [])
        take(reports)

    def updated(output: Any) -> None:
        update(output)
        calls.append("end")

    monkeypatch.setattr(side, "update_connector_output", updated)
    monkeypatch.setattr(side._disk, "take", taken)
    monkeypatch.setattr(pair.outgoing, "look", lambda: (calls.append("look"), look()))
    pair.prefilled(PROMPT)
    until(lambda: "disk" in calls and not side._disk_has_work(), pair.prefill)
    for place, call in enumerate(calls):
        assert call != "disk" or calls[place + 1] == "look"


def test_what_the_client_gets_is_small_and_named_as_vllm_names_it(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    answer = pair.prefilled(PROMPT)
    assert set(answer) - {"remote_prefill_cached_tokens"} == {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_engine_id",
        "remote_request_id",
        "remote_num_tokens",
        "remote_hand_over",
    }
    assert (answer["do_remote_prefill"], answer["do_remote_decode"]) == (True, False)
    assert answer["remote_num_tokens"] == FULL * BLOCK_TOKENS
    assert len(json.dumps(answer)) < 400
    pair.decoded(PROMPT, answer)
    pair.close()


def test_a_request_without_a_full_block_is_answered_with_nothing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    name = pair.prefill.ask(PROMPT[:BLOCK_TOKENS], 1, {"do_remote_decode": True})
    until(lambda: name in pair.prefill.handed, pair.prefill)
    assert pair.prefill.handed[name] is None
    assert pair.decoded(PROMPT[:BLOCK_TOKENS], None) == 0
    pair.close()


def test_a_block_that_the_decode_engine_has_is_not_copied_again(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.decoded([*PROMPT[:12], 5], pair.prefilled([*PROMPT[:12], 5]))
    answer = pair.prefilled(PROMPT)
    pair.decoded(PROMPT, answer)
    decode = pair.close()[1]
    stores = [event for event in decode if isinstance(event, StorePlanned) and event.source]
    assert [len(event.keys) for event in stores] == [3, FULL - 3]


def test_a_lease_holds_no_statistics_back(make_pair: Callable[..., Pair]) -> None:
    """The prefill engine may take no other step before somebody comes, and nobody may come."""
    pair = make_pair()
    source = pair.prefill.scheduler.connector._side._stats
    source.clock = lambda: 0.0
    told: Counter[str] = Counter()

    def take(original: Any = source.take) -> Any:
        stats = original()
        told.update(stats.data.get("requests", {}) if stats is not None else {})
        return stats

    source.take = take
    answer = pair.prefilled(PROMPT)
    assert pair.outgoing._out
    assert told == {"finished": 1}
    pair.decoded(PROMPT, answer)
    pair.close()


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why hand-overs came to nothing, one line each."""
    begins = "computes its prompt: nothing was handed over by engine"
    return [line.partition(begins)[2].partition(": ")[2] for line in caplog.messages if begins in line]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's loggers do not pass records on."""
    for name in ("vllm", "vllm.kvsm"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    logging.getLogger("vllm.kvsm").setLevel(logging.INFO)
    caplog.set_level(logging.INFO)


def test_a_hand_over_that_nobody_takes_expires_and_the_late_one_computes(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(hand_over_timeout_s=30)
    answer = pair.prefilled(PROMPT)
    pair.now += 29.9
    assert not pair.outgoing.has_ended()
    pair.now += 0.2
    assert pair.prefill.scheduler.has_requests(), "a step releases what has expired"
    pair.prefill.step()
    assert_at_rest(pair.prefill.ledger)
    assert any("no engine has taken the blocks of request r0 within 30 s" in line for line in caplog.messages)
    assert pair.decoded(PROMPT, answer) == 0
    assert refused(caplog) == [
        "there is no such hand-over: it has expired, was taken or given up, or was reset"
    ]
    assert pair.counts() == ({"expired": 1}, 1)
    prefill, _ = pair.close()
    [over] = [
        event for event in prefill if isinstance(event, RequestFinished) and "hand-over" in event.request
    ]
    assert over.aborted


@pytest.mark.parametrize("begun", [False, True])
def test_an_aborted_decode_gives_the_blocks_up(make_pair: Callable[..., Pair], begun: bool) -> None:
    """The client disconnects: at once, or while the blocks are copied."""
    pair = make_pair()
    answer = pair.prefilled(PROMPT)
    pair.decode.ask(PROMPT, 5, answer)
    if begun:
        until(lambda: bool(pair.incoming._by_transfer), pair.decode)
    pair.decode.abort(0)
    pair.close()


def test_a_decode_request_that_vllm_rejects_gives_the_blocks_up(make_pair: Callable[..., Pair]) -> None:
    """vLLM's server adds and aborts it, so that the connector hears of it."""
    pair = make_pair()
    pair.decode.ask(PROMPT, 5, pair.prefilled(PROMPT, stored=False))
    pair.decode.abort(0)
    pair.close()


def test_a_hand_over_has_one_reader(make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair()
    answer = pair.prefilled(PROMPT)
    pair.decoded(PROMPT, answer)
    pair.decode.reset(False, True)
    pair.decoded(PROMPT, answer)
    assert len(refused(caplog)) == 1
    assert pair.counts() == ({"taken": 1}, 1)
    metrics = pair.decode.scheduler.connector._side._core.metrics.values()
    assert metrics["imports_ended"]["completed"] == 1
    assert metrics["blocks_imported"] == FULL
    pair.close()


ANOTHER = "it is of another prompt, adapter, image, salt or version of the weights"


def test_a_hand_over_of_another_prompt_is_refused(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """A client that mixes two requests up, or means to, must not fill the cache with wrong content."""
    pair = make_pair()
    answer = pair.prefilled(PROMPT)
    assert pair.decoded([8, *PROMPT[1:]], answer) == 0
    assert refused(caplog) == [ANOTHER]
    assert pair.decoded(PROMPT, answer) == FULL
    pair.close()


def test_two_adapters_of_one_name_share_nothing(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """Each engine may have loaded another adapter under the name. vLLM's block hashes have the path, too."""
    pair = make_pair()
    answer = pair.prefilled(PROMPT, adapter="/adapters/a")
    assert pair.decoded(PROMPT, answer, adapter="/adapters/b") == 0
    assert pair.decoded(PROMPT, answer) == 0
    assert refused(caplog) == [ANOTHER, ANOTHER]
    assert pair.decoded(PROMPT, answer, adapter="/adapters/a") == FULL
    pair.close()


def test_engines_with_other_weights_hand_nothing_over(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """Both began with the same weights, and one got new ones."""
    pair = make_pair()
    for engine in pair.engines:
        engine.scheduler.connector.set_weights_version("v2")
    assert pair.decoded(PROMPT, pair.prefilled(PROMPT)) == FULL
    pair.prefill.scheduler.connector.set_weights_version("v3")
    assert pair.decoded([5, *PROMPT], pair.prefilled([5, *PROMPT])) == 0
    assert refused(caplog) == [ANOTHER]
    pair.close()


@pytest.mark.parametrize("when", ["before the claim", "while it is copied"])
def test_a_reset_of_the_prefill_engine_revokes_what_is_out(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Its slots may be written again at once. What was copied until then is not believed."""
    pair = make_pair()
    answer = pair.prefilled(PROMPT)
    if when == "before the claim":
        pair.prefill.reset_host()
    name = pair.decode.ask(PROMPT, 5, answer)
    if when == "while it is copied":
        until(lambda: bool(pair.incoming._by_transfer), pair.decode)
        pair.prefill.reset_host()
    until(lambda: name in pair.decode.handed, *pair.engines)
    [why] = refused(caplog)
    assert why.startswith(
        "there is no such" if when == "before the claim" else "the prefill engine did not hold the blocks"
    )
    assert pair.loaded == 0
    pair.close()


def test_a_reset_of_the_decode_engine_gives_up_what_is_on_its_way(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """What was computed before a reset must not come in after it."""
    pair = make_pair()
    name = pair.decode.ask(PROMPT, 5, pair.prefilled(PROMPT))
    pair.decode.reset_host()
    until(lambda: name in pair.decode.handed, *pair.engines)
    assert refused(caplog) == ["this engine was reset"]
    pair.close()


def test_stores_that_failed_shorten_what_is_handed_over(make_pair: Callable[..., Pair]) -> None:
    """Some seed fails the last store and some seed the first one."""
    loaded = set()
    for seed in range(6):
        pair = make_pair(ROOMY._replace(failing=0.4, step_tokens=8), ROOMY, seed)
        name = pair.prefill.ask(PROMPT, 1, {"do_remote_decode": True})
        until(lambda: name in pair.prefill.handed, pair.prefill)  # noqa: B023
        loaded.add(pair.decoded(PROMPT, pair.prefill.handed[name]))
        pair.close()
    assert len(loaded) > 1
    assert max(loaded) <= FULL


def test_a_copy_that_fails_is_a_recompute(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's file is gone, for example."""
    pair = make_pair()
    answer = pair.prefilled(PROMPT)
    monkeypatch.setattr("kvsm.tiers.hand_over.imports.pool_path", lambda *_: Path("/nowhere/pool"))
    assert pair.decoded(PROMPT, answer) == 0
    [why] = refused(caplog)
    assert why.startswith("the copy failed: /nowhere/pool: cannot be opened")
    pair.close()


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_request_that_is_preempted_hands_all_of_its_prompt_over(
    make_pair: Callable[..., Pair], steps: int, role: str
) -> None:
    """Another request of the prefill engine needs its blocks, at each moment of its prefill. If its last step
    runs, the output of that step must not count: the blocks of the prompt are gone."""
    shape = ROOMY._replace(host_blocks=160, is_async=steps > 1, stages=max(1, steps - 1))
    pair = make_pair(valid(shape._replace(role=role)), valid(shape))
    assert pair.prefill.shape.most_steps == steps
    engine, moments, preempted = pair.prefill, 10, list[bool]()
    for moment in range(moments):
        until(lambda: not engine.scheduler.has_unfinished_requests(), engine)
        prompt = [*[moment] * 23, 1]
        engine.ask([VOCABULARY + moment] * 3, 24)
        engine.step()
        name = engine.ask(prompt, 1, {"do_remote_decode": True})
        for _ in range(moment):
            if not engine.schedule():
                engine.deliver()
        request = engine.scheduler.requests.get(name)
        is_computed = request is not None and request.num_computed_tokens >= request.num_prompt_tokens
        engine.starve()
        until(lambda: name in engine.handed, engine)  # noqa: B023
        if request is not None and request.num_preemptions:
            preempted.append(is_computed)
        answer = engine.handed[name]
        assert answer is not None
        assert answer["remote_num_tokens"] == FULL * BLOCK_TOKENS
        assert pair.decoded(prompt, answer) == FULL
    # With several steps in flight vLLM preempts a request in the midst of one only where no load may write.
    assert preempted.count(False) >= (steps == 1 or role == "kv_producer")
    assert preempted.count(True) >= (steps > 1 and role == "kv_producer")
    pair.close()


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_a_pool_that_is_too_small_hands_over_a_shorter_prefix(
    make_pair: Callable[..., Pair], which: str
) -> None:
    small = ROOMY._replace(host_blocks=4)
    pair = make_pair(small if which == "prefill" else ROOMY, small if which == "decode" else ROOMY)
    name = pair.prefill.ask(PROMPT, 1, {"do_remote_decode": True})
    until(lambda: name in pair.prefill.handed and not pair.prefill.ledger.transfers, pair.prefill)
    assert 0 < pair.decoded(PROMPT, pair.prefill.handed[name]) <= 4
    pair.close()


def test_engines_whose_blocks_mean_something_else_say_so(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(ROOMY, ROOMY._replace(extra={"blocks_per_chunk": 2}))
    assert pair.decoded(PROMPT, pair.prefilled(PROMPT)) == 0
    [why] = refused(caplog)
    assert why == "its blocks differ from the decode engine's: blocks_per_chunk is '1', and '2' there"
    pair.close()


def test_a_prefill_engine_that_ended_is_a_recompute(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()
    answer = pair.prefilled(PROMPT)
    pair.prefill.scheduler.shutdown()
    name = pair.decode.ask(PROMPT, 5, answer)
    until(lambda: name in pair.decode.handed, pair.decode)
    [why] = refused(caplog)
    assert why.startswith("it is not there: FileNotFoundError")
    pair.decode.drain()
    pair.decode.close()


WALKS = 12

ADAPTERS = ("", "/adapters/a", "/adapters/b")


def test_any_order_of_steps_aborts_resets_and_failures(make_pair: Callable[..., Pair]) -> None:
    """Seeded walks of both engines, their threads between them. Every step reads the right content, so no
    slot was written under a reader that was told "held"; at the end nothing is pinned."""
    counts = Counter[str]()
    for seed in range(WALKS):
        random = Random(f"hand-over {seed}")
        shape = ROOMY._replace(
            groups=random.choice((1, 2)),
            is_async=random.random() < 0.5,
            host_blocks=random.choice((12, 40)),
            failing=random.choice((0.0, 0.1)),
        )
        role = random.choice(("kv_producer", "kv_both"))
        pair = make_pair(shape._replace(role=role), shape._replace(host_blocks=random.choice((12, 40))), seed)
        _wander(pair, random, counts)
        for log in pair.close():
            counts["handed over"] += sum(
                isinstance(event, StorePlanned) and bool(event.source) for event in log
            )
    assert counts["handed over"] >= WALKS
    assert counts["resets"] >= WALKS // 2
    assert counts["other adapters"] >= WALKS


def _wander(pair: Pair, random: Random, counts: Counter[str]) -> None:
    waiting: list[tuple[str, list[int], str]] = []
    for number in range(120):
        kind = random.random()
        if kind < 0.12:
            prompt = [*[random.randrange(4)] * random.randrange(4, 30), 100 + number]
            adapter = random.choice(ADAPTERS)
            name = pair.prefill.ask(prompt, 1, {"do_remote_decode": True}, adapter)
            waiting.append((name, prompt, adapter))
        elif kind < 0.30:
            done = [one for one in waiting if one[0] in pair.prefill.handed]
            for name, prompt, adapter in done[:1]:
                waiting.remove((name, prompt, adapter))
                if random.random() < 0.2:
                    # The engines do not agree which adapter the name means.
                    counts["other adapters"] += 1
                    adapter = ADAPTERS[ADAPTERS.index(adapter) - 1]
                pair.decode.ask(prompt, 4, pair.prefill.handed[name], adapter)
        elif kind < 0.34:
            random.choice(pair.engines).abort(random.randrange(4))
        elif kind < 0.37:
            random.choice(pair.engines).reset_host()
            counts["resets"] += 1
        elif kind < 0.40:
            pair.now += random.choice((10.0, 61.0))
        else:
            engine = random.choice(pair.engines)
            engine.step()
            engine.check()
        if random.random() < 0.3:
            time.sleep(0.001)
    pair.now += 1000.0
