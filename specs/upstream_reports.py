"""Write the reports of docs/upstream from docs/findings.md, the scripts and the patches.

A report has the form of vLLM's template for bugs: the environment, and the bug.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
FINDINGS, UPSTREAM = DOCS / "findings.md", DOCS / "upstream"
PARTS = (
    "Seen by a user",
    "Versions",
    "Steps",
    "Expected",
    "Actual",
    "Cause",
    "Test",
    "Upstream",
    "Proposed change",
)
"""The parts of each finding, in this order."""

_PART = re.compile(rf"^\*\*({'|'.join(PARTS)})\.\*\* ", re.MULTILINE)
_SCRIPT = re.compile(r"upstream/scripts/(\d\d)\.py")
_PATCH = re.compile(r"upstream/patches/(\d\d)\.diff")
_CITED = re.compile(r"`(vllm/[\w/]+\.py):(\d+)`\s+\(`(\w+)`")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")

_INDEX = """\
# Reports for vLLM

<!-- Written by `PYTHONPATH=specs python -m write_docs` from docs/findings.md, docs/upstream/scripts and
docs/upstream/patches. Do not edit. -->

One report for each of the [findings](../findings.md), ready to be sent. Nothing has been sent. Each has a
script that needs only vLLM, on a CPU, without a model: it prints `FAILS: ...` and exits with 1 if this vLLM
has the defect. A test (`tests/in_vllm/test_upstream.py`) runs each script with vLLM 0.33.0, and shows that it
passes with the patch.

| report | vLLM | script | patch for 0.33.0 |
| --- | --- | --- | --- |
"""

_REPORT = """\
# [Bug]: {title}

<!-- Written by `PYTHONPATH=specs python -m write_docs` from docs/findings.md. Do not edit. -->

## Your current environment

{environment}

## Describe the bug

{seen}

{steps}

Expected: {expected}

Actual: {actual}

The script needs only vLLM. It prints `FAILS: ...` and exits with 1 if this vLLM has the defect:

```python
{script}```

## Analysis

{cause}

## Related

{upstream}

## Proposed change

{change}
"""


_ENVIRONMENT = (
    "Python 3.11, Linux, x86-64, CPU. The defect is in Python code of the scheduler's process; the script "
    "that shows it needs no GPU and no model."
)


class Cited(NamedTuple):
    """A line of vLLM's source, and the function that it is in."""

    path: str
    line: int
    function: str


class Finding(NamedTuple):
    """A section of docs/findings.md: its heading, its text, and part -> text."""

    title: str
    text: str
    parts: dict[str, str]

    @property
    def number(self) -> str:
        """Return the two digits in the name of its script."""
        found = _SCRIPT.search(self.parts["Steps"])
        assert found, f"{self.title}: the steps name no script"
        return found[1]

    @property
    def patch(self) -> str | None:
        """Return the number of its patch; None if it has none."""
        found = _PATCH.search(self.parts["Proposed change"])
        return found[1] if found else None

    @property
    def report(self) -> str:
        """Return the name of its report in docs/upstream."""
        return f"{self.number}-{re.sub(r'[^a-z0-9]+', '-', self.title.lower())}.md"

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the versions of vLLM with the defect, from the first sentence of the part."""
        return tuple(re.findall(r"\d+\.\d+\.\d+", self.parts["Versions"].split(". ")[0]))

    @property
    def cited(self) -> list[Cited]:
        """Return the lines of vLLM's source that it names."""
        return [Cited(path, int(line), name) for path, line, name in _CITED.findall(self.text)]


def findings() -> list[Finding]:
    """Return the findings of docs/findings.md. Raises `AssertionError` if a section lacks a part."""
    sections = FINDINGS.read_text(encoding="utf-8").partition("\n## Nothing found")[0].split("\n## ")[1:]
    return [_finding(section) for section in sections]


def pages() -> dict[str, str]:
    """Path in docs/ -> the text of the page."""
    found = findings()
    rows = [
        f"| [{one.title}]({one.report}) | {', '.join(one.versions)} "
        f"| [{one.number}](scripts/{one.number}.py) "
        + (f"| [{one.patch}](patches/{one.patch}.diff) |\n" if one.patch else "| none |\n")
        for one in found
    ]
    tree = "".join(f"{one.report.removesuffix('.md')}\n" for one in found)
    index = f"{_INDEX}{''.join(rows)}\n```{{toctree}}\n:hidden:\n\n{tree}```\n"
    return {"upstream/README.md": index, **{f"upstream/{one.report}": _report(one) for one in found}}


def _finding(section: str) -> Finding:
    title, _, text = section.partition("\n")
    pieces = _PART.split(text)
    names, texts = pieces[1::2], pieces[2::2]
    assert tuple(names) == PARTS, f"{title}: has the parts {names}, and should have {PARTS}"
    return Finding(title, text, {name: part.strip() for name, part in zip(names, texts)})


def _report(finding: Finding) -> str:
    parts = {name: _LINK.sub(r"\1", text) for name, text in finding.parts.items()}
    change = re.sub(r"\s+\(patch\)", "", parts["Proposed change"].split("\n\n")[0])
    if finding.patch:
        diff = (UPSTREAM / "patches" / f"{finding.patch}.diff").read_text(encoding="utf-8")
        change += f"\n\n```diff\n{diff}```"
    steps = re.sub(r"```sh\n.*?```\n*", "", parts["Steps"], flags=re.DOTALL)
    return _REPORT.format(
        title=" ".join(parts["Seen by a user"].split()).split(". ")[0].rstrip("."),
        environment=fill(f"{parts['Versions']} {_ENVIRONMENT}", 120, break_on_hyphens=False),
        seen=parts["Seen by a user"],
        steps=steps[steps.index("\n1. ") + 1 :],
        expected=parts["Expected"],
        actual=parts["Actual"],
        script=(UPSTREAM / "scripts" / f"{finding.number}.py").read_text(encoding="utf-8"),
        cause=parts["Cause"],
        upstream=parts["Upstream"],
        change=change,
    )
