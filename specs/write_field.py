"""Write docs/field.md and docs/field/: the results of `kvsm conform` for many targets.

    PYTHONPATH=.:specs python -m write_field walk vllm-0.33.0=/path/to/bin/python [NAME ...]
    PYTHONPATH=.:specs python -m write_field render

`walk` walks the targets of an environment, or only those whose name contains one of NAME, with the Python of
the environment, and saves each result as JSON beside its page. `render` writes all pages again from these
results, without a walk. A test checks that the pages are up to date.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import msgspec

from kvsm.cli.conform_page import command_of, page_of
from kvsm.cli.conform_result import BROKEN, HELD, NOT_EXERCISED, ConformAnswer, PropertyVerdict
from kvsm.properties import Property

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = DOCS / "field"

SECONDS, REDUCE_SECONDS, SEED = 60, 20, 20261129


class Entry(NamedTuple):
    """A page about a target.

    name: the name of the page's file.
    environment: the environment in which the target is walked.
    target: the argument of `kvsm conform`.
    note: Markdown below the title: what simulates the device, and what is left out.
    """

    name: str
    environment: str
    target: str
    note: str = ""


_VLLM_TARGETS = (
    "SimpleCPUOffloadConnector",
    "SimpleCPUOffloadConnector-lazy",
    "OffloadingConnector",
    "OffloadingConnector-tiers",
    "CPUOffloadingManager",
    "CPUOffloadingManager-arc",
    "TieringOffloadingManager",
    "fs",
)
_SGLANG = "Streams, events, a copy kernel and the registration of host memory are simulated " + (
    "(`specs/sglang_tree/without_gpu.py`)."
)
_FILES = (
    "`HiCacheFile` is called as SGLang's cache controller calls it (`specs/sglang_tree/file_storage.py`)."
)
_LMCACHE = (
    "The connector and its server are LMCache's own (`specs/lmcache_walk/connector.py`): the blocks go "
    "through %s. The copies are not simulated, so their order is not checked. One cause of wrong bytes is "
    "the KV of another LoRA adapter: `specs/lmcache_walk/another_adapter.py` shows it with two requests."
)

FIELD = (
    *(
        Entry(f"{environment}-{target}", environment, f"vllm:{target}")
        for environment in ("vllm-0.33.0", "vllm-0.32.0")
        for target in _VLLM_TARGETS
    ),
    *(
        Entry(f"{environment}-KvsmConnector", environment, "kvsm:KvsmConnector")
        for environment in ("vllm-0.33.0", "vllm-0.32.0")
    ),
    *(
        Entry(f"sglang-0.5.23-{machine}", "sglang", f"sglang_tree.file_storage:{machine}", _FILES)
        for machine in ("FileStorage", "FileStorageWithIntactFiles", "FileStorageWithMetadataCache")
    ),
    Entry("vllm-0.33.0-kvcr", "vllm-0.33.0-kvcr", "vllm:kvcr"),
    Entry(
        "lmcache-0.5.6-Pickled", "lmcache", "lmcache_walk.connector:Pickled", _LMCACHE % "pickled messages"
    ),
    Entry(
        "lmcache-0.5.6-SharedMemory",
        "lmcache",
        "lmcache_walk.connector:SharedMemory",
        _LMCACHE % "shared memory",
    ),
    Entry("kvsm-MemoryTier", "vllm-0.33.0", "kvsm:MemoryTier"),
    Entry("kvsm-OffloadScheduler", "kvsm", "kvsm:OffloadScheduler"),
    Entry("kvsm-HostCopyEngine", "kvsm", "kvsm:HostCopyEngine"),
    Entry("kvsm-FileCopyEngine", "kvsm", "kvsm:FileCopyEngine"),
    Entry("kvsm-StreamCopyEngine", "kvsm", "kvsm:StreamCopyEngine"),
    *(
        Entry(f"sglang-0.5.23-{machine}", "sglang", f"sglang_tree.machines:{machine}", _SGLANG)
        for machine in ("WriteBackRust", "WriteBack", "WriteThroughRust", "WriteThrough")
    ),
)


def answers() -> dict[str, ConformAnswer]:
    """Return name of a page -> its result, for each result that is saved."""
    return {
        entry.name: msgspec.json.decode(path.read_bytes(), type=ConformAnswer, strict=False)
        for entry in FIELD
        if (path := PAGES / f"{entry.name}.json").exists()
    }


def texts() -> dict[Path, str]:
    """Return path of a page -> its text."""
    kept = answers()
    pages = {
        PAGES / f"{entry.name}.md": _page(entry, kept[entry.name]) for entry in FIELD if entry.name in kept
    }
    return {**pages, DOCS / "field.md": _overview(kept)}


def _page(entry: Entry, answer: ConformAnswer) -> str:
    title, _, rest = page_of(answer).partition("\n")
    heading = f"{title} with vLLM {answer.versions['vllm'].partition('+')[0]}" if _has_vllm(entry) else title
    note = f"\n{fill(entry.note, 120)}\n" if entry.note else ""
    return f"{heading}\n{note}{rest}"


def _has_vllm(entry: Entry) -> bool:
    return entry.environment.startswith("vllm")


_OVERVIEW = """\
# Conformance results

