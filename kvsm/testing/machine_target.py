"""Run a state machine of Hypothesis as a target of `kvsm fuzz`: a machine of `kvsm.testing`, or any other.

A run of a walk is a handful of examples. Hypothesis generates half of them, with a seed made from the walk's
seed and the run's number. The other half is drawn from bytes (Hypothesis' `fuzz_one_input`). These bytes are
random, or made from the bytes of earlier examples that reached something new: so the corpus guides a machine.
Hypothesis shrinks a failure of either half.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis.control import current_build_context
from hypothesis.core import decode_failure
from hypothesis.database import ExampleDatabase, choices_to_bytes
from hypothesis.errors import DidNotReproduce, FlakyFailure
from hypothesis.reporting import with_reporter
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test

from kvsm.check.walks.corpus import CorpusEntry
from kvsm.check.walks.failures import (
    FILE,
    SavedFailure,
    encoded,
    name_of_test,
    replace_files,
    replace_log,
    slug_of,
)
from kvsm.check.walks.fuzz_target import MOST_REDUCING, FuzzTarget, Redone, Shortened
from kvsm.check.walks.guided import GUIDED, chance_of
from kvsm.check.walks.reduce import reduce_pieces
from kvsm.check.walks.walk import NewlyReached, RunMaker, WalkedRun, WalkFailure
from kvsm.check.walks.watch import Watch, watching
from kvsm.check.worlds.world import Action, Finding, finding_of
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.system.stopping import CutShort, IsOver, go_on_unless, never
from kvsm.testing import recording

GENERATED, FROM_BYTES = 10, 10
"""Number of examples of a run that Hypothesis generates, and number that are drawn from bytes."""
LENGTHS = (200, 800, 3000)
"""Lengths of random bytes that an example may draw from. It uses as many bytes as it needs."""

_ALWAYS: dict[str, Any] = {
    "deadline": None,
    "derandomize": False,  # Hypothesis sets it under CI
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),  # they judge how fast a computer is
}
_BLOB = re.compile(r"@reproduce_failure\('[^']+', (b'[^']*')\)")
_NOISE = ("Retried draw from ", "gave up because", "invalid because")
"""Beginnings of events that Hypothesis itself reports, not the machine."""


class MachineOptions(msgspec.Struct, frozen=True):
    """What is needed to repeat a failure of a machine: `@reproduce_failure(version, blob)`.

    version: the version of Hypothesis.
    trace: the lines that the machine printed when it failed.
    """

    version: str
    blob: str
    trace: tuple[str, ...] = ()


class MachineTarget(FuzzTarget):
    """A machine by its import path."""

    def __init__(self, name: str, machine: type[RuleBasedStateMachine]) -> None:
        super().__init__(name)
        self._machine = machine

    def runs(self, seed: int) -> RunMaker:
        return MachineRuns(self._machine, seed, None, frozenset())

    def guided_runs(self, seed: int, entries: Sequence[CorpusEntry], known: Collection[str]) -> RunMaker:
        return MachineRuns(self._machine, seed, [_choices(entry) for entry in entries], known)

    def check_entry(self, entry: CorpusEntry) -> None:
        try:
            found = bool(_choices(entry))
        except ValueError as error:
            raise ConfigError(f"its choices are not hexadecimal: {error}") from error
        if not found:
            raise ConfigError("it has no choices")

    def entry(self, seed: int, reached: NewlyReached, entries: Sequence[CorpusEntry]) -> CorpusEntry:  # noqa: ARG002
        return CorpusEntry(target=self.name, seed=seed, run=reached.run, choices=reached.choices.hex())

    def redo(self, entry: CorpusEntry) -> Redone:
        features, finding = _Examples(self._machine).from_bytes(_choices(entry))
        return Redone(features, None if finding is None else WalkFailure(entry.run, (), finding))

    def shortened(self, entry: CorpusEntry, wanted: Collection[str]) -> Shortened:
        needed, examples = frozenset(wanted), _Examples(self._machine)

        def tried(fewer: Sequence[int]) -> Sequence[int] | None:
            if examples.made >= MOST_REDUCING:
                raise StopIteration
            return fewer if needed <= examples.from_bytes(bytes(fewer))[0] else None

        choices: Sequence[int] = _choices(entry)
        shorter = reduce_pieces(choices, tried)
        reduced = msgspec.structs.replace(entry, choices=bytes(shorter).hex(), reduced=True)
        return Shortened(reduced, examples.steps)

    def unreduced(self, seed: int, failure: WalkFailure, entries: Sequence[CorpusEntry]) -> SavedFailure:
        """Repeat the run that failed, to get the steps of the failing example."""
        corpus = [_choices(entry) for entry in entries] or None
        examples = _Examples(self._machine, _Found())
        MachineRuns(self._machine, seed, corpus, frozenset()).run_with(failure.run, examples)
        return self._saved(seed, failure, examples)

    def unreduced_entry(self, entry: CorpusEntry, failure: WalkFailure) -> SavedFailure:
        examples = _Examples(self._machine, _Found())
        examples.from_bytes(_choices(entry))
        return self._saved(entry.seed, failure, examples)

    def _saved(self, seed: int, failure: WalkFailure, examples: _Examples) -> SavedFailure:
        """Return the failure of these examples. It has no steps if Hypothesis cannot repeat it."""
        found, error = examples.failed_after, examples.found_again()
        steps, options = _repeatable(error)
        finding = failure.finding if error is None else _finding(error)
        return SavedFailure(
            target=self.name,
            options=msgspec.to_builtins(options),
            actions=steps,
            property=finding.property,  # type: ignore[arg-type]  # machines name only kvsm's properties
            message=finding.message,
            place=finding.place,
            seed=seed,
            run=failure.run,
            found=found,
            reruns=0,
            minimal=False,
        )

    def reduced(self, failure: SavedFailure, is_over: IsOver = never) -> SavedFailure:
        """Let Hypothesis shrink the failing example."""
        if is_over() or not _options(failure).blob:
            return failure
        examples = _Examples(self._machine, _Found(_example(_options(failure))), is_over)
        error, is_minimal = examples.shrink()
        if error is None:
            return failure
        steps, options = _repeatable(error)
        return msgspec.structs.replace(
            failure.after(steps, _finding(error)),
            options=msgspec.to_builtins(options),
            reruns=examples.made,
            minimal=is_minimal,
        )

    def again(self, failure: SavedFailure) -> SavedFailure | None:
        finding = self._repeated(failure)
        if finding is None:
            return None
        return failure.after(failure.actions, finding)

    def _repeated(self, failure: SavedFailure) -> Finding | None:
        options = _options(failure)
        if options.version != hypothesis.__version__:
            raise ConfigError(
                f"the failure was found with Hypothesis {options.version}, and only that can repeat it; this "
                f"is {hypothesis.__version__}: pip install hypothesis=={options.version}"
            )
        return _Examples(self._machine).repeat(options)

    def told(self, failure: SavedFailure) -> str:
        many = len(failure.actions)
        steps = f"{many} {'step' if many == 1 else 'steps'}, {_how_shrunk(failure)}"
        lines = [f"{failure.target}: {failure.property} is broken: {steps}"]
        lines.append(f"  seed {failure.seed}, run {failure.run}")
        lines += [f"  {number}. {step}" for number, (step,) in enumerate(failure.actions, 1)]
        return "\n".join([*lines, f"broken: {failure.finding()}", *_options(failure).trace])

    def save(self, failure: SavedFailure, directory: Path) -> None:
        files = {
            FILE: encoded(failure),
            name_of_test(failure): regression_test(failure).encode(),
            "steps.txt": (self.told(failure) + "\n").encode(),
        }
        replace_files(directory, files)
        self._repeated(failure)  # So that the remembered events are those of its core.
        if recording.remembered():
            replace_log(directory, lambda log: recording.save(recording.remembered(), log))


def _how_shrunk(failure: SavedFailure) -> str:
    if not failure.reruns:
        return "not shrunk"
    return f"shrunk from {failure.found} by Hypothesis{'' if failure.minimal else ', which was cut short'}"


def _choices(entry: CorpusEntry) -> bytes:
    return bytes.fromhex(entry.choices)


def _options(failure: SavedFailure) -> MachineOptions:
    try:
        return msgspec.convert(failure.options, MachineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of target {failure.target}: {error}") from error


def _finding(error: BaseException) -> Finding:
    """Convert an example's error to a finding. An assertion of the user's own machine is a finding too."""
    if isinstance(error, PropertyBroken) or not isinstance(error, AssertionError):
        return finding_of(error)  # type: ignore[arg-type]
    found = finding_of(error)
    return Finding(found.property, f"the machine says: {error}" if str(error) else "an assertion failed")


def _repeatable(error: BaseException | None) -> tuple[tuple[Action, ...], MachineOptions]:
    """Return the steps of a failing example, and what repeats it; nothing for an error without notes."""
    notes = "\n".join(getattr(error, "__notes__", []))
    steps, trace = _program(notes)
    blob = _BLOB.search(notes)
    options = MachineOptions(hypothesis.__version__, blob[1] if blob else "", trace)
    return tuple([(step,) for step in steps]), options


def _example(options: MachineOptions) -> bytes:
    """The failing example of a saved failure, as Hypothesis' database keeps it."""
    return choices_to_bytes(decode_failure(options.blob[2:-1].encode()))


