"""Search for the exhibits and the mutants with the shipped commands only, without the museum's worlds.

    PYTHONPATH=specs:tests/support python -m museum.product_alone --results alone.jsonl           all exhibits
    PYTHONPATH=specs:tests/support python -m museum.product_alone --results alone.jsonl --mutants all mutants
    PYTHONPATH=specs:tests/support python -m museum.product_alone --results alone.jsonl B17 M02   these two

The commands of a search are `commands_of(seed)`: about six minutes of CPU time if none finds the bug. The
same commands run for each bug, with fixed numbers of runs and states, and the first failure ends the search.
For a mutant, the commands that run its part of kvsm come first (`NEAREST`). Each target is walked by a
command of its own, so a new target changes no earlier result. Each of `SEEDS` is used, because one seed may
find a bug by luck. No scene, world, prompt or scope of `specs/museum` is used. A command that uses more than
`CPU_SECONDS` of CPU time is stopped, and counts as having found nothing. `museum.alone` and `mutants.alone`
have the results. Mutants of the adapters, which need vLLM, are not searched for.

Each result is appended to the file. A command does not run again if its result is in the file. `--pinned`
begins a new file with the results in `mutants.alone`.

`--all SEED` is the search of a user who knows nothing of the bug: one walk of all targets.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec
from click.testing import CliRunner
from mutants import MUTANTS
from mutants.alone import FOUND_ALONE, UNFOUND

from kvsm.check.scopes.models import MODELS
from kvsm.cli import main as kvsm
from kvsm.cli.exit_codes import ExitCode
from kvsm.properties import Property
from museum import EXHIBITS
from museum.search import BUGS, CLEAN

SEEDS = (1, 2)
CPU_SECONDS = 600
"""Limit of CPU time for one command."""
RUNS = {
    "core": 500,
    "serving": 200,
    "layers": 200,
    "copies": 500,
    "hand-over": 200,
    "tiers": 150,
    "disk": 20,
    "eras": 40,
    "restarts": 20,
    "restored": 15,
    "log": 150,
    "policies": 200,
    "router": 200,
    "skewed-core": 150,
    "log-ahead": 200,
    "workers": 200,
    "audited": 100,
    "wrong-books": 50,
    "admission": 200,
    "slow-loads": 200,
    "whole": 80,
    "hints": 200,
    "fleet": 40,
    "clocks": 60,
}
"""Target of `kvsm fuzz` -> the number of its runs: about 10 s of CPU time each."""
CHECK = ("check", "--jobs", "1", "--json")
SCOPES = tuple(
    ("check", model, "--scope", scope, "--states", states, "--jobs", "1", "--json")
    for model, states in (("tiers", "1000"), ("serving", "1000"), ("threads", "5000"))
    for scope in MODELS[model].scopes
    if not re.search(r"small$|^full|^pairs-|^triples-|-lines$", scope)
)
"""The scopes that a plain `kvsm check` does not run, except the largest and the generated ones. Scopes of
threads in which each line is a step are not run, either."""
NEAREST = {
    "the scheduler side": ("layers", "serving", "whole", "hints"),
    "the core and its policies": ("core", "skewed-core", "policies", "tiers", "serving"),
    "the fold": ("core", "audited", "tiers", "eras"),
    "the disk tier": ("eras", "tiers", "disk", "whole", "threads"),
    "saving and restoring": ("audited", "restored", "restarts", "serving"),
    "the log": ("log-ahead", "restarts", "log", "core"),
    "the checks": ("wrong-books", "audited"),
    "workers, copy engines, events and restarts": (
        *("workers", "restarts", "router", "hand-over", "copies", "threads"),
    ),
    "the hits that are served": ("layers", "serving", "whole"),
    "durability, time and counts": ("log", "hand-over", "core", "threads"),
}
"""Part of kvsm -> the targets and models that run it, which come first in a search for a mutant of it."""


def fuzz(target: str, seed: int) -> tuple[str, ...]:
    """Return the walk of a target with this seed."""
    options = ("--seed", str(seed), "--runs", str(RUNS[target]), "--jobs", "1", "--json")
    return ("fuzz", "--target", target, *options)


def fuzz_all(seed: int) -> tuple[str, ...]:
    """Return a walk of all targets with this seed, which only `--limit` ends."""
    return ("fuzz", "--target", "all", "--seconds", "86400", "--seed", str(seed), "--jobs", "1", "--json")


def commands_of(seed: int) -> tuple[tuple[str, ...], ...]:
    """Return all commands of a search with this seed."""
    return (*(fuzz(target, seed) for target in RUNS), CHECK, *SCOPES)


def search_order(id: str, seed: int) -> tuple[tuple[str, ...], ...]:
    """Return all commands of a search, for a mutant those in `NEAREST` first."""
    commands = commands_of(seed)
    nearest = NEAREST[MUTANTS[id].area] if id in MUTANTS else ()
    first = [command for name in nearest for command in commands if name in command[1:3]]
    return tuple(dict.fromkeys((*first, *commands)))


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one command for one bug.

    command: its arguments, without those for output and processes.
    property: the property that it reports as broken; empty if it found nothing.
    target: the target of the walk, or the model with its scope, that found it.
    steps: the length of the path to the failure; of a walk, after the reduction, unless a mutant is searched
        for: its walks are not reduced.
    effort: the number of operations of the walk, or of states of all models, until then.
    seconds: CPU time.
    cut: whether it was stopped after `CPU_SECONDS`.
    """

    id: str
    command: str
    property: str = ""
    target: str = ""
    steps: int = 0
    effort: int = 0
    seconds: float = 0.0
    cut: bool = False


