"""`kvsm museum`: put known bugs of other systems into kvsm one by one, and show which checker finds each.

`--mutants` does the same with wrong versions of kvsm's own code. The bugs and the mutants change the source,
so they are not in the wheel but in `specs/museum/` and `specs/mutants/` of the source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.findings import ToldFinding, told_finding
from kvsm.cli.jobs_options import cluster_option, executor_of_processes
from kvsm.cli.output import Command, say, say_json, say_text
from kvsm.errors import ConfigError
from kvsm.system.executors.executor import Executor

UNCHANGED = "the unchanged code"
ROOT = Path(__file__).resolve().parents[2]


class MuseumAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.museum/1"):
    """What `kvsm museum --json` prints: one line for each exhibit, and one for the unchanged code.

    checker: the first checker that found the bug; empty if none did.
    also: the other checkers that found it, with --all.
    finding: what the checker reported.
    trace: the actions up to the one that revealed the bug.
    steps: number of actions in the trace.
    seconds: time of the search.
    cut: whether time ran out before every checker had run.
    """

    id: str
    checker: str
    also: tuple[str, ...]
    finding: ToldFinding | None
    trace: tuple[tuple[str | int, ...], ...]
    steps: int
    seconds: float
    cut: bool


class ListedExhibit(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.museum-list/1"):
    """What `kvsm museum --list --json` prints: one line for each exhibit.

    source: where the bug was reported; of a mutant, the part of kvsm that is wrong.
    """

    id: str
    source: str
    property_id: str
    title: str


@click.command(cls=Command)
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--mutants", is_flag=True, help="Search for all mutants instead of the exhibits.")
@click.option("--list", "only_list", is_flag=True, help="List the exhibits; search for none.")
@click.option("--show", metavar="ID", help="Describe one exhibit and show its change.")
@click.option("--all", "all_look", is_flag=True, help="Run every checker, even after one has found the bug.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Processes.  [default: 2; one per CPU of the cluster with --cluster]",
)
@cluster_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    help="Start no further checker for an exhibit after this time.  [default: no limit]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line per exhibit.")
@click.pass_context
def museum(
    context: click.Context,
    ids: tuple[str, ...],
    mutants: bool,
    only_list: bool,
    show: str | None,
    all_look: bool,
    jobs: int | None,
    cluster: str | None,
    seconds: float | None,
    as_json: bool,
) -> None:
    """Put known bugs into kvsm; test whether the checkers see them.

    Each exhibit is a bug of a public KV offload system, with the smallest change of kvsm's code that brings
    it back. The checkers are the same for every bug. They explore small worlds, walk through them at random,
    run Hypothesis machines, and report what they saw and a short trace. The search for a bug ends with the
    first checker that sees it, unless --all is given. The unchanged code comes last: the checkers must see
    nothing in it. The steps are printed for exhibits that are named. "kvsm refuses it" means that the ledger
    rejects the step in which the bug would happen.

    Mutants, M01 and so on, are wrong versions of kvsm's own code. They were chosen without regard to what the
    checkers see, to estimate how many bugs of an unknown kind would be found. Many are not found:
    specs/mutants/README.md says which, and why.

    The exhibits change kvsm's source, so an installed wheel has none. Call this in a clone of the repository
    or in the unpacked source distribution, after `pip install -e '.[test]'` there.

    \b
    Exit codes: 0 all found; 1 one escaped, or the unchanged code was not clean; 2 unusable input, or a
    process was killed; 3 undetermined, because --seconds came first.

    \b
    kvsm museum                 all exhibits, some minutes
    kvsm museum B17 B24         two of them, with the steps that lead there
    kvsm museum --show B17      its story and its change as a diff
    kvsm museum --mutants       all mutants, half an hour
    kvsm museum --mutants --cluster ray://head:10001      on many machines, each with the source
    """
    search = _import_museum("museum.search")
    for id in (*ids, *([show] if show else [])):
        if id not in search.BUGS:
            raise click.UsageError(
                f"there is no exhibit {id}; see kvsm museum --list, with --mutants or not."
            )
    chosen = ids or tuple(search.MUTANTS if mutants else search.EXHIBITS)
    if show:
        say_text(_story(search.BUGS[show]))
    elif only_list:
        _list([search.BUGS[id] for id in chosen], as_json)
    else:
        sought = (*chosen, search.CLEAN)
        with executor_of_processes(cluster, jobs if cluster else jobs or 2) as executor:
            results = search_all(sought, executor, seconds, all_look=all_look)
            code = _tell(search, results, as_json=as_json, with_steps=bool(ids))
        context.exit(code)


def search_all(
    ids: Sequence[str], executor: Executor, seconds: float | None = None, *, all_look: bool = False
) -> Iterator[Any]:
    """Search for many exhibits (`museum.search.search`). Results come in the order of `ids`.

    Each search has its own process, so its change of the code is gone when the process ends.
    """
    task = partial(_search, seconds=seconds, all_look=all_look)
    with executor.results(task, ids, name="the search for {}".format, fresh=True) as results:
        yield from results


def _search(id: str, *, seconds: float | None, all_look: bool) -> Any:
    """Search for one exhibit. Imports the museum first: a worker process may not have done so."""
    return _import_museum("museum.search").search(id, seconds, all_look=all_look)


def _import_museum(name: str) -> Any:
    """Import a module of the museum. Adds the tests' helpers to the path, because scenarios use them."""
    if not (ROOT / "specs" / "museum" / "__init__.py").is_file():
        raise ConfigError(
            "the museum is not in the package: it changes kvsm's source; clone the repository or unpack the "
            "source distribution, `pip install -e '.[test]'` there, and call `kvsm museum` again"
        )
    for folder in ("specs", "tests/support"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the museum needs {error.name}; pip install -e '.[test]'") from error


def _list(exhibits: Sequence[Any], as_json: bool) -> None:
    if as_json:
        for bug in exhibits:
            say_json(ListedExhibit(id=bug.id, source=bug.origin, property_id=bug.breaks.id, title=bug.title))
        return
    for bug in exhibits:
        say(f"{bug.id}  {bug.title}; breaks {bug.breaks}  ({bug.origin})")


def _story(exhibit: Any) -> str:
    lines = [
        f"{exhibit.id}  {exhibit.title}",
        f"source: {exhibit.origin}; breaks {exhibit.breaks}",
        "",
        click.wrap_text(exhibit.story, width=100),
        *([f"It shows when: {exhibit.shows_when}"] if hasattr(exhibit, "shows_when") else []),
        "",
        exhibit.diff(),
    ]
    if exhibit.stop:
        lines.append(f"kvsm refuses this: {exhibit.stop!r} is in its message.")
    if exhibit.without_stop:
        lines += ["To remove that guard as well:", "", exhibit.diff_without_stop()]
    return "\n".join(lines).rstrip("\n")


def _tell(search: Any, found: Iterable[Any], *, as_json: bool, with_steps: bool) -> ExitCode:
    """Print results as they arrive. Returns GOOD if all bugs were found and the unchanged code is clean."""
    results = []
    for result in found:
        results.append(result)
        if as_json:
            say_json(_answer(result))
        else:
            first, *more = _result_lines(search, result)
            say(first, *[f"     {line}" for line in more])
            if with_steps and result.finding is not None:
                _print_steps(result)
                say(f"      {result.finding}")
    if not as_json:
        _print_sum(search, results)
    if any(one.is_wrong for one in results):
        return ExitCode.BROKEN
    return ExitCode.UNDETERMINED if any(one.cut for one in results) else ExitCode.GOOD


def _answer(result: Any) -> MuseumAnswer:
    return MuseumAnswer(
        id=result.id,
        checker=result.checker,
        also=result.also,
        finding=None if result.finding is None else told_finding(result.finding),
        trace=result.trace,
        steps=len(result.trace),
        seconds=result.seconds,
        cut=result.cut,
    )


def _result_lines(search: Any, result: Any) -> Iterator[str]:
    """Format a bug, and the checkers that found it."""
    exhibit = search.BUGS.get(result.id)
    yield f"{result.id}  " + (f"{exhibit.title}; breaks {exhibit.breaks}" if exhibit else UNCHANGED)
    if result.finding is not None:
        is_refused = exhibit and exhibit.stop and exhibit.stop in result.finding.message
        refused = " (kvsm refuses it)" if is_refused else ""
        steps = f"{len(result.trace)} steps, " if result.trace else ""
        yield f"{result.checker}: {result.finding.property}{refused}, {steps}{result.seconds:.1f} s"
        yield from (f"also {name}" for name in result.also)
    elif not result.cut:
        yield f"{'ESCAPED' if exhibit else 'nothing is found'}, {result.seconds:.1f} s"
    if result.cut:
        yield "not finished: time was up"


def _print_steps(result: Any) -> None:
    for number, action in enumerate(result.trace, start=1):
        say(f"      {number:3}. {' '.join(map(str, action))}")


def _print_sum(search: Any, results: Sequence[Any]) -> None:
    bugs = [one for one in results if one.id != search.CLEAN]
    found = [one for one in bugs if one.finding is not None]
    by_search = sum(one.checker != search.SCENARIO for one in found)
    say(f"{len(found)} of {len(bugs)} found, {by_search} of them by checkers not written for the bug")
    if not search.VLLM_IS_THERE and any(search.BUGS[one.id].needs_vllm for one in bugs):
        say("vLLM is not installed, so no checker has looked at the adapters for it")
    for one in results:
        if one.id == search.CLEAN and one.finding is not None:
            say(f"in the unchanged code, {one.checker} found {one.finding}")
            _print_steps(one)
