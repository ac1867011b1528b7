"""Prove a declaration for any size: give all of its conditions to each solver."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker

import msgspec

from kvsm.check.explore.explorer import noticing_interrupts
from kvsm.check.explore.model import INTERRUPT, Verdict
from kvsm.check.proof.conditions import NO_STEP, Condition, Induction
from kvsm.check.proof.counting_lemma import CountingLemma
from kvsm.check.proof.progress_proof import WINDING_DOWN, ProgressProof
from kvsm.check.proof.smt import Sizes
from kvsm.check.proof.solvers import SOLVERS, Answer, Solver
from kvsm.check.protocol.terms import Declaration

_Question = tuple[str, str, Condition]
"""Solver, version, condition."""


class ProofProgress(msgspec.Struct, frozen=True):
    """How far a proof is.

    answered: answers so far.
    questions: answers that are needed in total.
    open: answers so far that are no proof.
    seconds: wall time.
    """

    answered: int
    questions: int
    open: int
    seconds: float


class OpenCondition(msgspec.Struct, frozen=True):
    """A condition that a solver did not prove.

    step: the action or forget after which the claim may not hold.
    answer: FAILS if there is a model, OPEN if the solver found nothing within its limits.
    """

    version: str
    step: str
    claim: str
    solver: str
    answer: Answer


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The result.

    versions: the names of what was proved together.
    conditions: the distinct conditions; the same condition of two versions counts once.
    proved: solver -> the number of conditions that it proved.
    cpu_seconds: solver -> the time of its processes.
    open: the conditions that at least one solver did not prove.
    limit: what ended the proof early.
    """

    versions: tuple[str, ...]
    conditions: int
    proved: dict[str, int]
    cpu_seconds: dict[str, float]
    open: tuple[OpenCondition, ...]
    seconds: float
    limit: str = ""

    @property
    def verdict(self) -> Verdict:
        """PROVED if every solver proved every condition.

        A failed condition alone refutes nothing, because its state may be unreachable.
        """
        return Verdict.UNDETERMINED if self.open or self.limit else Verdict.PROVED


def conditions_of(
    declared: Declaration, sizes: Sizes | None = None, step: str | None = None
) -> Iterator[Condition]:
    """The conditions of claims, invariants, the counting lemma and progress.

    step: the name of a step whose conditions are wanted; None for all steps.
    """
    induction = Induction(declared, sizes)
    counting, progress = CountingLemma(induction), ProgressProof(induction)
    if step in (None, NO_STEP.name):
        yield from induction.at_first()
    for one in induction.steps:
        if step in (None, one.name):
            yield from induction.kept(one)
            yield from counting.kept(one)
            yield from progress.kept(one)
    if step in (None, WINDING_DOWN):
        yield from progress.at_rest()


def prove(
    versions: Mapping[str, Declaration],
    solvers: Sequence[Solver],
    jobs: int = 1,
    progress: Callable[[ProofProgress], None] | None = None,
) -> Proof:
    """Give each condition of each version to each solver, in `jobs` processes. Ctrl-C ends it early."""
    names = [solver.name for solver in solvers]
    asked: dict[tuple[str, ...], tuple[str, Condition]] = {}
    began, proved, spent = time.monotonic(), dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    opened: list[OpenCondition] = []
    limit = ""
    try:
        for version, declared in versions.items():
            for condition in conditions_of(declared):
                asked.setdefault(condition.texts, (version, condition))
        questions = [(solver.name, version, one) for version, one in asked.values() for solver in solvers]
        for answered, (question, answer, seconds) in enumerate(_answers(questions, jobs), 1):
            name, version, one = question
            spent[name] += seconds
            proved[name] += answer is Answer.HOLDS
            if answer is not Answer.HOLDS:
                opened.append(OpenCondition(version, one.step, one.claim, name, answer))
            if progress is not None:
                took = time.monotonic() - began
                progress(ProofProgress(answered, len(questions), len(opened), took))
    except KeyboardInterrupt:
        limit = INTERRUPT
    return Proof(
        versions=tuple(versions),
        conditions=len(asked),
        proved=proved,
        cpu_seconds=spent,
        open=tuple(sorted(opened, key=lambda one: (one.version, one.step, one.claim, one.solver))),
        seconds=time.monotonic() - began,
        limit=limit,
    )


def _answers(questions: Sequence[_Question], jobs: int) -> Iterator[tuple[_Question, Answer, float]]:
    """Yield the answers as they arrive, each with its CPU time (s). With one job no process is started."""
    if jobs == 1:
        for question in questions:
            yield question, *_ask(question[0], question[2])
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as processes:
        try:
            with _interrupts_held():
                running = {processes.submit(_ask, one[0], one[2]): one for one in questions}
            for future in as_completed(running):
                yield running[future], *future.result()
        finally:
            processes.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C. Processes that start in this block keep it blocked; this process ends them.

    A handler that the new processes set would come too late for a Ctrl-C during their imports. In this
    process another thread may take the signal, and Python would then interrupt the start of a process. So the
    signal is noticed, and raised at the end.
    """
    resource_tracker.ensure_running()  # its start unblocks the signal
    search = _Interrupted()
    with noticing_interrupts(search):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if search.is_interrupted:
        raise KeyboardInterrupt


class _Interrupted:
    """Whether Ctrl-C came while it was held."""

    is_interrupted = False


def _ask(solver: str, condition: Condition) -> tuple[Answer, float]:
    began = time.process_time()
    return SOLVERS[solver].answer(condition), time.process_time() - began
