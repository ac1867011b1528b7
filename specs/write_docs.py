"""Write the generated pages of docs/: properties, bugs, troubles, JSON schemas, reports for vLLM, pictures.

Also writes the parts of docs/embedding.md, docs/report.md, docs/tutorial.md, docs/verification.md,
docs/vllm.md, specs/museum/README.md and specs/mutants/README.md between `<!-- written: ... -->` and
`<!-- end -->`.

    PYTHONPATH=specs python -m write_docs

A test checks that the pages are up to date.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import upstream_reports
from json_schemas import schema_texts, scripts_page
from museum import EXHIBITS, Exhibit
from museum.alone import ALONE
from museum.found import FOUND
from mutants import table as mutants_table
from report_pictures import pictures
from vllm_tables import with_vllm_tables
from written_blocks import with_written_blocks

from kvsm.errors import ConfigError
from kvsm.explain.diagrams import svg
from kvsm.explain.report.troubles import DETECTORS, Urgency
from kvsm.explain.tables.schema_text import schema_page
from kvsm.properties import Property
from kvsm.states import MACHINES

ROOT = Path(__file__).resolve().parents[1]
DOCS, MUSEUM_README = ROOT / "docs", ROOT / "specs" / "museum" / "README.md"

REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "dynamo": "ai-dynamo/dynamo",
    "LMCache": "LMCache/LMCache",
    "sglang": "sgl-project/sglang",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "FlexKV": "taco-project/FlexKV",
    "Mooncake": "kvcache-ai/Mooncake",
    "kvcached": "ovg-project/kvcached",
    "DingoCache": "dingodb/DingoCache",
    "Rapid-MLX": "raullenchai/Rapid-MLX",
    "lmdeploy": "InternLM/lmdeploy",
}
"""Name of a project in the exhibits -> its repository on GitHub."""

_PROPERTIES = """\
# The properties

<!-- Written by `PYTHONPATH=specs python -m write_docs` from kvsm/properties.py. Do not edit. -->

What kvsm promises. Every check, proof and violation names one of these. [verification.md](verification.md)
says which checker looks at which property, and how far.

| property | what must hold |
| --- | --- |
"""

_BUGS = """\
# Seventy-two bugs of other systems

<!-- Written by `PYTHONPATH=specs python -m write_docs` from specs/museum. Do not edit. -->

Races, leaks and corruptions that public systems for KV-cache offload had, or have. `kvsm museum` puts each of
them back into kvsm and lets the checkers look for it ([the museum](../specs/museum/README.md) says how).
"Found" names the checker that sees a bug first, what it reports, and the length of its trace: shortest for an
exploration, reduced for a walk. `kvsm museum --all ID` names every checker that finds a bug.
"By the shipped commands alone" names the first shipped command that finds it without worlds or scopes of
the museum ([the budget](../specs/museum/README.md#by-the-shipped-commands-alone)).

A bug may be reported as another property than the one that it breaks: kvsm often refuses a step before the
harm is done ("every call is legal"), or a checker sees an earlier effect.

The last ten were found by kvsm, in vLLM's connectors and managers ([findings](findings.md)).
"""


_TROUBLES = """\
# What can stand out

<!-- Written by `PYTHONPATH=specs python -m write_docs` from kvsm/explain/report/troubles.py. Do not edit. -->

`kvsm report` lists what stands out in a log, by urgency, and within one urgency by impact: the part of the
lookups, copies, requests or time that it costs. A trouble is reported from its limit on. Below all limits,
nothing stands out. [incidents.md](incidents.md) says what to do about each.
"""


def main() -> None:
    for machine in MACHINES.values():
        # Where Graphviz is missing, the pictures stay as they are; a test reads them.
        with suppress(ConfigError):
            (DOCS / "pictures" / f"{machine.name}.svg").write_text(svg(machine), encoding="utf-8")
    mutants_table.README.write_text(mutants_table.readme(), encoding="utf-8")
    MUSEUM_README.write_text(museum_readme(), encoding="utf-8")
    for name, text in pages().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text, encoding="utf-8")


def museum_readme() -> str:
    """Return specs/museum/README.md with up-to-date generated parts."""
    return with_written_blocks(MUSEUM_README.read_text(encoding="utf-8"), source_link)


def pages() -> dict[str, str]:
    """Path in docs/ -> the text of the page."""
    return {
        "properties.md": properties_page(),
        "bugs.md": bugs_page(),
        "troubles.md": troubles_page(),
        "scripts.md": scripts_page(),
        "tables.md": schema_page(),
        **{
            name: with_written_blocks((DOCS / name).read_text(encoding="utf-8"), source_link)
            for name in ("embedding.md", "report.md", "tutorial.md", "verification.md")
        },
        **{f"pictures/{name}": text for name, text in pictures().items()},
        "vllm.md": with_vllm_tables((DOCS / "vllm.md").read_text(encoding="utf-8")),
        **{f"schemas/{name}": text for name, text in schema_texts().items()},
        **upstream_reports.pages(),
    }


def properties_page() -> str:
    return _PROPERTIES + "".join(f"| {one} | {one.sentence} |\n" for one in Property)


def troubles_page() -> str:
    parts = [_TROUBLES]
    for urgency in Urgency:
        parts.append(f"\n## {urgency.name.capitalize()}\n\n{urgency.says}\n\n")
        parts.append("| trouble | what is measured | from | why |\n| --- | --- | --- | --- |\n")
        parts += [
            f"| {one.name} | {one.measures} | {one.limit} | {one.why} |\n"
            for one in DETECTORS
            if one.urgency is urgency
        ]
    return "".join(parts)


def bugs_page() -> str:
    return _BUGS + "".join(map(_section, EXHIBITS.values()))


def _section(exhibit: Exhibit) -> str:
    found = FOUND[exhibit.id]
    steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
    return (
        f"\n## {exhibit.id}: {exhibit.title}\n\n{exhibit.story}\n\n"
        f"- Source: {source_link(exhibit.source)}\n"
        f"- Breaks: {exhibit.breaks}\n"
        f"- Found: `{found.checker}` reports {found.property} after {steps}\n"
        f"- By the shipped commands alone: {_found_alone(exhibit.id)}\n"
    )


def _found_alone(id: str) -> str:
    one = ALONE.get(id)
    if one is None:
        return "not within the budget"
    steps = "1 step" if one.steps == 1 else f"{one.steps} steps"
    return f"`{one.command}` reports {one.property} after {steps} ({one.target})"


def source_link(source: str) -> str:
    """A source as a link to the issue, pull request, commit or finding; to the project if it names none."""
    if finding := re.search(r", found by kvsm: (.+)$", source):
        return f"[{source}](findings.md#{finding[1].lower().replace(' ', '-')})"
    project = re.split(r"[# ,]", source)[0]
    place = f"https://github.com/{REPOSITORIES[project]}"
    if pull := re.search(r" PR (\d+)", source):
        place += f"/pull/{pull[1]}"
    elif issue := re.search(r"#(\d+)", source):
        place += f"/issues/{issue[1]}"  # GitHub redirects if the number is a pull request
    elif commit := re.search(r" ([0-9a-f]{7,40})$", source):
        place += f"/commit/{commit[1]}"
    return f"[{source}]({place})"


if __name__ == "__main__":
    main()
