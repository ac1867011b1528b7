"""The tables of README.md, from the mutants and from what the checkers find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mutants import MUTANTS
from mutants.alone import FOUND_ALONE, UNFOUND
from mutants.found import FOUND, MISSED, Need

README = Path(__file__).with_name("README.md")

_BLOCK = re.compile(r"(<!-- written: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def readme() -> str:
    """README.md with its written blocks as they must be. `write_docs` writes it."""
    blocks = {"score": _score(), "alone": _alone(), "found": _found(), "missed": _missed()}
    text = README.read_text(encoding="utf-8")
    return _BLOCK.sub(lambda block: f"{block[1]}{blocks[block[2]]}{block[3]}", text)


def _score() -> str:
    rows = [
        f"**{len(FOUND)} of {len(MUTANTS)} are found: {percent(len(FOUND), len(MUTANTS))}.**\n",
        "\n| part of kvsm | mutants | found | score |\n| --- | --: | --: | --: |\n",
    ]
    of_area = Counter(one.area for one in MUTANTS.values())
    found = Counter(MUTANTS[id].area for id in FOUND)
    rows += [
        f"| {area} | {count} | {found[area]} | {percent(found[area], count)} |\n"
        for area, count in of_area.items()
    ]
    return "".join(rows)


def _alone() -> str:
    """Return how many mutants the shipped commands find by themselves, with each seed."""
    figures = " and ".join(
        f"{len(found)} of the {len(found) + len(UNFOUND[seed])} mutants searched for with seed {seed}"
        for seed, found in FOUND_ALONE.items()
    )
    needing_vllm = sum(one.needs_vllm for one in MUTANTS.values())
    rows = [
        f"**Shipped commands find {figures}. There are {len(MUTANTS)} mutants; {needing_vllm} need vLLM.**\n",
        f"\n| target | {' | '.join(f'found with seed {seed}' for seed in FOUND_ALONE)} |\n",
        f"| --- |{' --: |' * len(FOUND_ALONE)}\n",
    ]
    by_target = [Counter(one.target for one in found.values()) for found in FOUND_ALONE.values()]
    rows += [
        f"| {target} | {' | '.join(str(counts[target]) for counts in by_target)} |\n"
        for target in dict.fromkeys(target for counts in by_target for target in counts)
    ]
    unfound = [
        f"| {id} | {MUTANTS[id].title} | {' | '.join(str(UNFOUND[seed].get(id, '')) for seed in UNFOUND)} |\n"
        for id in MUTANTS
        if any(id in counts for counts in UNFOUND.values())
    ]
    if unfound:
        seeds = " | ".join(f"commands tried with seed {seed}" for seed in UNFOUND)
        rows.append(f"\n| | not found yet | {seeds} |\n| --- | --- |{' --: |' * len(UNFOUND)}\n")
    return "".join(rows + unfound)


def percent(part: int, whole: int) -> str:
    """A share for people: "41 %"."""
    return f"{100 * part / whole:.0f} %"


def _found() -> str:
    rows = ["| | mutant | breaks | found by | as | steps |\n| --- | --- | --- | --- | --- | --: |\n"]
    for id, (checker, property, steps) in FOUND.items():
        one = MUTANTS[id]
        rows.append(f"| {id} | {one.title} | {one.breaks.id} | {checker} | {property.id} | {steps} |\n")
    return "".join(rows)


def _missed() -> str:
    needs = dict.fromkeys(one.needs for one in MISSED.values())
    return "\n".join("".join(_missed_for(need)) for need in needs)


def _missed_for(need: Need) -> Iterator[str]:
    yield f"**{need.value}**\n\n"
    for id, missed in MISSED.items():
        if missed.needs == need:
            one = MUTANTS[id]
            yield f"- {id}, {one.title} (breaks {one.breaks}). It shows when: {one.shows_when} "
            yield f"What would see it: {missed.seen_by}\n"