def shown(command: Sequence[str]) -> str:
    """Return a command as a user types it."""
    return " ".join(("kvsm", *command)).removesuffix(" --json").removesuffix(" --jobs 1")


def tried(id: str, command: Sequence[str]) -> Tried:
    """Put the bug into the code, and run one command in this process.

    No run is repeated in another process, which would not have the bug.
    """
    began = _cpu_seconds()
    unrepeated = patch("kvsm.check.walks.repeated.differing_log", return_value=None)
    with unrepeated, nullcontext() if id == CLEAN else BUGS[id].put_back():
        answers, code = _answers(command, reduce_seconds=0 if id in MUTANTS else 5)
    result = Tried(id=id, command=shown(command), effort=sum(map(_effort, answers)))
    if code is ExitCode.BROKEN:
        result = msgspec.structs.replace(result, **_failure(answers))
    return msgspec.structs.replace(result, seconds=round(_cpu_seconds() - began, 1))


def _answers(command: Sequence[str], reduce_seconds: int) -> tuple[list[dict[str, Any]], ExitCode]:
    """Run a command. Raises `RuntimeError` if it ends without an answer."""
    with TemporaryDirectory() as directory:
        of_a_walk = ("--reduce-seconds", str(reduce_seconds), "--log", f"{directory}/failure")
        result = CliRunner().invoke(kvsm, [*command, *(() if command[0] == "check" else of_a_walk)])
    code = ExitCode(result.exit_code)
    if code not in (ExitCode.GOOD, ExitCode.BROKEN, ExitCode.UNDETERMINED):
        raise RuntimeError(f"{shown(command)} ended with exit code {code}: {result.output}")
    return [json.loads(line) for line in result.stdout.splitlines()], code


def _effort(answer: Mapping[str, Any]) -> int:
    """Return the number of states of a model, or of operations of a walk."""
    return int(answer["states"] if "states" in answer else answer["progress"]["operations"])