<!-- Written by `PYTHONPATH=.:specs python -m write_field`. Do not edit. -->

Results of [`kvsm conform`](testing.md#conformance-on-one-page) for connectors, managers, tiers, prefix
trees and copy engines, without a GPU. Each row is a random walk with the same seed and the same time limit.
The page of a target has the steps that break a property, and the number of cases in which a check could have
failed. A walk proves nothing about cases that did not arise.

| mark | meaning |
| --- | --- |
| + | held: cases arose in which a check could have failed, and none did |
| **x** | broken: the page of the target has the steps |
| (x) | known to be broken, but not found in this walk: see [findings.md](findings.md) or the page |
| o | not exercised: no such case arose |
| ? | not checked: the property is newer than the walk |
| | not applicable: the page of the target says why |

"""

_NOT_WALKED = Path(__file__).with_name("field_not_walked.txt")


def _overview(kept: dict[str, ConformAnswer]) -> str:
    lines = [_OVERVIEW.rstrip("\n"), ""]
    lines += [f"| target | {' | '.join(one.id for one in Property)} |", f"| --- |{' --- |' * len(Property)}"]
    entries = [entry for entry in FIELD if entry.name in kept]
    for entry in entries:
        verdicts = {one.property_id: one for one in kept[entry.name].properties}
        marks = [_mark(entry, verdicts.get(one.id)) for one in Property]
        lines.append(f"| [{_name(entry)}](field/{entry.name}.md) | {' | '.join(marks)} |")
    lines += ["", "[properties.md](properties.md) says what each property is.", "", "## Commands", ""]
    lines += ["| target | date | walked | command |", "| --- | --- | --- | --- |"]
    for entry in entries:
        answer = kept[entry.name]
        walked = f"{answer.runs:,} runs, {answer.operations:,} steps"
        lines.append(f"| {_name(entry)} | {answer.date} | {walked} | `{command_of(answer)}` |")
    lines += ["", _NOT_WALKED.read_text().rstrip("\n"), ""]
    lines += ["```{toctree}", ":hidden:", ""]
    lines += [f"field/{entry.name}" for entry in entries]
    return "\n".join([*lines, "```", ""])


_MARKS = {HELD: "+", BROKEN: "**x**", NOT_EXERCISED: "o"}

_RESETS = frozenset({Property.LEGAL_CALLS, Property.EVENTS_ARE_STATE, Property.CORRECT_BYTES})
_KNOWN = {
    "vllm:OffloadingConnector": _RESETS,
    "vllm:OffloadingConnector-tiers": _RESETS,
    "vllm:SimpleCPUOffloadConnector": frozenset({Property.LEGAL_CALLS}),
    "vllm:SimpleCPUOffloadConnector-lazy": frozenset({Property.LEGAL_CALLS, Property.PROGRESS}),
    "vllm:TieringOffloadingManager": frozenset({Property.PROGRESS, Property.EVENTS_ARE_STATE}),
    "lmcache_walk.connector:Pickled": frozenset({Property.CORRECT_BYTES}),
    "lmcache_walk.connector:SharedMemory": frozenset({Property.CORRECT_BYTES}),
}
"""Target -> the properties that known defects break: defects in docs/findings.md, which both versions of vLLM
have, and defects that the note of a page names."""


def _mark(entry: Entry, verdict: PropertyVerdict | None) -> str:
    if verdict is None:
        return "?"
    known = Property(verdict.property_id) in _KNOWN.get(entry.target, ())
    return "(x)" if known and verdict.verdict != BROKEN else _MARKS.get(verdict.verdict, "")


def _name(entry: Entry) -> str:
    return re.sub(r"^([a-z]+)-(?:([\d.]+)-)?", r"\1 \2 ", entry.name).replace("  ", " ")


def walk(environment: str, python: str, names: list[str]) -> None:
    """Walk the targets of an environment with its Python, and write their pages."""
    for entry in FIELD:
        if entry.environment != environment or not (not names or any(name in entry.name for name in names)):
            continue
        command = [python, "-m", "kvsm", "conform", entry.target, "--json", "--seed", str(SEED)]
        command += ["--seconds", str(SECONDS), "--reduce-seconds", str(REDUCE_SECONDS)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        print(f"{entry.name}: exit code {done.returncode}", flush=True)
        if done.returncode in (0, 1):
            answer = msgspec.json.decode(done.stdout, type=ConformAnswer, strict=False)
            PAGES.mkdir(exist_ok=True)
            kept = msgspec.json.format(msgspec.json.encode(answer), indent=1).decode()
            (PAGES / f"{entry.name}.json").write_text(without_machine(kept) + "\n")
    render()


def without_machine(text: str) -> str:
    """The text with paths that begin at a package or at the project, not at the root of this machine, and
    without addresses in memory."""
    text = re.sub(r"/[^\s\"']*/site-packages/", "", text).replace(f"{ROOT}/", "")
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def render() -> None:
    """Write all pages from the saved results."""
    for path, text in texts().items():
        path.write_text(text)


def main(arguments: list[str]) -> None:
    """Carry out the command line, as the docstring of this file says."""
    match arguments:
        case ["render"]:
            render()
        case ["walk", where, *names]:
            environment, _, python = where.partition("=")
            walk(environment, python, names)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
