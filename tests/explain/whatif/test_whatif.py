"""What-if: what a log wanted, what other host pools would have served, and the bound beside them.

Not checked here: other engines than the serving engine. benchmarks/whatif.py compares many more predictions
with real runs.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from functools import partial
from itertools import combinations, count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from served_logs import REQUESTS, served

from examples import examples
from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.errors import LogError
from kvsm.events import OffloadConfig
from kvsm.explain.report.log_report import make_report
from kvsm.explain.story import LogCondition, Trust
from kvsm.explain.story.window import Window
from kvsm.explain.tables.opened import open as open_log
from kvsm.explain.whatif.accuracy import (
    CHANGED_POINTS,
    ITSELF_POINTS,
    KINDS,
    error_points,
    kind_of,
    refuse_unlike,
    repeated_share,
)
from kvsm.explain.whatif.comparison import compare, verdict
from kvsm.explain.whatif.demand import UNKNOWN, Demand, Finished, Lookup, Offers, Operation, read_demand
from kvsm.explain.whatif.optimum import Optimum, most_kept
from kvsm.explain.whatif.plot import plot
from kvsm.explain.whatif.simulate import Scenario, _Cursor, counted_lookups, recorded, simulate
from kvsm.serving import RunOptions, WorkloadRun
from kvsm.serving.traces import TraceRequest, multi_turn, prompt_hashes
from kvsm.system.executors.forked import ForkedProcesses

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with evictions, hits and preemptions."""
    return served(tmp_path_factory.mktemp("whatif") / "log")


@pytest.fixture(scope="module")
def demand(log: Path) -> Demand:
    """What that log wanted."""
    return read_demand(LogReader(log), Trust())


# What the log wanted.


def placed(demand: Demand, requests: int, seed: int = 0) -> tuple[int, int, int]:
    """How many blocks the prompts of the generated workload have; how many are known; how many are wrong."""
    blocks = known = wrong = 0
    for chain, request in zip(demand.chains, multi_turn(seed, requests), strict=True):
        hashes = prompt_hashes(request, 512, 512)
        found = [(number, expected) for number, expected in zip(chain, hashes) if number != UNKNOWN]
        blocks, known = blocks + len(hashes), known + len(found)
        wrong += sum(not demand.keys[number].startswith(expected) for number, expected in found)
    return blocks, known, wrong


def test_chains_are_the_prompts_that_the_engine_served(demand: Demand) -> None:
    """A key in the wrong place would be a hit that no run can have."""
    blocks, known, wrong = placed(demand, REQUESTS)
    assert wrong == 0
    assert known >= 0.99 * blocks


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [1, 2])
def test_a_key_that_may_be_another_one_is_not_placed(tmp_path: Path, threshold: int) -> None:
    """Requests of one step that share a system prompt touch its blocks once, so a touched block may belong to
    several of them. Skipped blocks are logged before the stored ones, which precede them in the prompt."""
    options = {"requests": 400, "device_blocks": 160, "host_blocks": 600, "seed": 2}
    log = served(tmp_path / "log", **options, store_threshold=threshold)
    blocks, known, wrong = placed(read_demand(LogReader(log), Trust()), 400, seed=2)
    assert wrong == 0
    assert known >= 0.99 * blocks


def test_lookups_are_those_that_the_report_counts(log: Path, demand: Demand) -> None:
    """Each request counts once, with the lookup that it was first admitted with: also if it is looked up
    again before it runs, or resumes after a preemption."""
    lookups = counted_lookups(demand)
    assert sum(one.resumed for one in demand.operations if isinstance(one, Lookup)) > 10
    assert len(lookups) == REQUESTS
    result = recorded(lookups)
    with open_log(log) as opened:
        found = make_report(opened, now_ns=0).hits
    counted = found.lookups, found.asked, found.on_device, found.on_host
    assert (result.lookups, result.asked, result.on_device, result.on_host) == counted


