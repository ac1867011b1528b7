"""The checkers that search for every exhibit, in order. None is written for one exhibit.

====================  ================================================  =====================================
checker               what it is                                        what it can see
====================  ================================================  =====================================
exploration: serving  every interleaving of the scheduler and the core  anything that an engine, its clients
                      with a small engine, within a scope; in one       and its workers can cause; wrong KV
                      scope a router consumes the KV events, in one     events, what a restart leaves
                      the process is killed
exploration: copies   the stream copy engine on a simulated device      races, wrong bytes, lost ends
walk: core            random calls on the core alone, reduced           any answer of the core that differs
                                                                        from plain books
walk: disk            random actions on the files, copies and           stale, torn and lost blocks of
                      recovery of a disk tier, with kills, power        earlier processes
                      losses and starts under another identity
walk: tiers           random actions on a host pool with a disk         wrong, stale or lost blocks on
                      below it, with resets, kills and power            either tier, copies that differ
                      losses                                            between the two ledgers
walk: serving         random actions on the scheduler and the core,     faults that take a long time to show
                      with dozens of requests
walk: audited ...     the worlds of core, tiers and serving, with       a fold, a snapshot or a second ledger
                      a second ledger beside each core, and states      that differs in any field
                      that are saved and resumed
walk: wrong books     good ledgers and logs with one thing changed      checks that do not object
walk: serving with /  engines with windows, drafters and chunks, with   lost stores, wrong hits, stale data
 from ...             sessions, with a store from the free queue
walk: serving, ...    engines that accept less than a hit, draft,       the same; lost bytes behind drafts,
                      pause sessions, reuse request ids, ask again      unjustified frees, late ends
                      in a step, and lose loads
walk: workers         real workers over engines that refuse jobs,       unreported jobs, copies out of order
                      and replicas
walk: log ahead       a core whose log is watched                       effects ahead of the log
walk: restarts        processes on kept pools and a real log            wrong warm starts after a kill
walk: hand-over       two engines that hand blocks over                 blocks that are released too early
machine: scheduler    the Hypothesis machine that users subclass to     faults visible in bytes and in the
                      test their own parts (`kvsm.testing`), shrunk     engine's own books
exploration: threads  real threads of the copy engines, the log's       deadlocks, lost and early ends,
                      writer and the submitters, in every schedule      failures that are reported as good
                      with few preemptions
walk: router          a router behind an engine with chunks of two      blocks that are announced wrongly
                      blocks, of which some cannot be described
walk: eras            engines of two tiers, one after another, on       stale disk blocks after resets and
                      kept pools and the real files of a disk, with     kills, uneven ranks, blocks that
                      failing resets, kills and other weights           never reach the disk
walk: policies        one eviction policy, with batches and             victims that are held, miscounted
                      searches of any size                              blocks
walk: large core /    offers of more than a hundred blocks; many        faults of large batches, and of rare
 crowded core         losses, failures and resets of a few keys         overlaps of requests
walk: hand-over with  two engines that also load for themselves         promises of blocks that are gone
 loads
walk: log             the real writer of a log on a disk whose writes   unreported gaps in a log
                      and syncs fail
exploration: one      states that an explorer counts as equal, each     states that differ and are counted
 future               reached in several ways                           as equal
walk: vllm            KvsmConnector under vLLM's real scheduler         wrong bytes and races that an
                      on a simulated device, with faults of the         adapter causes
                      workers, adapters and priorities; needs vLLM
walk: vllm lives      KvsmConnector under vLLM's real scheduler         stale and lost blocks of earlier
                      on a simulated device, with new weights,          processes, memory that is freed too
                      restarts, disks, hanging loads; needs vLLM        early
walk: vllm troubles   the same with hanging loads and resets of the     blocks that are freed under copies in
                      host cache alone; needs vLLM                      flight, wrong offers
====================  ================================================  =====================================

The scopes are small enough to be explored completely on the unchanged code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvsm.check.explore.explorer import explore
from kvsm.check.explore.live_model import WorldScope
from kvsm.check.explore.model import Model, Verdict
from kvsm.check.explore.rerun import RerunModel
from kvsm.check.scopes.serving_scopes import ServingModel
from kvsm.check.threads import SCOPES as THREAD_SCOPES
from kvsm.check.threads import ThreadScope, explore_schedules, steps_of, switches_of
from kvsm.check.walks.reduce import reduce
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import MakeWorld, random_of, walk
from kvsm.check.worlds.copy_world import CopyEngineWorld, CopyEngineWorldOptions
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.serving_world import Budgets, RequestSpec, ServingOptions
from kvsm.check.worlds.worker_ranks import WorkerRanksWorld, draw_worker_ranks
from kvsm.check.worlds.world import Action, Finding, finding_of
from kvsm.core.scheduler import KVCacheGroup, LastStep, StoreMode
from kvsm.testing import OffloadMachine
from museum.adapter_worlds import VLLM_IS_THERE, adapted, lived, troubled
from museum.drawn_worlds import (
    audited_core,
    audited_serving,
    audited_tiers,
    crowded_core,
    large_core,
    layered_serving,
    lazy_serving,
    loading_hand_over,
    log_ahead,
    routed_serving,
    session_serving,
    wrong_books_of_a_core,
    wrong_books_of_tiers,
)
from museum.one_future import two_futures
from museum.other_engines import (
    chunks_and_drafts,
    lazy_and_eager,
    lost_loads,
    names_and_sessions,
    partial_hits,
    second_thoughts,
)

MOST_STATES = 20_000
"""Limit for one scope; an exhibit's bug can make a scope larger."""