def _program(notes: str) -> tuple[list[str], tuple[str, ...]]:
    """Parse Hypothesis' notes: the steps between creation and teardown, and the machine's trace."""
    lines = notes.splitlines()
    first = next((place for place, line in enumerate(lines) if line.startswith("state = ")), len(lines))
    end = next((place for place, line in enumerate(lines) if line == "state.teardown()"), len(lines))
    trace = [line for line in lines[end + 1 :] if line and not line.startswith("You can reproduce")]
    return lines[first + 1 : end], tuple(trace)


class MachineRuns(RunMaker):
    """Runs of a machine.

    corpus: the choices of the corpus' entries; None: there is no corpus, and features are not collected.
    known: features that earlier runs have reached.
    """

    def __init__(
        self,
        machine: type[RuleBasedStateMachine],
        seed: int,
        corpus: Sequence[bytes] | None,
        known: Collection[str],
    ) -> None:
        self._machine, self._seed, self._corpus, self._known = machine, seed, corpus, known

    def run(self, number: int, is_over: IsOver = never) -> WalkedRun:
        return self.run_with(number, _Examples(self._machine, is_over=is_over))

    def run_with(self, number: int, examples: _Examples) -> WalkedRun:
        """Run with this runner of examples, which keeps the failing one, if any."""
        reached: list[NewlyReached] = []
        known = set(self._known)
        finding = examples.generate(f"{self._seed}/{number}", GENERATED)
        for choices in self._drawn(number):
            if finding is not None:
                break
            features, finding = examples.from_bytes(choices)
            if self._corpus is not None and finding is None and not features <= known:
                known |= features
                reached.append(NewlyReached(number, features, (), choices))
        failure = None if finding is None else WalkFailure(number, (), finding)
        return WalkedRun(examples.steps, 0, failure, tuple(reached))

    def _drawn(self, number: int) -> Iterator[bytes]:
        """Yield the bytes from which a run's examples are drawn."""
        chance = chance_of(self._seed, number)
        for _ in range(FROM_BYTES):
            fresh = chance.randbytes(chance.choice(LENGTHS))
            if self._corpus and chance.random() < GUIDED:
                yield _changed(chance, self._corpus, fresh)
            else:
                yield fresh


