"""A failure that a walk found: rendered for people, and saved so that it can be repeated.

The directory of a failure contains

    actions.json    the world, its actions, the broken property, and the seed of the walk
    steps.txt       the same for people: what each action changed, and why the end is wrong
    log/            the events of the core, for `kvsm show`, `kvsm verify`, `kvsm replay`; absent if the bug
                    skips or repeats the number of an event, because then the events make no log
    test_*.py       a test that fails until the bug is fixed
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

import msgspec

from kvsm.check.explore.counterexample import render, retell, save_log
from kvsm.check.explore.model import Refutation
from kvsm.check.explore.rerun import RerunModel
from kvsm.check.walks.option_trust import refuse_named
from kvsm.check.walks.reduce import NotRepeated, Reduction, reduce, rerun
from kvsm.check.walks.targets import WalkCase, case_of
from kvsm.check.walks.walk import WalkFailure
from kvsm.check.worlds.world import Action, Finding
from kvsm.errors import ConfigError, LogError
from kvsm.properties import Property
from kvsm.system.private_files import write_whole
from kvsm.system.stopping import IsOver, never

FILE = "actions.json"


class SavedFailure(msgspec.Struct, frozen=True, kw_only=True, rename={"property": "property_id"}):
    """The content of `actions.json`.

    options: the world's options, as builtins.
    actions: the actions, after reduction.
    found: the number of actions before reduction.
    reruns: how many reruns the reduction took; 0: the failure is as it was found.
    place: the line that raised the error, "FILE:LINE"; empty if that is irrelevant.
    minimal: whether no single action can be removed; false if a limit or a signal ended the reduction.
    systematic: the greatest length of the schedules in a search of all short ones; 0 for a random walk.
    run: the number of the run, or of the schedule in such a search.
    walked: the target that was walked, if it has several worlds: all. Empty: the target of this world.
    """

    def found_by(self) -> str:
        """The options of the command that found it."""
        return f"--systematic {self.systematic}" if self.systematic else f"--seed {self.seed}"

    target: str
    options: dict[str, Any]
    actions: tuple[tuple[str | int, ...], ...]
    property: Property
    message: str
    place: str = ""
    seed: int
    run: int
    found: int
    reruns: int
    minimal: bool = True
    systematic: int = 0
    walked: str = ""

    def how_reduced(self) -> str:
        """How far the failure was reduced, for people."""
        if not self.reruns:
            return "not reduced"
        cut = "" if self.minimal else "; the reduction was cut short"
        return f"reduced from {self.found} in {self.reruns} reruns{cut}"

    def finding(self) -> Finding:
        """The broken property, its message and its place."""
        return Finding(self.property, self.message, self.place)

    def after(self, actions: tuple[Action, ...], finding: Finding) -> SavedFailure:
        """A copy of this failure with other actions and their finding."""
        return msgspec.structs.replace(self, actions=actions, **_fields(finding))

    def case(self) -> WalkCase:
        """The case of its world. Raises `ConfigError` if this version of kvsm does not have this world."""
        return case_of(self.target, self.options)


def slug_of(failure: SavedFailure) -> str:
    """The target's name, fit for names of files and functions."""
    return re.sub(r"\W+", "_", failure.target)


def unreduced(case: WalkCase, seed: int, failure: WalkFailure, systematic: int = 0) -> SavedFailure:
    """Return the failure of a run, not yet reduced."""
    return SavedFailure(
        target=case.target,
        options=msgspec.to_builtins(case.options),
        actions=failure.actions,
        **_fields(failure.finding),
        seed=seed,
        run=failure.run,
        found=len(failure.actions),
        reruns=0,
        minimal=False,
        systematic=systematic,
    )