class Sighting(msgspec.Struct, frozen=True):
    """A checker's finding, and the actions that lead to it."""

    finding: Finding
    trace: tuple[Action, ...]


class Checker(NamedTuple):
    """A named search for bugs.

    look: searches the code as currently patched; returns None if it finds nothing.
    needs_vllm: whether the search runs real vLLM, and so the adapters.
    """

    name: str
    look: Callable[[], Sighting | None]
    needs_vllm: bool = False


class Unexplored(Exception):
    """Raised if a scope cannot be explored completely."""


def exploration(name: str, make_model: Callable[[], Model[Any, Any]]) -> Checker:
    """Return a checker that explores every state of a scope; its traces are shortest ones."""

    def look() -> Sighting | None:
        explored = explore(make_model(), max_states=MOST_STATES)
        if explored.refutation is not None:
            return Sighting(explored.refutation.finding, explored.refutation.path)
        if explored.verdict is not Verdict.PROVED:
            raise Unexplored(f"{name}: {explored.verdict.name} after {explored.states} states")
        return None

    return Checker(f"exploration: {name}", look)


def seeded_walk(
    name: str, make_world: MakeWorld, runs: int, seed: int = 1, *, needs_vllm: bool = False
) -> Checker:
    """Return a checker that walks through worlds with drawn configurations, and reduces the first failure."""

    def look() -> Sighting | None:
        failure = walk(make_world, seed, runs=runs).failure
        if failure is None:
            return None
        reduced = reduce(lambda: make_world(random_of(seed, failure.run)), failure.actions, failure.finding)
        return Sighting(reduced.finding, reduced.actions)

    return Checker(f"walk: {name}", look, needs_vllm)


def of_target(target: str) -> MakeWorld:
    """Return a function that makes worlds of this target of `kvsm fuzz`."""
    return lambda random: draw_case(target, random).make()


def threads(*scopes: ThreadScope) -> Checker:
    """Return a checker that runs every schedule of these scopes.

    Each action of a trace is a thread switch.
    """

    def look() -> Sighting | None:
        for scope in scopes:
            explored = explore_schedules(scope, max_states=MOST_STATES)
            if explored.refutation is not None:
                steps = steps_of(scope, explored.refutation)
                return Sighting(explored.refutation.finding, switches_of(steps))
            if explored.verdict is not Verdict.PROVED:
                raise Unexplored(f"threads: {explored.verdict.name} after {explored.states} schedules")
        return None

    return Checker("exploration: threads", look)


def machine(name: str, tested: type[RuleBasedStateMachine], examples: int) -> Checker:
    """Return a checker that runs a Hypothesis machine on the same examples every time.

    The examples depend on the version of Hypothesis and on the loaded modules, whose constants it tries.
    """
    chosen = settings(
        tested.TestCase.settings,
        max_examples=examples,
        derandomize=True,
        database=None,
        # Health checks judge how fast examples come, which depends on the computer.
        suppress_health_check=list(HealthCheck),
    )

    def look() -> Sighting | None:
        try:
            run_state_machine_as_test(tested, settings=chosen)
        except HypothesisException:
            raise
        except Exception as error:
            return Sighting(finding_of(error), _steps_in_notes(error))
        return None

    return Checker(f"machine: {name}", look)


