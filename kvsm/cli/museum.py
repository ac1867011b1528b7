"""`kvsm museum`: real bugs of other systems, put back one by one, and which checker finds each.

The museum is beside the package, in `specs/museum/` of the source: what it changes is the source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec

import kvsm
from kvsm.errors import ConfigError
from kvsm.properties import json_with_titles

FAILED = 1
ROOT = Path(kvsm.__file__).resolve().parents[1]


@click.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="List the exhibits, and look for none.")
@click.option("--show", metavar="ID", help="Tell the story of one exhibit, and what brings it back.")
@click.option("--all", "all_look", is_flag=True, help="Ask every checker, also when one has found it.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Processes.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    help="Begin no other checker for an exhibit after so long.  [default: no limit]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.pass_context
def museum(
    context: click.Context,
    ids: tuple[str, ...],
    only_list: bool,
    show: str | None,
    all_look: bool,
    jobs: int,
    seconds: float | None,
    as_json: bool,
) -> None:
    """Put real bugs back into kvsm, and let the checkers find them.

    Each exhibit is a bug that a public KV offload system had, and the smallest change of kvsm's code that
    brings it back. The checkers know nothing of it: they explore small worlds, walk through them at random,
    run Hypothesis machines, and say what they saw and the shortest way there. The first one that sees it is
    enough, unless --all of them are asked. Last of all comes the code as it is, in which they must
    see nothing. For the exhibits that are named, the steps are printed, too. "stopped" is a bug that the
    ledger does not let happen: what it wants was refused.

    \b
    Exit codes: 0 all were found; 1 one escaped, a search was cut, or the code as it is was not clean; 2 the
    input cannot be used, or a process was killed.

    \b
    kvsm museum                 all of them, some minutes
    kvsm museum B17 B24         two of them, with the steps that lead there
    kvsm museum --show B17      its story, and its change as a diff
    """
    search = _import_museum("museum.search")
    exhibits = search.EXHIBITS
    for id in (*ids, *([show] if show else [])):
        if id not in exhibits:
            raise click.UsageError(f"there is no exhibit {id}; kvsm museum --list has them all.")
    if show:
        click.echo(_story(exhibits[show]))
    elif only_list:
        _list([exhibits[id] for id in ids] or list(exhibits.values()), as_json)
    else:
        sought = (*(ids or exhibits), search.CLEAN)
        results = search.search_all(sought, jobs, seconds, all_look=all_look)
        if not _tell(search, results, as_json=as_json, with_steps=bool(ids)):
            context.exit(FAILED)


def _import_museum(name: str) -> Any:
    """A module of the museum. Its scenarios use what the tests have."""
    if not (ROOT / "specs" / "museum" / "__init__.py").is_file():
        raise ConfigError(
            "the museum is not in the package: it changes kvsm's source; clone the repository, "
            "`pip install -e '.[test]'` there, and call `kvsm museum` again"
        )
    for folder in ("specs", "tests"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the museum needs {error.name}; pip install -e '.[test]'") from error


def _list(exhibits: Sequence[Any], as_json: bool) -> None:
    if as_json:
        shown = [
            {"id": one.id, "source": one.source, "property_id": one.breaks, "title": one.title}
            for one in exhibits
        ]
        click.echo(msgspec.json.format(json_with_titles(shown)).decode())
        return
    for one in exhibits:
        click.echo(f"{one.id}  {one.breaks!s:30} {one.title}  ({one.source})")


def _story(exhibit: Any) -> str:
    lines = [
        f"{exhibit.id}  {exhibit.title}",
        f"source: {exhibit.source}; breaks {exhibit.breaks}",
        "",
        click.wrap_text(exhibit.story, width=100),
        "",
        exhibit.diff(),
    ]
    if exhibit.stop:
        lines.append(f"kvsm does not let it happen: {exhibit.stop!r} is what it says instead.")
    if exhibit.without_stop:
        lines += ["Without that guard, too:", "", exhibit.diff_without_stop()]
    return "\n".join(lines).rstrip("\n")


def _tell(search: Any, found: Iterable[Any], *, as_json: bool, with_steps: bool) -> bool:
    """Print results as they come. Returns whether each was found, and nothing in the code as it is."""
    results = []
    if not as_json:
        click.echo(f"{'':5} {'breaks':6} {'seen as':7} {'found by':40} {'steps':>5} {'seconds':>7}  bug")
    for result in found:
        results.append(result)
        if not as_json:
            _print_row(search, result)
            if with_steps and result.finding is not None:
                _print_steps(result)
                click.echo(f"      {result.finding}")
    if as_json:
        shown = [{**msgspec.to_builtins(one), "steps": len(one.trace)} for one in results]
        click.echo(msgspec.json.format(json_with_titles(shown)).decode())
    else:
        _print_sum(search, results)
    return all(one.is_as_expected for one in results)


def _print_row(search: Any, result: Any) -> None:
    exhibit = search.EXHIBITS.get(result.id)
    breaks, title = (exhibit.breaks.id, exhibit.title) if exhibit else ("", "the code as it is")
    seen = _seen_as(exhibit, result.finding) if result.finding else ""
    found_by = [result.checker, *result.also] if result.finding else []
    if result.cut:
        found_by.append("not finished: time was up")
    first, *further = found_by or ["ESCAPED" if exhibit else "nothing is found"]
    steps = str(len(result.trace) or "")
    click.echo(f"{result.id:5} {breaks:6} {seen:7} {first:40} {steps:>5} {result.seconds:7.1f}  {title}")
    for name in further:
        click.echo(f"{'':20} {name}")


def _print_steps(result: Any) -> None:
    for number, action in enumerate(result.trace, start=1):
        click.echo(f"      {number:3}. {' '.join(map(str, action))}")


def _seen_as(exhibit: Any, finding: Any) -> str:
    """The property; or that the ledger refused what the bug wants, as the exhibit says."""
    if exhibit and exhibit.stop and exhibit.stop in finding.message:
        return "stopped"
    return str(finding.property.id)


def _print_sum(search: Any, results: Sequence[Any]) -> None:
    bugs = [one for one in results if one.id != search.CLEAN]
    found = [one for one in bugs if one.finding is not None]
    by_search = sum(one.checker != search.SCENARIO for one in found)
    click.echo(
        f"{len(found)} of {len(bugs)} found, {by_search} of them by checkers that know nothing of the bug"
    )
    for one in results:
        if one.id == search.CLEAN and one.finding is not None:
            click.echo(f"in the code as it is, {one.checker} found {one.finding}")
            _print_steps(one)