def reduced(failure: SavedFailure, is_over: IsOver = never) -> SavedFailure:
    """Reduce a failure that was not reduced.

    If its actions do not repeat it, it stays unreduced, and is reported as broken determinism.

    is_over: asked between two actions; if it returns True, the smallest failure so far is kept.

    Broken determinism shows only between two processes, so its actions are not reduced.
    """
    if is_over() or failure.property is Property.DETERMINISM:
        return failure
    case, found = failure.case(), failure.finding()
    try:
        reduction = reduce(case.make, failure.actions, found, is_over=is_over)
        case, reduction = _reduced_with_requests(case, reduction, is_over)
    except NotRepeated as error:
        finding = Finding(Property.DETERMINISM, f"{error}; it was: {found}")
        reduction = Reduction(failure.actions, finding, 1, True)
    return msgspec.structs.replace(
        failure.after(reduction.actions, reduction.finding),
        options=msgspec.to_builtins(case.options),
        reruns=reduction.reruns,
        minimal=reduction.minimal,
    )


def _fields(finding: Finding) -> dict[str, Any]:
    """A finding as fields of a `SavedFailure`. Worlds report only properties of kvsm."""
    assert isinstance(finding.property, Property)
    return {"property": finding.property, "message": finding.message, "place": finding.place}


def _reduced_with_requests(
    case: WalkCase, reduction: Reduction, is_over: IsOver
) -> tuple[WalkCase, Reduction]:
    """Remove requests from the options together with their arrivals, then reduce further.

    Requests arrive in the order of the options, so without an arrival alone another request would take its
    place. Requests that never arrived are removed, too.
    """
    if not isinstance(getattr(case.options, "requests", None), tuple):
        return case, reduction
    actions, finding, reruns = reduction.actions, reduction.finding, reduction.reruns
    arrivals = sum(action[0] == "arrive" for action in actions)
    case = _with_requests(case, case.options.requests[:arrivals])  # type: ignore[attr-defined]
    for number in reversed(range(arrivals)):
        if is_over():
            break
        requests = case.options.requests  # type: ignore[attr-defined]
        fewer = _with_requests(case, requests[:number] + requests[number + 1 :])
        outcome = rerun(fewer.make, _without_arrival(actions, number), to_rest=True)
        reruns += 1
        if outcome.finding is not None and outcome.finding.property == finding.property:
            case, actions, finding = fewer, outcome.actions, outcome.finding
    again = reduce(case.make, actions, finding, is_over=is_over)
    return case, msgspec.structs.replace(again, reruns=reruns + again.reruns)


def _with_requests(case: WalkCase, requests: tuple[Any, ...]) -> WalkCase:
    return WalkCase(case.target, msgspec.structs.replace(case.options, requests=requests))


def _without_arrival(actions: tuple[Action, ...], number: int) -> tuple[Action, ...]:
    places = [place for place, action in enumerate(actions) if action[0] == "arrive"]
    return actions[: places[number]] + actions[places[number] + 1 :]


def told(failure: SavedFailure) -> str:
    """The failure as text: numbered steps, the broken property, and where to look first."""
    case = failure.case()
    found_by = f"systematic {failure.systematic}" if failure.systematic else f"seed {failure.seed}"
    bounds = f"{found_by}, run {failure.run}: {_options_text(case.options)}"
    model = RerunModel(f"{failure.target} world", bounds, case.make)
    lines = render(retell(model, Refutation(failure.finding(), failure.actions))).splitlines()
    # Replace the first line of `render`, which gives the length of a shortest path: only a search finds that.
    steps = "step" if len(failure.actions) == 1 else "steps"
    size = f"{len(failure.actions)} {steps}, {failure.how_reduced()}"
    return "\n".join([f"{failure.target}: {failure.property} is broken: {size}", *lines[1:]])


def _options_text(options: msgspec.Struct) -> str:
    return ", ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(options).items())


def save(failure: SavedFailure, directory: Path) -> None:
    """Write the files named above to a claimed directory, in place of those of the same failure.

    The file that `read` needs is written first, so the failure is saved even if the process is killed here.

    Raises `LogError`.
    """
    test = regression_test(failure).encode()
    replace_files(directory, {FILE: encoded(failure), name_of_test(failure): test})
    events = rerun(failure.case().make, failure.actions).world.events
    if events and [event.seq for event in events] == [*range(events[0].seq, events[-1].seq + 1)]:
        replace_log(directory, lambda log: save_log(events, log))
    replace_files(directory, {"steps.txt": (told(failure) + "\n").encode()})


