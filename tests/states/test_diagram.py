"""The pictures and tables of the machines say what the rows say: no more, no less."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from places import ROOT

from kvsm.cli.diagram import diagram
from kvsm.errors import ConfigError
from kvsm.explain.diagrams import GROUPS, embedded, guard_text, label, mermaid, svg, table, write_pages
from kvsm.states import BLOCK, MACHINES, TRANSFER, BlockState, BlockTrigger
from kvsm.states.machine import Machine, Row

PAGES = (ROOT / "docs" / "machines.md",)
EVERY_MACHINE = pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
GRAPHVIZ = pytest.mark.skipif(
    not (shutil.which("dot") and find_spec("graphviz")),
    reason="apt-get install graphviz; pip install 'kvsm[diagrams]'",
)

Step = tuple[str, str, str]
"""Source, label, target."""


def steps_of(machine: Machine) -> set[Step]:
    """What the rows say, one source at a time."""
    return {
        (state.name, label(machine, row), (state if row.target is None else row.target).name)
        for row in machine.rows
        for state in row.sources
    }


def drawn_steps(machine: Machine) -> set[Step]:
    """What a reader of the Mermaid text takes from it: arrows, and the lines inside the boxes."""
    text = mermaid(machine)
    groups = GROUPS.get(machine.name, {})
    prefix = re.compile(f"^({'|'.join(groups) or 'none'})_")
    steps = set()
    for source, target, labels in re.findall(r"^ +(\w+) --> (\w+): (.+)$", text, re.MULTILINE):
        members = [state.name for state in groups.get(source, ())] or [prefix.sub("", source)]
        steps |= {(one, said, prefix.sub("", target)) for one in members for said in labels.split("<br/>")}
    for box in re.findall(r'^ +state "(.+)" as \w+$', text, re.MULTILINE):
        name, *kept = box.split("<br/>")
        steps |= {(name, line.removeprefix("↻ "), name) for line in kept}
    return steps


class TestDocs:
    """The pages show the tables as they are."""

    @pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
    def test_page_is_current(self, path: Path) -> None:
        page = path.read_text(encoding="utf-8")
        assert page == embedded(page), f"run `python -m kvsm.explain.diagrams {path}`"

    def test_machines_page_shows_all(self) -> None:
        marks = re.findall(r"<!-- (\w+): (\w+) -->", PAGES[0].read_text(encoding="utf-8"))
        assert set(marks) == {(name, part) for name in MACHINES for part in ("picture", "table")}

    @pytest.mark.parametrize(
        ("page", "message"),
        [
            ("# Machines\n", "there is no mark"),
            ("<!-- block: picture -->\n", "no '<!-- end -->' follows"),
            ("<!-- blok: picture -->\n<!-- end -->", "names no part of a machine"),
        ],
    )
    def test_page_that_cannot_be_written_is_left_as_it_was(
        self, page: str, message: str, tmp_path: Path
    ) -> None:
        """The pages beside it too: all are written, or none."""
        good, bad = tmp_path / "good.md", tmp_path / "bad.md"
        good.write_text("<!-- block: picture -->\n<!-- end -->\n")
        bad.write_text(page)
        with pytest.raises(ConfigError, match=f"bad.md: .*{message}"):
            write_pages(good, bad)
        assert bad.read_text() == page
        assert "mermaid" not in good.read_text()

    def test_command_brings_a_stale_page_up_to_date(self, tmp_path: Path) -> None:
        page = PAGES[0].read_text(encoding="utf-8")
        stale = tmp_path / "machines.md"
        stale.write_text(page.replace("[*] --> FREE", "[*] --> STORED"), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "kvsm.explain.diagrams", str(stale)], check=False, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert stale.read_text(encoding="utf-8") == page

    def test_command_without_a_page_says_how_to_call_it(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "kvsm.explain.diagrams"], check=False, capture_output=True
        )
        assert done.returncode == 1
        assert b"usage: python -m kvsm.explain.diagrams PAGE" in done.stderr

    @EVERY_MACHINE
    def test_table_has_a_line_for_each_row(self, machine: Machine) -> None:
        lines = table(machine).splitlines()
        assert len(lines) == 2 + len(machine.rows)
        for row, line in zip(machine.rows, lines[2:], strict=True):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 6
            assert cells[0].split(", ") == [source.name for source in row.sources]
            assert (cells[1], cells[5]) == (row.trigger.name, row.why)


class TestMermaid:
    @EVERY_MACHINE
    def test_says_all_that_the_rows_say_and_nothing_else(self, machine: Machine) -> None:
        """With guards and effects; an arrow that leaves a group counts for each of its states."""
        assert drawn_steps(machine) == steps_of(machine)

    @EVERY_MACHINE
    def test_has_one_arrow_for_each_pair(self, machine: Machine) -> None:
        pairs = re.findall(r"^ +(\w+) --> (\w+): ", mermaid(machine), re.MULTILINE)
        assert len(pairs) == len(set(pairs))
        assert all(source != target for source, target in pairs), "what keeps the state stands in its box"

    def test_group_saves_arrows(self) -> None:
        """Every state in which a request is alive can FINISH: two arrows say it, not twelve."""
        assert mermaid(MACHINES["request"]).count("FINISH ") == 2

    @EVERY_MACHINE
    def test_labels_do_not_end_early(self, machine: Machine) -> None:
        """A second colon or a semicolon would end the label for Mermaid."""
        labels = re.findall(r" --> \w+: (.+)$", mermaid(machine), re.MULTILINE)
        assert not set("".join(labels)) & set(":;#")

    @pytest.mark.parametrize(
        ("name", "first", "last"),
        [
            ("block", "FREE", set()),
            ("transfer", "PLANNED", {"COMPLETED", "FAILED", "CANCELLED", "DRAINED", "LOST"}),
            ("lease", "NONE", set()),
            ("request", "alive_NEW", {"RELEASED"}),
        ],
    )
    def test_marks_where_a_life_begins_and_ends(self, name: str, first: str, last: set[str]) -> None:
        text = mermaid(MACHINES[name])
        assert re.findall(r"\[\*\] --> (\w+)", text) == [first]
        assert set(re.findall(r"(\w+) --> \[\*\]", text)) == last

    def test_label_has_guard_and_effect(self) -> None:
        text = mermaid(BLOCK).replace("\u00a0", " ")
        assert "  STORING --> STORED: END_COPY_GOOD [copies = 1] / copies - 1\n" in text
        assert "  STORED --> EVICTED: EVICT [pins = 0]<br/>INVALIDATE / pins = 0\n" in text
        assert "  PLANNED --> SUBMITTED: SUBMIT\n" in mermaid(TRANSFER)

    @pytest.mark.parametrize(
        ("when", "text"),
        [
            ({}, ""),
            ({"pins": (0, 0)}, "pins = 0"),
            ({"copies": (2, BLOCK.counters[0].limit)}, "copies ≥ 2"),
            ({"copies": (0, 3)}, "copies ≤ 3"),
            ({"copies": (2, 3), "pins": (1, 1)}, "2 ≤ copies ≤ 3, pins = 1"),
        ],
    )
    def test_guard_reads_as_a_person_writes_it(self, when: dict[str, tuple[int, int]], text: str) -> None:
        row = Row((BlockState.STORED,), BlockTrigger.PIN, None, "", when)
        assert guard_text(BLOCK, row) == text


@cache
def picture(name: str) -> str:
    return svg(MACHINES[name])


class TestSvg:
    @GRAPHVIZ
    @EVERY_MACHINE
    def test_names_every_state_guard_and_effect(self, machine: Machine) -> None:
        """And is well-formed."""
        self._check_words(machine, picture(machine.name))

    @EVERY_MACHINE
    def test_the_site_has_the_machine_of_today(self, machine: Machine) -> None:
        """`PYTHONPATH=specs python -m write_docs` draws docs/pictures where Graphviz is."""
        kept = ROOT / "docs" / "pictures" / f"{machine.name}.svg"
        self._check_words(machine, kept.read_text(encoding="utf-8"))

    def _check_words(self, machine: Machine, text: str) -> None:
        root = ElementTree.fromstring(text)
        lines = {"".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")}
        said = {line.removeprefix("↻ ") for line in lines}
        expected = {state.name for state in machine.states} | {step[1] for step in steps_of(machine)}
        assert said == expected | GROUPS.get(machine.name, {}).keys() | {f"The {machine.name} machine"}

    @GRAPHVIZ
    @EVERY_MACHINE
    def test_has_the_arrows_of_the_mermaid_text(self, machine: Machine) -> None:
        root = ElementTree.fromstring(picture(machine.name))
        groups = [one.get("class") for one in root.iter("{http://www.w3.org/2000/svg}g")]
        assert groups.count("edge") == len(re.findall(r" --> \w+: ", mermaid(machine)))

    def test_without_the_package_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "graphviz", None)
        with pytest.raises(ConfigError, match=r"pip install 'kvsm\[diagrams\]'"):
            svg(BLOCK)

    @pytest.mark.skipif(not find_spec("graphviz"), reason="pip install 'kvsm[diagrams]'")
    def test_without_the_program_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="apt-get install graphviz"):
            svg(BLOCK)


class TestCommand:
    @pytest.mark.parametrize("name", MACHINES)
    def test_prints_mermaid_by_default(self, name: str) -> None:
        result = CliRunner().invoke(diagram, [name])
        assert (result.exit_code, result.output) == (0, mermaid(MACHINES[name]))

    def test_prints_a_table(self) -> None:
        result = CliRunner().invoke(diagram, ["lease", "--format", "table"])
        assert (result.exit_code, result.output) == (0, table(MACHINES["lease"]))

    @GRAPHVIZ
    def test_writes_a_picture_to_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "lease.svg"
        result = CliRunner().invoke(diagram, ["lease", "--format", "svg", "--output", str(path)])
        assert (result.exit_code, result.output) == (0, "")
        assert path.read_text(encoding="utf-8") == picture("lease")

    @pytest.mark.parametrize("arguments", [["blok"], [], ["block", "--format", "png"]])
    def test_wrong_name_is_answered_with_the_right_ones(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(diagram, arguments)
        assert result.exit_code == 2
        assert "block" in result.output or "'mermaid', 'svg', 'table'" in result.output

    def test_output_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "absent" / "block.svg"
        result = CliRunner().invoke(diagram, ["block", "--output", str(path)])
        assert result.exit_code == 2
        assert f"cannot write {path}: No such file or directory" in result.output.replace("\n", " ")
