"""Format the result of `kvsm conform` as one page of Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from shlex import quote

from kvsm.cli.conform_result import (
    BROKEN,
    HELD,
    NOT_APPLICABLE,
    NOT_EXERCISED,
    ConformAnswer,
    ConformDefect,
)
from kvsm.properties import Property

_WIDTH = 120
_MOST_LINES = 40
"""The most lines of a defect; a longer one is shortened."""
_MOST_BEHIND = 8
"""The most lines after the steps of a shortened defect."""
_CHANGE = "     "
"""The indent of a line that says what a step changes."""


def page_of(answer: ConformAnswer) -> str:
    """Return the page."""
    return "\n".join(_lines(answer)) + "\n"


def command_of(answer: ConformAnswer) -> str:
    """Return the command that repeats the walk. A faster machine makes more runs."""
    config = f" --config {quote(json.dumps(answer.config))}" if answer.config else ""
    return f"kvsm conform {answer.target}{config} --seed {answer.seed} --seconds {answer.limit:g}"


def _lines(answer: ConformAnswer) -> Iterator[str]:
    yield f"# {answer.target}"
    yield ""
    if answer.says:
        yield from _wrapped(f"This is {answer.says}.")
        yield ""
    yield "```sh"
    yield command_of(answer)
    yield "```"
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in answer.versions.items())
    walked = f"{_counted(answer.runs, 'run')}, {_counted(answer.operations, 'step')}"
    ended = ", interrupted" if answer.interrupted else ""
    yield from _wrapped(f"{answer.date}. {versions}. {walked} in {answer.seconds:.0f} s{ended}.")
    yield from _wrapped(_summary(answer))
    yield ""
    yield from _defects(answer)
    yield from _held(answer)
    yield from _rest(answer)
    yield from _wrapped(
        "A property held if no check failed, in the cases that are counted here. A walk proves nothing about "
        "other cases. A property that is broken may hide others behind it: a run ends at its first failure."
    )


def _summary(answer: ConformAnswer) -> str:
    verdicts = [one.verdict for one in answer.properties]
    counts = [
        f"{verdicts.count(verdict)} {verdict}" for verdict in (HELD, BROKEN, NOT_EXERCISED, NOT_APPLICABLE)
    ]
    return f"Of {len(verdicts)} properties: {', '.join(counts)}."


def _defects(answer: ConformAnswer) -> Iterator[str]:
    if not answer.defects:
        return
    yield "## Broken"
    yield ""
    for number, defect in enumerate(answer.defects, 1):
        message = _plain(defect.message.split("\n")[0])
        yield f"### {number}. {_title(defect.property_id)}"
        yield ""
        yield from _wrapped(message)
        yield ""
        variant = f" ({defect.variant})" if defect.variant else ""
        yield from _wrapped(
            f"{_counted(defect.times, 'run')}, first in run {defect.run}{variant}; {defect.reduced}."
        )
        yield ""
        yield from _steps(defect)


def _steps(defect: ConformDefect) -> Iterator[str]:
    if not defect.steps:
        return
    yield "```text"
    for line in _shortened(list(defect.steps)):
        yield line if len(line) <= _WIDTH else f"{line[: _WIDTH - 4]} ..."
    yield "```"
    yield ""


def _shortened(lines: list[str]) -> list[str]:
    """Shorten a defect with too many lines: leave out what the steps change, then all but the last lines
    after the steps, then steps in the middle."""
    end = next((place for place, line in enumerate(lines) if line.startswith("broken: ")), len(lines))
    steps, rest = lines[:end], lines[end:]
    if len(lines) > _MOST_LINES:
        steps = [line for line in steps if not line.startswith(_CHANGE)]
        rest = rest if len(rest) <= _MOST_BEHIND else [rest[0], "...", *rest[1 - _MOST_BEHIND :]]
    if len(steps) > _MOST_LINES:
        half = _MOST_LINES // 2
        steps = [*steps[:half], f"  ... {len(steps) - 2 * half} lines ...", *steps[-half:]]
    return [*steps, *rest]


def _held(answer: ConformAnswer) -> Iterator[str]:
    yield "## Held"
    yield ""
    held = [one for one in answer.properties if one.verdict == HELD]
    if not held:
        yield "None."
        yield ""
        return
    yield "| property | cases that could have broken it |"
    yield "| --- | --- |"
    for one in held:
        cases = "; ".join(f"{case.times:,} {case.case}" for case in one.cases)
        yield f"| {_title(one.property_id)} | {cases} |"
    yield ""


def _rest(answer: ConformAnswer) -> Iterator[str]:
    missing = [_title(one.property_id) for one in answer.properties if one.verdict == NOT_EXERCISED]
    if missing:
        yield "## Not exercised"
        yield ""
        yield from _wrapped(f"No case arose that could have broken {', '.join(missing)}.")
        yield ""
    inapplicable = [one for one in answer.properties if one.verdict == NOT_APPLICABLE]
    if inapplicable:
        yield "## Not applicable"
        yield ""
        yield "| property | why |"
        yield "| --- | --- |"
        for one in inapplicable:
            yield f"| {_title(one.property_id)} | {one.why} |"
        yield ""


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _title(id: str) -> str:
    try:
        return str(Property(id))
    except ValueError:
        return id


def _plain(text: str) -> str:
    """Escape the characters that Markdown would interpret."""
    return re.sub(r"([_*<>`\[\]|#])", r"\\\1", text)


def _wrapped(text: str) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]