_STEP = re.compile(r"(?:\(?\w.* = )?state\.(?!teardown)\w+\(.*\)")


def _steps_in_notes(error: Exception) -> tuple[Action, ...]:
    """Return the steps of the smallest example, from the program that Hypothesis attaches to the error."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    # Some versions of Hypothesis put each argument on a line of its own.
    program = re.sub(r",\n\s+", ", ", re.sub(r"\(\n\s+", "(", re.sub(r",\n\s*\)", ")", notes)))
    return tuple((line,) for line in program.splitlines() if _STEP.fullmatch(line))


def serving(name: str, **options: Any) -> Checker:
    """Return a checker that explores a scope of the serving world."""
    made = _engine(**options)
    return exploration(f"serving, {name}", lambda: ServingModel(WorldScope(name, made)))


def one_future(name: str, ways: int, expansions: int, **options: Any) -> Checker:
    """Return a checker that compares each serving state's successors over several ways to the state."""
    made = _engine(**options)

    def look() -> Sighting | None:
        found = two_futures(ServingModel(WorldScope(name, made)), ways, expansions)
        return None if found is None else Sighting(*found)

    return Checker(f"exploration: {name}", look)


def copies(**options: Any) -> Checker:
    """Return a checker that explores the copy engine's world."""
    made = CopyEngineWorldOptions(**options)
    return exploration("copies", lambda: RerunModel("copies", "", lambda: CopyEngineWorld(made)))


def _engine(**options: Any) -> ServingOptions:
    """Return the options of an engine with one worker that steps until no work is pending.

    By default the engine has no prefix cache, because a hit on the device would bypass the host.
    """
    common = {"workers": 1, "last_step": LastStep.KEEP_STEPPING, "prefix_cache": False}
    return ServingOptions(**{**common, **options})


def _prompts(*lengths: int, outputs: int = 1) -> tuple[RequestSpec, ...]:
    """Return requests with a common prefix. The first one decodes `outputs` tokens, the others one token."""
    return tuple(
        RequestSpec(tuple(range(1, length + 1)), outputs if number == 0 else 1)
        for number, length in enumerate(lengths)
    )


VLLM_WALK = seeded_walk("vllm", adapted, runs=60, seed=2, needs_vllm=True)
VLLM_LIVES = seeded_walk("vllm lives", lived, runs=30, seed=2, needs_vllm=True)
VLLM_TROUBLES = seeded_walk("vllm troubles", troubled, runs=60, seed=2, needs_vllm=True)
ADAPTER_CHECKERS = (VLLM_LIVES, VLLM_TROUBLES, VLLM_WALK)
"""The checkers that run `KvsmConnector`, and need vLLM."""

