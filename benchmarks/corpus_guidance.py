"""Measure whether a corpus helps a walk: which features it reaches, and how soon it finds bugs of the museum.

Three walks have equal seeds and limits: without a corpus, with an empty corpus, and with a corpus of walks
through the unmodified code. They are compared by operations, not by time. Operations include the schedules of
the corpus, which are run again at the beginning.

    PYTHONPATH=specs python benchmarks/corpus_guidance.py --output benchmarks/results/corpus_guidance.md
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
from museum import EXHIBITS
from page import markdown_table, publish

from kvsm.check.walks.fuzz_target import WorldTarget
from kvsm.check.walks.rounds import Corpus, walk_in_rounds
from kvsm.check.walks.walk import WalkResult, walk
from kvsm.check.walks.watch import watching

WALKS = ("no corpus", "empty corpus", "warm corpus")


def limited(left: int) -> Any:
    """A `walk_round` that ends the walk after `left` operations in total."""

    def walk_round(maker: Any, seed: int, *, before: WalkResult, **limits: Any) -> WalkResult:
        result = walk(maker, seed, operations=max(1, left - before.operations), **limits)
        over = before.operations + result.operations >= left
        return msgspec.structs.replace(result, interrupted=over and result.failure is None)

    return walk_round


def walked(target: WorldTarget, seed: int, operations: int, corpus: Corpus | None) -> tuple[int, bool]:
    """Walk once. Returns (operations, whether a failure was found)."""
    if corpus is None:
        result = walk(target.runs(seed), seed, operations=operations)
        return result.operations, result.failure is not None
    again = sum(len(entry.actions) for entry in corpus.entries)
    if corpus.broken is not None:
        return again, True
    result, _ = walk_in_rounds(
        target, corpus, seed, limited(operations - again), first_run=0, runs=None, seconds=None
    )
    return again + result.operations, result.failure is not None


def reached(target: WorldTarget, seed: int, operations: int, corpus: Corpus | None) -> tuple[int, int]:
    """Walk once. Returns (edges, features) that were reached after this number of operations."""
    if corpus is None:
        with watching() as watch:
            walk(target.runs(seed), seed, operations=operations)
        features = watch.new
    else:
        walked(target, seed, operations, corpus)
        features = set(corpus.features)
    return sum(feature.startswith("edge ") for feature in features), len(features)


@click.command()
@click.option("--target", default="core", show_default=True)
@click.option("--operations", default=100_000, show_default=True, help="Limit of a walk.")
@click.option("--warm", default=300_000, show_default=True, help="Operations that make the warm corpus.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--exhibits", default="", help="Ids, separated by commas.  [default: all]")
@click.option("--output", type=click.Path(path_type=Path))
def main(target: str, operations: int, warm: int, seeds: int, exhibits: str, output: Path | None) -> None:
    """Measure, and print a page."""
    with tempfile.TemporaryDirectory() as place:
        made, kept = WorldTarget(target), Path(place) / "warm"
        corpus = Corpus(made, kept)
        walked(made, 1000, warm, corpus)
        corpus.reduce(30 * warm)
        corpus.save()
        size = corpus.totals
        actions = sum(len(entry.actions) for entry in corpus.entries)
        lines = [
            f"Target {target}. The warm corpus: {size.schedules} schedules with {actions:,} actions, from a "
            f"walk of {warm:,} operations; {size.features:,} features.",
            "",
        ]
        lines += _reach_table(made, operations, seeds, kept)
        rows = []
        for id in exhibits.split(",") if exhibits else EXHIBITS:
            if EXHIBITS[id].needs_vllm:
                continue
            found = _found(made, id, operations, seeds, kept)
            print(id, found, flush=True)
            if any(good for ways in found.values() for _, good in ways):
                rows.append([id, *[_cell(found[way]) for way in WALKS]])
        lines += ["", f"Operations to the failure, for {seeds} seeds; `-`: not within {operations:,}.", ""]
        lines += markdown_table(["exhibit", *WALKS], rows)
    publish("What a corpus is worth", "operations, and no times, are compared", lines, output)


def _corpora(target: WorldTarget, kept: Path) -> list[Corpus | None]:
    return [None, Corpus(target, Path(tempfile.mkdtemp(dir=kept.parent))), Corpus(target, kept)]


def _reach_table(target: WorldTarget, operations: int, seeds: int, kept: Path) -> list[str]:
    rows = []
    for seed in range(seeds):
        found = [reached(target, seed, operations, corpus) for corpus in _corpora(target, kept)]
        row = [str(seed), *[f"{edges} / {features:,}" for edges, features in found]]
        print(row, flush=True)
        rows.append(row)
    return [
        f"Edges / features reached after {operations:,} operations:",
        "",
        *markdown_table(["seed", *WALKS], rows),
    ]


def _found(
    target: WorldTarget, id: str, operations: int, seeds: int, kept: Path
) -> dict[str, Sequence[tuple[int, bool]]]:
    with EXHIBITS[id].put_back():
        ways: dict[str, list[tuple[int, bool]]] = {way: [] for way in WALKS}
        for seed in range(seeds):
            for way, corpus in zip(WALKS, _corpora(target, kept)):
                ways[way].append(walked(target, seed, operations, corpus))
        return {**ways}


def _cell(found: Sequence[tuple[int, bool]]) -> str:
    good = [many for many, is_found in found if is_found]
    each = " ".join(f"{many:,}" if is_found else "-" for many, is_found in found)
    return f"{each} (median {median(good):,.0f})" if len(good) == len(found) else each


if __name__ == "__main__":
    main()
