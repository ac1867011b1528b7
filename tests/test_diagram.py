"""What people see of the machines: that it says what the tables say, and is drawn to be read."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from kvsm.cli.diagram import diagram
from kvsm.diagrams import mermaid, svg, table
from kvsm.diagrams.diagram import edges, finals, graph, guard_text
from kvsm.diagrams.drawing import TONES
from kvsm.diagrams.layouts import LAYOUTS
from kvsm.diagrams.pages import embedded, write_docs
from kvsm.diagrams.routing import Rect, Route, routes
from kvsm.errors import ConfigError
from kvsm.states import BLOCK, MACHINES, TRANSFER, BlockState, BlockTrigger
from kvsm.states.machine import Machine, Row

DOCS = Path(__file__).parent.parent / "docs"
MEND = "not current: run `python -m kvsm.diagrams docs`"
EVERY_MACHINE = pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))


@cache
def picture(name: str) -> str:
    return svg(MACHINES[name])


@cache
def ways(name: str) -> list[Route]:
    return routes(graph(MACHINES[name]))


def overlap(one: Rect, other: Rect) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def steps_of(machine: Machine) -> set[tuple[str, str, str]]:
    """(source, trigger, target) of everything that the dense table can do."""
    return {
        (state.name, trigger.name, machine.states(arc.target).name)
        for trigger in machine.triggers
        for state in machine.states
        for arc in machine.dense[trigger][state]
    }


class TestDocs:
    """The pages show the tables as they are."""

    @EVERY_MACHINE
    def test_the_pictures_are_current(self, machine: Machine) -> None:
        path = DOCS / "images" / f"{machine.name}.svg"
        assert path.read_text(encoding="utf-8") == picture(machine.name), f"{path} is {MEND}"

    def test_the_page_is_current(self) -> None:
        page = (DOCS / "machines.md").read_text(encoding="utf-8")
        assert page == embedded(page), f"docs/machines.md is {MEND}"

    def test_a_page_without_its_marks_is_refused(self, tmp_path: Path) -> None:
        """And left as it was."""
        (tmp_path / "machines.md").write_text("# Machines\n")
        with pytest.raises(ConfigError, match=r"machines\.md has no lines '<!-- block: from the table -->'"):
            write_docs(tmp_path)
        assert (tmp_path / "machines.md").read_text() == "# Machines\n"
        assert not (tmp_path / "images").exists()

    def test_a_stale_page_is_written_anew(self, tmp_path: Path) -> None:
        page = (DOCS / "machines.md").read_text(encoding="utf-8")
        (tmp_path / "machines.md").write_text(
            page.replace("[*] --> FREE", "[*] --> STORED"), encoding="utf-8"
        )
        done = subprocess.run(
            [sys.executable, "-m", "kvsm.diagrams", str(tmp_path)], check=False, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert (tmp_path / "machines.md").read_text(encoding="utf-8") == page
        assert (tmp_path / "images" / "lease.svg").read_text(encoding="utf-8") == picture("lease")

    def test_no_folder_is_told_how(self) -> None:
        done = subprocess.run([sys.executable, "-m", "kvsm.diagrams"], check=False, capture_output=True)
        assert done.returncode == 1
        assert b"usage: python -m kvsm.diagrams DOCS" in done.stderr

    @EVERY_MACHINE
    def test_a_table_has_a_line_for_each_row(self, machine: Machine) -> None:
        lines = table(machine).splitlines()
        assert len(lines) == 2 + len(machine.rows)
        for row, line in zip(machine.rows, lines[2:], strict=True):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 6
            assert cells[0].split(", ") == [source.name for source in row.sources]
            assert (cells[1], cells[5]) == (row.trigger.name, row.why)


class TestText:
    @EVERY_MACHINE
    def test_edges_say_all_that_the_table_can_do(self, machine: Machine) -> None:
        """No more and no less; and a frame says the same as its members would one by one."""
        frames = LAYOUTS[machine.name].frames
        flat = {(edge.source, trigger, edge.target) for edge in edges(machine) for trigger in edge.triggers}
        assert flat == steps_of(machine)
        spread = {
            (member, trigger, member if edge.source == edge.target else edge.target)
            for edge in edges(machine, frames)
            for member in frames.get(edge.source, (edge.source,))
            for trigger in edge.triggers
        }
        assert spread == steps_of(machine)

    @EVERY_MACHINE
    def test_mermaid_has_one_arrow_for_each_pair(self, machine: Machine) -> None:
        text = mermaid(machine)
        arrows = re.findall(r"^    (\w+) --> (\w+): (.+)$", text, re.MULTILINE)
        pairs = [(source, target) for source, target, _ in arrows]
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == {(source, target) for source, _, target in steps_of(machine)}
        for source, target, label in arrows:
            named = set(re.findall(r"[A-Z][A-Z_]+", label))
            assert named == {step[1] for step in steps_of(machine) if (step[0], step[2]) == (source, target)}
            # A second colon or a semicolon would end the label for Mermaid.
            assert not set(label) & set(":;#")

    @EVERY_MACHINE
    def test_mermaid_marks_where_a_life_begins_and_ends(self, machine: Machine) -> None:
        text = mermaid(machine)
        assert text.startswith("stateDiagram-v2\n")
        assert re.findall(r"\[\*\] --> (\w+)", text) == [machine.initial.name]
        assert set(re.findall(r"(\w+) --> \[\*\]", text)) == finals(machine)

    def test_the_ends_are_these(self) -> None:
        assert {name: finals(machine) for name, machine in MACHINES.items()} == {
            "block": {"RETIRED"},
            "transfer": {"COMPLETED", "FAILED", "CANCELLED", "DRAINED", "LOST"},
            "lease": {"RETIRED"},
            "request": {"RELEASED"},
        }

    def test_a_label_has_guard_and_effect(self) -> None:
        assert "    STORING --> STORED: END_COPY_GOOD [copies = 1] / copies - 1\n" in mermaid(BLOCK)
        assert "    STORED --> EVICTED: EVICT [pins = 0]<br/>INVALIDATE / pins = 0\n" in mermaid(BLOCK)
        assert "    PLANNED --> SUBMITTED: SUBMIT\n" in mermaid(TRANSFER)

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
    def test_a_guard_reads_as_a_person_writes_it(self, when: dict[str, tuple[int, int]], text: str) -> None:
        row = Row((BlockState.STORED,), BlockTrigger.PIN, None, "", when)
        assert guard_text(BLOCK, row) == text


class TestPicture:
    @EVERY_MACHINE
    def test_it_stands_alone(self, machine: Machine) -> None:
        """Well-formed, and nothing that a browser would fetch or run."""
        root = ElementTree.fromstring(picture(machine.name))
        tags = {element.tag.split("}")[1] for element in root.iter()}
        assert not tags & {"script", "image", "foreignObject", "use"}
        assert set(re.findall(r"(?:https?:)?//[^\"' ]+", picture(machine.name))) == {
            "http://www.w3.org/2000/svg"
        }

    @EVERY_MACHINE
    def test_it_names_every_state_and_every_trigger(self, machine: Machine) -> None:
        written = ElementTree.fromstring(picture(machine.name)).iter("{http://www.w3.org/2000/svg}text")
        text = " ".join(element.text or "" for element in written)
        words = set(re.findall(r"[A-Z][A-Z_]+", text))
        assert words == {state.name for state in machine.states} | {
            trigger.name for trigger in machine.triggers
        }

    @EVERY_MACHINE
    def test_nothing_lies_over_a_box(self, machine: Machine) -> None:
        """No box on another, no label on a box or on another label, no link through a box."""
        drawn = graph(machine)
        boxes = {node.name: node.rect for node in drawn.nodes}
        names = list(boxes)
        for number, one in enumerate(names):
            assert not any(overlap(boxes[one], boxes[other]) for other in names[number + 1 :]), one
        for link, way in zip(drawn.links, ways(machine.name), strict=True):
            told = f"{link.source} to {link.target}"
            for name, (left, top, right, bottom) in boxes.items():
                assert not overlap(way.rect, boxes[name]), f"the label of {told} covers {name}"
                x, y = way.points[1:-1, 0], way.points[1:-1, 1]
                inside = (x > left) & (x < right) & (y > top) & (y < bottom)
                assert not np.any(inside), f"the link {told} runs through {name}"
        labels = [way.rect for way in ways(machine.name)]
        for number, label in enumerate(labels):
            assert not any(overlap(label, other) for other in labels[number + 1 :]), drawn.links[number]

    @EVERY_MACHINE
    def test_no_link_runs_under_a_label_of_another(self, machine: Machine) -> None:
        drawn, drawn_ways = graph(machine).links, ways(machine.name)
        for link, way in zip(drawn, drawn_ways, strict=True):
            for other, other_way in zip(drawn, drawn_ways, strict=True):
                left, top, right, bottom = other_way.rect
                x, y = way.points[:, 0], way.points[:, 1]
                under = (x > left) & (x < right) & (y > top) & (y < bottom)
                assert link is other or not np.any(under), f"{link} runs under the label of {other}"

    @EVERY_MACHINE
    def test_it_reads_on_light_and_on_dark(self, machine: Machine) -> None:
        """Every tone in use is explained, and has its colours in both schemes."""
        layout = LAYOUTS[machine.name]
        assert set(layout.tones.values()) == set(layout.meanings)
        light, dark = picture(machine.name).split("@media(prefers-color-scheme:dark)")
        for tone in layout.meanings:
            (fill, _), (dark_fill, _) = TONES[tone]
            assert f".{tone}{{fill:{fill}" in light
            assert f".{tone}{{fill:{dark_fill}" in dark


class TestCommand:
    @pytest.mark.parametrize("name", MACHINES)
    def test_prints_mermaid_when_not_told_otherwise(self, name: str) -> None:
        result = CliRunner().invoke(diagram, [name])
        assert (result.exit_code, result.output) == (0, mermaid(MACHINES[name]))

    def test_writes_a_picture_to_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "lease.svg"
        result = CliRunner().invoke(diagram, ["lease", "--format", "svg", "--output", str(path)])
        assert (result.exit_code, result.output) == (0, "")
        assert path.read_text(encoding="utf-8") == picture("lease")

    @pytest.mark.parametrize("arguments", [["blok"], [], ["block", "--format", "png"]])
    def test_a_wrong_name_is_told_the_right_ones(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(diagram, arguments)
        assert result.exit_code == 2
        assert "block" in result.output or "'mermaid', 'svg'" in result.output

    def test_an_output_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "absent" / "block.svg"
        result = CliRunner().invoke(diagram, ["block", "--output", str(path)])
        assert result.exit_code == 2
        assert f"cannot write {path}: No such file or directory" in result.output.replace("\n", " ")