def _failure(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first failure, as fields of `Tried`."""
    for answer in answers:
        if failure := answer.get("failure"):
            name, target, steps = failure["property_id"], failure["target"], failure["actions"]
            return {"property": name, "target": target, "steps": len(steps)}
        if finding := answer.get("finding"):
            steps = answer["counterexample"]["steps"]
            return {"property": finding["property_id"], "target": answer["model"], "steps": len(steps)}
    raise RuntimeError(f"a command failed without a finding: {answers}")


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def in_a_process(id: str, command: Sequence[str], limit: int) -> Tried:
    """Run a command in a forked process that ends after `limit` seconds of CPU time.

    The bug may be in what the command itself uses, such as the writer of the failure's log. If it ends
    without an answer, it has found nothing.
    """
    processes = get_context("fork")
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=_send, args=(there, id, command, limit))
    process.start()
    there.close()
    try:
        result: Tried | str = here.recv()
    except EOFError:  # killed at the limit
        result = Tried(id=id, command=shown(command), seconds=limit, cut=True)
    process.join()
    if isinstance(result, str):
        if id == CLEAN:
            raise RuntimeError(result)
        print(result, file=sys.stderr, flush=True)
        return Tried(id=id, command=shown(command))
    return result


def _send(there: Any, id: str, command: Sequence[str], limit: int) -> None:
    until = int(_cpu_seconds()) + limit
    resource.setrlimit(resource.RLIMIT_CPU, (until, until))
    try:
        there.send(tried(id, command))
    except Exception as error:
        there.send(f"{id}: {shown(command)}: {error}")


def search_all(ids: Sequence[str], results: Path, limit: int = CPU_SECONDS) -> None:
    """Run the first command of each bug and seed, then the second for those that it did not find, and so on.

    A command that was stopped after less than `limit` seconds runs again.
    """
    searches = {(id, seed): search_order(id, seed) for seed in SEEDS for id in ids}
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {
        (one["id"], one["command"]): bool(one["property"])
        for one in known
        if not one["cut"] or one["seconds"] >= limit
    }
    for rank in range(len(commands_of(SEEDS[0]))):
        for (id, _), commands in searches.items():
            if any(done.get((id, shown(command))) for command in commands):
                continue
            if (id, shown(commands[rank])) in done:
                continue
            result = in_a_process(id, commands[rank], limit)
            done[id, result.command] = bool(result.property)
            _keep(result, results)


def _keep(result: Tried, results: Path) -> None:
    line = msgspec.json.encode(result).decode()
    with results.open("a") as file:
        file.write(f"{line}\n")
    print(line, flush=True)


def pinned() -> Iterator[Tried]:
    """Yield what `mutants.alone` has: what found a mutant, and each command that found nothing."""
    for seed in SEEDS:
        for id, one in FOUND_ALONE[seed].items():
            yield Tried(
                id=id,
                command=one.command,
                property=one.property.id,
                target=one.target,
                effort=one.effort,
            )
        for id, count in UNFOUND[seed].items():
            for command in search_order(id, seed)[:count]:
                yield Tried(id=id, command=shown(command))


def rows(results: Path, seed: int) -> str:
    """Return the rows of `museum.alone` for a seed, from a file of results."""
    return "".join(
        f'    "{one.id}": AloneBy("{one.command}", "{one.target}", '
        f"Property.{_name(one)}, {one.steps}, {one.effort}),\n"
        for one in _of_seed(results, seed)
        if one.property and one.id in EXHIBITS
    )


def mutant_rows(results: Path, seed: int) -> str:
    """Return the rows of `mutants.alone` for a seed, from a file of results."""
    known = [one for one in _of_seed(results, seed) if one.id in MUTANTS]
    found = {one.id: one for one in known if one.property}
    whole = [one for one in known if not one.cut or one.seconds >= CPU_SECONDS]
    unfound = Counter(one.id for one in whole if one.id not in found)
    return "".join(
        [
            f'"{id}": FoundAlone("{one.command}", "{one.target}", Property.{_name(one)}, {one.effort}),\n'
            for id, one in found.items()
        ]
        + [f'"{id}": {count},\n' for id, count in unfound.items()]
    )


def _of_seed(results: Path, seed: int) -> list[Tried]:
    """Return the results of the commands with this seed, in the order of the bugs."""
    texts = set(map(shown, commands_of(seed)))
    known = [msgspec.json.decode(line, type=Tried) for line in results.read_text().splitlines()]
    return sorted(
        (one for one in known if one.command in texts), key=lambda one: (one.id[0], int(one.id[1:]))
    )


def _name(one: Tried) -> str:
    return next(property.name for property in Property if property.id == one.property)


def main() -> None:
    """Search, or print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("ids", nargs="*", metavar="ID", help="all exhibits, if no bug is named")
    parser.add_argument("--mutants", action="store_true", help="search for all mutants")
    parser.add_argument(
        "--limit", type=int, default=CPU_SECONDS, metavar="SECONDS", help="CPU time of a command"
    )
    parser.add_argument(
        "--pinned", action="store_true", help="begin a new file with the results in mutants.alone"
    )
    parser.add_argument("--rows", type=int, metavar="SEED", help="run nothing; print the rows for a seed")
    parser.add_argument("--all", type=int, metavar="SEED", help="run only one walk of all targets")
    options = parser.parse_args()
    mutants = [id for id, one in MUTANTS.items() if not one.needs_vllm]
    if options.pinned and not options.results.exists():
        options.results.write_text("".join(f"{msgspec.json.encode(one).decode()}\n" for one in pinned()))
    if options.rows is not None:
        print((mutant_rows if options.mutants else rows)(options.results, options.rows), end="")
        return
    ids = options.ids or (mutants if options.mutants else [*EXHIBITS, CLEAN])
    if options.all is not None:
        for id in ids:
            _keep(in_a_process(id, fuzz_all(options.all), options.limit), options.results)
    else:
        search_all(ids, options.results, options.limit)


if __name__ == "__main__":
    main()