def test_windows_share_the_lookups(demand: Demand) -> None:
    """No lookup counts twice, and none is left out."""
    middle = demand.last // 2
    halves = [counted_lookups(demand, Window(1, middle)), counted_lookups(demand, Window(middle + 1, None))]
    everything = counted_lookups(demand)
    assert sorted(one.seq for half in halves for one in half) == sorted(one.seq for one in everything)
    assert all(halves)


# What a pool would have served.


def test_own_configuration_gives_what_the_log_says(demand: Demand) -> None:
    """A simulation that does not reproduce the log cannot predict anything else."""
    lookups = counted_lookups(demand)
    simulated, said = simulate(demand, Scenario.of(demand.config), lookups), recorded(lookups)
    assert said.on_host > 100
    assert abs(simulated.found_share - said.found_share) <= ITSELF_POINTS / 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"store_threshold": 2},
        {"reset_every": 1000},
        {"abort_rate": 0.1, "preempt_rate": 0.02},
    ],
    ids=str,
)
def test_own_configuration_is_simulated_with_other_options(tmp_path: Path, options: dict[str, Any]) -> None:
    """Blocks below the threshold, before a reset and of preempted requests are offered as in the core."""
    demand = read_demand(LogReader(served(tmp_path / "log", requests=400, **options)), Trust())
    lookups = counted_lookups(demand)
    simulated, said = simulate(demand, Scenario.of(demand.config), lookups), recorded(lookups)
    assert said.on_host > 300
    assert abs(simulated.on_host - said.on_host) <= 0.012 * said.on_host


def agent_requests(agents: int, turns: int) -> list[TraceRequest]:
    """Agents that run at once. Each prompt of an agent continues its last one."""
    random, fresh, requests = Random(0), count(), list[TraceRequest]()
    for _ in range(agents):
        ids, now_ms = [next(fresh) for _ in range(random.randint(10, 30))], random.uniform(0, 60_000)
        for _ in range(turns):
            ids = [*ids, *(next(fresh) for _ in range(random.randint(0, 3)))]
            requests.append(TraceRequest(now_ms, 512 * len(ids), random.randint(50, 400), tuple(ids)))
            now_ms += 2000 + random.expovariate(1 / 8000)
    return sorted(requests, key=lambda request: request.arrival_ms)


@pytest.mark.slow
def test_own_configuration_of_agents_is_simulated(tmp_path: Path) -> None:
    """The host has nearly all of a prompt, or has evicted a part of it. Blocks that a request does not offer
    again are not touched: loaded blocks, and at its end all of its blocks if the host still has them."""
    options = {"device_blocks": 300, "host_blocks": 500, "copies": "simulated", "workers": 1}
    chosen = RunOptions(**options, block_bytes=8, log=str(tmp_path / "log"))
    WorkloadRun(chosen, agent_requests(24, 20), str(tmp_path / "log")).serve()
    demand = read_demand(LogReader(tmp_path / "log"), Trust())
    lookups = counted_lookups(demand)
    simulated, said = simulate(demand, Scenario.of(demand.config), lookups), recorded(lookups)
    assert kind_of(repeated_share(demand)).name == "agents"
    assert 0.2 < said.host_share < 0.3
    assert abs(simulated.found_share - said.found_share) <= 0.005


def demand_of(prompts: list[tuple[int, ...]], steps_between: int = 10, **config: Any) -> Demand:
    """Requests one after the other: each is looked up, offers all its blocks, and ends.

    prompts: the numbers of each prompt's keys.
    """
    operations: list[Operation] = []
    for life, prompt in enumerate(prompts):
        seq, step, count = 4 * life + 1, steps_between * life, len(prompt)
        operations.append(Lookup(seq, step, life, 0, count, count, 0, 0))
        operations.append(Offers(seq + 1, step + 3, ((life, count),)))
        operations.append(Finished(seq + 2, step + 6, life, 0))
    return Demand(
        config=OffloadConfig(host_blocks=4, device_blocks=64, **config),
        condition=LogCondition(None, None, (), False),
        requests=[f"r{number}" for number in range(len(prompts))],
        keys=[b"%d" % number for number in range(100)],
        chains=[array("i", prompt) for prompt in prompts],
        operations=operations,
        initial=[],
        first=1,
        last=4 * len(prompts) + 1,
        began_ns=0,
        ended_ns=0,
        store_steps=1,
        load_steps=1,
        copies=0,
        failed_copies=0,
        unknown_blocks=0,
    )


ROOTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=20)
"""Prompts: a root, and how many blocks of it. Block n of root r has the number 10 * r + n."""


def prompts_of(roots: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    return [tuple(10 * root + place for place in range(length)) for root, length in roots]


def plain_lru(prompts: list[tuple[int, ...]], size: int) -> int:
    """Hits of prefixes in an LRU list that holds a whole prompt. The end of a prefix goes first."""
    pool: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        lacking = [place for place, key in enumerate(prompt) if key not in pool]
        hits += lacking[0] if lacking else len(prompt)
        for key in prompt:
            pool.pop(key, None)
        while len(pool) + len(prompt) > size:
            pool.popitem(last=False)
        pool.update(dict.fromkeys(reversed(prompt)))
    return hits


@given(ROOTS, st.integers(4, 12))
@settings(max_examples=examples(50), deadline=None)
def test_lru_serves_what_a_plain_list_serves(roots: list[tuple[int, int]], size: int) -> None:
    """The pool around the policy neither loses nor invents a hit."""
    prompts = prompts_of(roots)
    demand = demand_of(prompts)
    assert simulate(demand, Scenario(size, "lru", 1), counted_lookups(demand)).on_host == plain_lru(
        prompts, size
    )


@given(ROOTS, st.integers(1, 4))
@settings(max_examples=examples(25), deadline=None)
def test_threshold_stores_with_the_nth_offer(roots: list[tuple[int, int]], threshold: int) -> None:
    """In a pool that never evicts, a block is served from the request after its n-th offer on."""
    prompts = prompts_of(roots)
    demand = demand_of(prompts)
    offers: dict[int, int] = {}
    expected = 0
    for prompt in prompts:
        expected += next((n for n, key in enumerate(prompt) if offers.get(key, 0) < threshold), len(prompt))
        for key in prompt:
            offers[key] = offers.get(key, 0) + 1
    found = simulate(demand, Scenario(100, "lru", threshold), counted_lookups(demand))
    assert found.on_host == expected


def test_a_lookup_is_served_by_a_store_in_flight() -> None:
    """A request waits for a block in flight, and then has it."""
    demand = demand_of([(1, 2), (1, 2)], steps_between=4)
    slow = msgspec.structs.replace(demand, store_steps=50)
    assert simulate(slow, Scenario(4, "lru", 1), counted_lookups(slow)).on_host == 2


def test_a_request_that_ends_touches_nothing_unless_a_block_of_it_is_lost() -> None:
    """The long request 1 keeps its place in the eviction order: block 12 is evicted before block 13."""
    prompts = [(10,), (11, 12), (13,), (14,), (15,), (13,), (11, 12)]
    steps = iter(range(0, 1000, 10))
    operations: list[Operation] = []
    for life, prompt in enumerate(prompts):
        count = len(prompt)
        operations.append(Lookup(len(operations) + 1, next(steps), life, 0, count, count, 0, 0))
        operations.append(Offers(len(operations) + 1, next(steps), ((life, count),)))
        if life == 3:  # It has evicted block 10.
            operations.append(Finished(len(operations) + 1, next(steps), 1, 2))
    demand = msgspec.structs.replace(demand_of(prompts), operations=operations)
    own = Scenario(4, "lru", 1)
    hits = [simulate(demand, own, [lookup]).on_host for lookup in counted_lookups(demand)]
    assert hits == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.slow
def test_a_log_that_begins_late_begins_with_a_full_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention deletes the oldest segments. What they stored is still served."""
    opened = partial(Offloader.open, segment_bytes=1 << 17, max_bytes=1 << 19)
    monkeypatch.setattr(Offloader, "open", opened)
    late = read_demand(LogReader(served(tmp_path / "log", requests=2 * REQUESTS)), Trust())
    assert late.first > 1
    assert len(late.initial) > 100
    lookups = counted_lookups(late)
    assert len(lookups) > 100  # Of fewer, one hit more or less is a point.
    simulated, said = simulate(late, Scenario.of(late.config), lookups), recorded(lookups)
    assert abs(simulated.found_share - said.found_share) <= CHANGED_POINTS / 100


# The bound.


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), max_size=8),
    st.integers(1, 4),
)
@settings(max_examples=examples(60), deadline=None)
def test_bound_is_the_best_choice_of_all(pairs: list[tuple[int, int]], capacity: int) -> None:
    """Tried out: no other choice of intervals serves more, and this choice exists."""
    intervals = sorted((start, start + length) for start, length in pairs)

    def fits(chosen: tuple[tuple[int, int], ...]) -> bool:
        return all(sum(start <= moment < end for start, end in chosen) <= capacity for moment in range(14))

    best = max(
        count
        for count in range(len(intervals) + 1)
        if any(fits(chosen) for chosen in combinations(intervals, count))
    )
    assert most_kept(intervals, capacity) == best


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [20, 200])
def test_no_policy_exceeds_the_bound(demand: Demand, policy: str, size: int) -> None:
    lookups = counted_lookups(demand)
    found = simulate(demand, Scenario(size, policy, 1), lookups).found_share
    assert found <= Optimum(demand, lookups).found_share(size)


def test_a_pool_that_never_evicts_reaches_the_bound(demand: Demand) -> None:
    """Without evictions there is nothing to choose."""
    lookups = counted_lookups(demand)
    found = simulate(demand, Scenario(len(demand.keys), "lru", 1), lookups)
    optimum = Optimum(demand, lookups)
    assert found.evicted == 0
    assert found.found_share == optimum.unlimited == optimum.found_share(len(demand.keys))


# Refusals.


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"store": "lazy", "device_blocks": 64}, "lazy store"),
        ({"groups": "full,sliding:1024"}, "several KV cache groups"),
    ],
    ids=["lazy", "groups"],
)
def test_a_log_for_which_it_is_not_validated_is_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    log = served(tmp_path / "log", **{"requests": 30, **options})
    result = CliRunner().invoke(main, ["whatif", str(log)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_log_without_cursors_is_refused(tmp_path: Path) -> None:
    """An engine that drives the core itself logs no cursors, so the order of a prompt's blocks is unknown."""
    config = OffloadConfig(host_blocks=4, device_blocks=8)
    with Offloader.open(config, tmp_path / "log") as core:
        core.match("r", [b"a", b"b"])
        core.prepare_store("r", [b"a", b"b"], [0, 1])
        core.end_step()
    with pytest.raises(LogError, match="scheduler"):
        read_demand(LogReader(tmp_path / "log"), Trust())


def test_a_log_of_failing_copies_is_refused(demand: Demand) -> None:
    """In the simulation no copy fails, so it would promise too much."""
    failing = msgspec.structs.replace(demand, failed_copies=demand.copies // 10)
    with pytest.raises(LogError, match="copies failed or were lost"):
        compare("log", failing, [])


def test_a_log_that_behaves_in_another_way_is_refused(demand: Demand) -> None:
    """A prediction is worth nothing if it does not even give the log's own result."""
    said = recorded(counted_lookups(demand))
    off = msgspec.structs.replace(said, on_host=said.on_host + said.asked // 10)
    with pytest.raises(LogError, match="does not hold for its engine"):
        refuse_unlike("log", off, said)
    refuse_unlike("log", said, said)


# The command.


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["whatif", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_json_and_table_say_the_same(log: Path) -> None:
    arguments = [str(log), "--host-blocks", "100..400", "--policy", "lru,arc"]
    code, out, _ = run(*arguments, "--json")
    answer = msgspec.json.decode(out)
    assert (code, next(iter(answer.items()))) == (0, ("schema", "kvsm.whatif/1"))
    assert [(one["host_blocks"], one["policy"]) for one in answer["outcomes"]] == [
        (size, policy) for size in (100, 200, 400) for policy in ("lru", "arc")
    ]
    code, table, _ = run(*arguments)
    assert code == 0
    for one in answer["outcomes"]:
        row = next(line for line in table.splitlines() if line.split()[:1] == [str(one["host_blocks"])])
        assert f"{one['found_share']:.1%}" in row
    points = max(one["error_points"] for one in answer["outcomes"])
    assert f"error: up to {points:g} points" in table
    assert f"runs of {answer['workload']}" in table


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--host-blocks", "many"), "is no number and no range"),
        (("--host-blocks", "300..200"), "goes up"),
        (("--host-blocks", "0"), "goes up"),
        (("--host-blocks", "99999999999"), "is no number"),
        (("--host-blocks", "1..10000:1"), "at most"),
        (("--policy", "s3fif"), "did you mean s3fifo?"),
        (("--policy", "os:system"), "--allow-policy"),
        (("--store-threshold", "x"), "is no number"),
        (("--since", "999999"), "no event"),
    ],
)
def test_bad_options_give_one_line(log: Path, arguments: tuple[str, ...], why: str) -> None:
    code, out, err = run(str(log), *arguments)
    assert (code, out) == (2, "")
    assert why in err
    assert err.count("\n") == 1


def test_no_log_gives_one_line(tmp_path: Path) -> None:
    code, out, err = run(str(tmp_path))
    assert (code, out) == (2, "")
    assert "no log here" in err


def test_verdict_says_what_helps_and_what_is_within_the_error(demand: Demand) -> None:
    """The reader with one minute reads these lines, and no table."""
    found = compare("log", demand, [Scenario.of(demand.config)])
    own = found.itself
    outcomes = [
        msgspec.structs.replace(own, host_blocks=400, found_share=own.found_share + 0.2, error_points=2.5),
        msgspec.structs.replace(own, policy="arc", found_share=own.found_share + 0.01, error_points=2.5),
    ]
    lines = verdict(msgspec.structs.replace(found, outcomes=tuple(outcomes)))
    assert [line.split(" with ")[0] for line in lines] == [
        "20.0 points more",
        "no difference beyond the error (+1.0 points)",
    ]
    assert verdict(msgspec.structs.replace(found, outcomes=())) == []


def test_stated_errors_are_those_of_the_results() -> None:
    """What the command prints was measured: the page of results has no larger difference."""
    page = (BENCHMARKS / "results" / "whatif.md").read_text()
    row = r"^\| (\w+) \| ([\d.]+)% to ([\d.]+)% \| (\w+) \| (\d+) \| [\d.]+ \| ([\d.]+) \|$"
    rows = re.findall(row, page, re.M)
    assert {kind.name for kind in KINDS} == {name for name, *_ in rows}
    for kind in KINDS:
        of_kind = [row[1:] for row in rows if row[0] == kind.name]
        assert {kind_of(float(share) / 100) for least, most, *_ in of_kind for share in (least, most)} == {
            kind
        }
        largest = {changed: float(points) for _, _, changed, _, points in of_kind}
        assert largest.pop("itself") <= kind.itself_points
        assert max(largest.values()) <= kind.changed_points
        assert sum(int(number) for _, _, _, number, _ in of_kind) == kind.comparisons


@given(st.floats(0, 1))
def test_each_log_resembles_a_measured_kind(share: float) -> None:
    """Logs with more repeated blocks resemble a kind that is earlier in the list."""
    kind = kind_of(share)
    assert kind.repeated_least <= share
    assert all(share < other.repeated_least for other in KINDS[: KINDS.index(kind)])


def test_plot_draws_every_curve_where_it_is() -> None:
    """The first curve is drawn over the others, and a higher share is a higher row."""
    lines = plot([100, 200], {"lru": [0.1, 0.5], "arc": [0.3, 0.5]})
    drawn = [line.split("|")[1] for line in lines if "|" in line]
    row_of = {letter: [n for n, line in enumerate(drawn) if letter in line] for letter in "ab"}
    assert row_of["a"][0] < row_of["b"][0] < row_of["a"][1]
    assert lines[-1].split() == ["a", "lru", "b", "arc"]


# Beside real runs.


@pytest.mark.slow
@pytest.mark.parametrize("target", [(100, "lru"), (400, "lru"), (400, "s3fifo")], ids=str)
def test_prediction_is_near_a_real_run(tmp_path: Path, target: tuple[int, str]) -> None:
    """The error that the command prints, for a part of benchmarks/whatif.py."""
    base = read_demand(LogReader(served(tmp_path / "base", requests=600)), Trust())
    real = read_demand(
        LogReader(served(tmp_path / "real", requests=600, host_blocks=target[0], policy=target[1])), Trust()
    )
    predicted = simulate(base, Scenario(*target, 1), counted_lookups(base))
    points = 100 * (predicted.found_share - recorded(counted_lookups(real)).found_share)
    assert abs(points) <= CHANGED_POINTS


def test_comparison_has_the_error_of_what_was_changed(demand: Demand) -> None:
    """The log's own configuration is easier to predict than another one."""
    own = Scenario.of(demand.config)
    other = msgspec.structs.replace(own, host_blocks=100)
    rare = msgspec.structs.replace(own, store_threshold=2)
    found = compare("log", demand, [own, other, rare])
    kind = kind_of(repeated_share(demand))
    errors = [kind.itself_points, kind.changed_points, kind.changed_points]
    assert [one.error_points for one in found.outcomes] == errors
    assert [error_points(demand, one) for one in (own, other, rare)] == errors
    assert (found.workload, found.comparisons) == (kind.about, kind.comparisons)
    assert found.outcomes[0].found_share == found.itself.found_share


def test_the_comparison_is_the_same_whoever_simulates(demand: Demand) -> None:
    """Simulate with an executor and in this process. The last progress is the number of scenarios."""
    own = Scenario.of(demand.config)
    tried = [own, *(msgspec.structs.replace(own, host_blocks=size) for size in (100, 50))]
    told: list[int] = []
    found = compare("log", demand, tried, progress=told.append, executor=ForkedProcesses(2))
    assert found == compare("log", demand, tried)
    compare("log", demand, tried[1:], progress=told.append)
    assert told == [2, 3, 1, 2]


def test_a_refused_block_is_not_offered_again_while_its_request_has_its_blocks() -> None:
    """As in the engine. A block behind it does not follow the one before it."""
    cursor = _Cursor(range(6))
    cursor.refused |= {2, 3, 5}
    assert cursor.unsettled(6) == [(0, 2), (4, 5)]
    cursor.restart()
    assert cursor.unsettled(6) == [(0, 6)]


def test_a_log_with_a_declined_hit_is_refused(tmp_path: Path) -> None:
    """A pool of another size would have other loads in flight, and other hits would be slow."""
    config = OffloadConfig(host_blocks=4, device_blocks=4, load_only_if_faster=True)
    with Offloader.open(config, tmp_path / "log") as core:
        core.note_times(9, 9, 0)
        assert core.declines("r", 1, 4)
    with pytest.raises(LogError, match="not validated for load_only_if_faster"):
        read_demand(LogReader(tmp_path / "log"), Trust())