def encoded(failure: SavedFailure) -> bytes:
    """The content of `actions.json`."""
    return msgspec.json.format(msgspec.json.encode(failure), indent=1)


def name_of_test(failure: SavedFailure) -> str:
    """The name of the file of its test."""
    return f"test_{slug_of(failure)}_{failure.seed}_{failure.run}.py"


def replace_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write each file whole, in place of an older one. Raises `LogError`."""
    try:
        for name, content in contents.items():
            # Do not write through a link that another user may have placed here: replace the link.
            write_whole(directory / name, content)
    except OSError as error:
        raise LogError(f"{directory}: {error}") from error


def replace_log(directory: Path, write: Callable[[Path], None]) -> None:
    """Write `log/`, in place of an older one. write: writes a log to a new directory. Raises `LogError`."""
    write(directory / "log.new")
    try:
        if (directory / "log").exists():
            shutil.rmtree(directory / "log")
        (directory / "log.new").rename(directory / "log")
    except OSError as error:
        raise LogError(f"{directory}: {error}") from error


def claim(directory: Path) -> None:
    """Create the directory if it is absent. Raises `LogError` unless it is empty."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise LogError(f"{directory}: not empty; a failure is written to a directory of its own")
    except OSError as error:
        raise LogError(f"{directory}: {error}") from error


def read(directory: Path) -> SavedFailure:
    """Read a saved failure. Raises `ConfigError` if there is none or it is unreadable."""
    path = directory / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedFailure)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a directory that `kvsm fuzz` has written"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def load(directory: Path, given: Mapping[str, Collection[Any]] | None = None) -> SavedFailure:
    """Read a saved failure of a world of kvsm. Raises `ConfigError`, also if it names untrusted code or
    paths.

    given: the values that the user trusts, by option: {"policy": ["package.module:Class"]}.
    """
    failure = read(directory)
    try:
        refuse_named(failure.case().options, given or {})
    except ConfigError as error:
        raise ConfigError(f"{directory / FILE}: {error}") from error
    return failure


_TEST = '''"""{finding}

Found by `{command} {found_by}` in run {run}, and reduced from {found} actions.
It fails until the bug is fixed.
"""

from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.targets import case_of

OPTIONS = {options}

ACTIONS = {actions}


def test_{name}_keeps_{property}() -> None:
    outcome = rerun(case_of("{target}", OPTIONS).make, ACTIONS, to_rest=True)
    assert outcome.finding is None, str(outcome.finding)
'''

_TEST_OF_TWO_PROCESSES = '''"""{finding}

Found by `{command} {found_by}` in run {run}: the logs of two processes differ.
It fails until the bug is fixed.
"""

from kvsm.check.walks.repeated import differing_log
from kvsm.check.walks.targets import case_of

OPTIONS = {options}

ACTIONS = {actions}


def test_{name}_keeps_{property}() -> None:
    finding = differing_log(case_of("{target}", OPTIONS), ACTIONS)
    assert finding is None, str(finding)
'''


def regression_test(failure: SavedFailure) -> str:
    """The source of a pytest test that needs only kvsm."""
    unsteady = failure.property is Property.DETERMINISM and not failure.reruns
    text = _TEST_OF_TWO_PROCESSES if unsteady else _TEST
    return text.format(
        finding=str(failure.finding()).replace("\\", "\\\\").replace('"""', "'''"),
        target=failure.target,
        command=_command(failure),
        found_by=failure.found_by(),
        name=slug_of(failure),
        run=failure.run,
        found=failure.found,
        options=pformat(failure.options, width=100, sort_dicts=False),
        actions=_listed(failure.actions),
        property=failure.property.name.lower(),
    )


def _command(failure: SavedFailure) -> str:
    """The command whose walk found the failure, without the seed."""
    connector = failure.options.get("connector")
    if connector is not None:
        return f"kvsm vllm-fuzz --connector {connector}"
    return f"kvsm fuzz --target {failure.walked or failure.target}"


def _listed(actions: tuple[Action, ...]) -> str:
    return "\n".join(["[", *[f"    {action!r}," for action in actions], "]"])