CHECKERS = (
    # When the first request ends, its second block lacks only the KV of the last sampled token.
    serving(
        "disturbed",
        requests=_prompts(7, 9),
        device_blocks=3,
        slots=2,
        budgets=Budgets(failures=1, aborts=1, resets=1),
    ),
    serving(
        "without references",
        requests=_prompts(7, 5, outputs=5),
        device_blocks=3,
        slots=2,
        references=False,
        defer_ticks=0,
        budgets=Budgets(preemptions=1),
    ),
    serving(
        "in chunks",
        requests=_prompts(9, 9, outputs=3),
        device_blocks=3,
        slots=2,
        chunk_tokens=4,
        defer_ticks=0,
        budgets=Budgets(preemptions=1),
    ),
    serving(
        "lazy",
        requests=_prompts(13, 5),
        device_blocks=5,
        slots=5,
        store=StoreMode.LAZY,
        prefix_cache=True,
        chunk_tokens=4,
        budgets=Budgets(preemptions=1, resets=1),
    ),
    # The third prompt repeats the first one, which the second has evicted from the host.
    serving(
        "with a router",
        router=True,
        requests=(*_prompts(5), RequestSpec((51, 52, 53, 54, 55)), *_prompts(5)),
        device_blocks=3,
        slots=1,
    ),
    copies(device_blocks=1, kernels=1, holds=1, copies=1, bad=1),
    seeded_walk("core", lambda random: CoreWorld(draw_options(random)), runs=48),
    # The process is killed in any state, and the next process takes over.
    serving(
        "killed",
        requests=_prompts(5, 5),
        device_blocks=3,
        slots=2,
        budgets=Budgets(resets=1, crashes=1),
    ),
    seeded_walk("disk", of_target("disk"), runs=3),
    seeded_walk("tiers", of_target("tiers"), runs=64),
    seeded_walk("serving", of_target("serving"), runs=8),
    # A second ledger folds the log beside the world, and saved states are resumed.
    seeded_walk("audited core", audited_core, runs=32, seed=2),
    seeded_walk("audited tiers", audited_tiers, runs=12, seed=2),
    seeded_walk("audited serving", audited_serving, runs=10, seed=2),
    # Do the checks object to a ledger or log with one thing wrong?
    seeded_walk("wrong books of a core", wrong_books_of_a_core, runs=32, seed=2),
    seeded_walk("wrong books of tiers", wrong_books_of_tiers, runs=4, seed=2),
    # Engines, workloads and ends of processes that the targets of `kvsm fuzz` do not draw.
    seeded_walk("serving with layers", layered_serving, runs=120, seed=2),
    seeded_walk("serving with sessions", session_serving, runs=20, seed=2),
    seeded_walk("serving from the free queue", lazy_serving, runs=20, seed=2),
    seeded_walk("workers", lambda random: WorkerRanksWorld(draw_worker_ranks(random)), runs=40, seed=2),
    # How much of a log is written before its effects are visible, and how the next process starts from it.
    seeded_walk("log ahead", log_ahead, runs=6, seed=2),
    seeded_walk("restarts", of_target("restarts"), runs=6, seed=2),
    seeded_walk("hand-over", of_target("hand-over"), runs=30, seed=2),
    machine("scheduler", OffloadMachine, examples=300),
    threads(
        *(
            msgspec.structs.replace(THREAD_SCOPES[name], preemptions=1, required=False)
            for name in (
                "copies",
                "closing",
                "dying",
                "verifying",
                "log",
                "disk",
                "dead-submitters",
                "closed-twice",
                "disk-interval",
            )
        )
    ),
    seeded_walk("router", routed_serving, runs=30, seed=2),
    seeded_walk("eras", of_target("eras"), runs=8),
    # Engines with more features than the small engine of the other scopes.
    seeded_walk("serving, partial hits", partial_hits, runs=120, seed=3),
    seeded_walk("serving, chunks and drafts", chunks_and_drafts, runs=70, seed=2),
    seeded_walk("serving, names and sessions", names_and_sessions, runs=40, seed=2),
    seeded_walk("serving, second thoughts", second_thoughts, runs=40, seed=2),
    seeded_walk("serving, lost loads", lost_loads, runs=40, seed=2),
    seeded_walk("serving, lazy and eager", lazy_and_eager, runs=40, seed=2),
    # Large batches, few keys with many disturbances, loads beside hand-overs, and a disk that fails.
    seeded_walk("large core", large_core, runs=8, seed=2),
    seeded_walk("policies", of_target("policies"), runs=12, seed=2),
    seeded_walk("crowded core", crowded_core, runs=60, seed=4),
    seeded_walk("hand-over with loads", loading_hand_over, runs=120, seed=2),
    seeded_walk("log", of_target("log"), runs=100, seed=2),
    # More runs, of engines in which a bug may show only once in some hundred runs.
    seeded_walk("serving with layers, again", layered_serving, runs=80, seed=7),
    seeded_walk("serving, chunks and drafts, again", chunks_and_drafts, runs=100, seed=4),
    # Stores wait for room and for other copies, so a state depends much on which store was tried when.
    one_future(
        "one future",
        ways=3,
        expansions=1_000,
        requests=(*_prompts(15, 15, outputs=2), RequestSpec(tuple(range(201, 216)))),
        device_blocks=26,
        slots=2,
        groups=(KVCacheGroup(4), KVCacheGroup(4, drafter=True)),
        drafts=1,
        chunk_tokens=4,
        blocks_per_chunk=2,
        max_live_transfers=1,
        defer_ticks=2,
        last_step=LastStep.FLUSH,
    ),
    # Scheduler, host pool, disk tier and log together, over processes.
    seeded_walk("whole", of_target("whole"), runs=120),
    *(ADAPTER_CHECKERS if VLLM_IS_THERE else ()),
)
"""The checkers that can run here: without vLLM, all but `ADAPTER_CHECKERS`."""