def _changed(chance: Random, corpus: Sequence[bytes], fresh: bytes) -> bytes:
    """Change a random entry: a random continuation, some random bytes inside, or the end of another entry."""
    entry, other, way = chance.choice(corpus), chance.choice(corpus), chance.randrange(3)
    cut = chance.randrange(len(entry) + 1)
    if way == 0:
        return entry[:cut] + fresh
    if way == 1:
        many = chance.randrange(1, 9)
        return entry[:cut] + fresh[:many] + entry[cut + many :] + fresh[many:]
    return entry[:cut] + other[chance.randrange(len(other) + 1) :] + fresh


class _Found(ExampleDatabase):
    """Replaces Hypothesis' database: holds the smallest failing example so far, for Hypothesis to shrink."""

    def __init__(self, example: bytes | None = None) -> None:
        super().__init__()
        self.example = example

    def save(self, key: bytes, value: bytes) -> None:  # noqa: ARG002
        self.example = value

    def fetch(self, key: bytes) -> Iterable[bytes]:
        # Hypothesis assumes that examples under the primary key are shrunk already.
        return [self.example] if self.example is not None and key.endswith(b".secondary") else []

    def delete(self, key: bytes, value: bytes) -> None:
        """Do nothing, so that the example stays."""


class _Examples:
    """Runs examples of a machine, and counts them.

    steps: number of steps of all examples.
    made: number of examples.
    failed_after: number of steps of the first example that failed; 0: none has.
    """

    def __init__(
        self, machine: type[RuleBasedStateMachine], found: _Found | None = None, is_over: IsOver = never
    ) -> None:
        self._machine, self._found, self._is_over = machine, found, is_over
        self._settings = settings(machine.TestCase.settings, database=found, **_ALWAYS)
        self._fuzz: Callable[[bytes], bytes | None] | None = None
        self._data: Any = None
        self.steps = self.made = self.failed_after = 0
        self._steps_before = 0

    def generate(self, seed: str, many: int) -> Finding | None:
        """Let Hypothesis generate and run examples from a seed. Returns the failure, if there is one."""
        number = int.from_bytes(blake2b(seed.encode(), digest_size=8).digest(), "big")
        chosen = settings(self._settings, max_examples=many, phases=[Phase.generate], print_blob=True)
        error = self._error_of(hypothesis.seed(number)(self._test(chosen)))
        options = _repeatable(error)[1]
        if self._found is not None and options.blob:
            self._found.example = _example(options)  # Hypothesis stores none if the seed is fixed
        return None if error is None else _finding(error)

    def from_bytes(self, choices: bytes) -> tuple[frozenset[str], Finding | None]:
        """Run one example that draws from these bytes. Returns the features reached, and its failure."""
        if self._fuzz is None:
            self._fuzz = self._test(self._settings).hypothesis.fuzz_one_input
        fuzz = self._fuzz
        with watching() as watch:
            error = self._error_of(lambda: fuzz(choices))
            self._note_events(watch)
        return frozenset(watch.new), None if error is None else _finding(error)

    def found_again(self) -> BaseException | None:
        """Run the failing example that was found, and return its error."""
        return self._reuse([Phase.reuse])

    def shrink(self) -> tuple[BaseException | None, bool]:
        """Let Hypothesis shrink the failing example. Returns the error of the smallest one, and whether
        Hypothesis ended by itself."""
        with suppress(CutShort):
            return self._reuse([Phase.reuse, Phase.shrink]), True
        # Not inside of `except`: a machine's `teardown` winds down only if no exception is being handled.
        self._is_over = never
        return self.found_again(), False

    def _reuse(self, phases: Sequence[Phase]) -> BaseException | None:
        return self._error_of(self._test(settings(self._settings, phases=phases, print_blob=True)))

    def repeat(self, options: MachineOptions) -> Finding | None:
        """Run the example of a saved failure, and return what it raises now."""
        test = self._test(self._settings)
        blob = options.blob[2:-1].encode()
        error = self._error_of(hypothesis.reproduce_failure(options.version, blob)(test))
        return None if error is None or isinstance(error, DidNotReproduce) else _finding(error)

    def _error_of(self, call: Callable[[], object]) -> BaseException | None:
        with with_reporter(lambda _: None):  # The report is in the error's notes, too.
            try:
                call()
            except Exception as error:
                self.failed_after = self.failed_after or self.steps - self._steps_before
                # Flaky: it failed, and passed when Hypothesis repeated it. The first failure is the finding.
                return error.exceptions[0] if isinstance(error, FlakyFailure) else error
        return None

    def _test(self, chosen: settings) -> Any:
        # Hypothesis only calls its argument, so it need not be a class.
        return get_state_machine_test(self._make, settings=chosen)  # type: ignore[arg-type]

    def _make(self) -> RuleBasedStateMachine:
        """Make a machine that counts its steps, for one example. Raises `CutShort` if the work must stop."""
        go_on_unless(self._is_over)
        machine = self._machine()
        self.made += 1
        self._steps_before = self.steps
        self._data = current_build_context().data
        check = machine.check_invariants

        def counted(*arguments: Any, **options: Any) -> None:
            self.steps += 1
            go_on_unless(self._is_over)
            check(*arguments, **options)

        machine.check_invariants = counted  # type: ignore[method-assign]
        return machine

    def _note_events(self, watch: Watch) -> None:
        """Add the `hypothesis.event`s of the last example to the watched features."""
        events = getattr(self._data, "events", {})
        watch.say(
            f"{name}: {value}" if value not in ("", None) else str(name)
            for name, value in events.items()
            if not str(name).startswith(_NOISE)
        )


_TEST = '''"""{finding}

Found by `kvsm fuzz --target {target} --seed {seed}` in run {run}, and shrunk by Hypothesis {version}.
It fails until the bug is fixed.

{steps}
"""

from contextlib import suppress

from hypothesis import reproduce_failure
from hypothesis.errors import DidNotReproduce
from hypothesis.stateful import get_state_machine_test
from {module} import {machine}


def test_{name}_keeps_{property}() -> None:
    with suppress(DidNotReproduce):  # the bug is fixed
        reproduce_failure("{version}", {blob})(get_state_machine_test({machine}))()
'''


def regression_test(failure: SavedFailure) -> str:
    """The text of a test for pytest that repeats the failure."""
    options = _options(failure)
    module, _, machine = failure.target.partition(":")
    steps = "\n".join(["    state = " + machine + "()", *[f"    {step}" for (step,) in failure.actions]])
    return _TEST.format(
        finding=_quotable(str(failure.finding())),
        steps=_quotable(steps),
        target=failure.target,
        seed=failure.seed,
        run=failure.run,
        version=options.version,
        blob=options.blob,
        module=module,
        machine=machine,
        name=slug_of(failure),
        property=failure.property.name.lower(),
    )


def _quotable(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")
