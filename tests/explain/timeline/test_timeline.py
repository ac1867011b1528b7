"""What a timeline is made from: the stream of events, the rows of a window, lanes, colours, and the HTML."""

from __future__ import annotations

import base64
import gzip
import json
import re
from bisect import bisect_right
from collections import Counter
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_timeline import MadeTimeline
from made_timeline import made as made_row
from replay_life import CONFIGS, OPERATIONS, Life, Operations, gapped, random_life, story_life

import kvsm
from examples import examples
from kvsm.core.ledger import Ledger
from kvsm.events import KINDS
from kvsm.explain.story import Trust
from kvsm.explain.story.concern import concern
from kvsm.explain.tables.row_kinds import TABLES, Gone, LookupRow
from kvsm.explain.timeline.columns import COLUMNS, CONDITIONS, read_tables
from kvsm.explain.timeline.hits import HIT_LOOKUPS
from kvsm.explain.timeline.lanes import pack
from kvsm.explain.timeline.moves import EDGES, moves
from kvsm.explain.timeline.page import SCRIPTS
from kvsm.explain.timeline.page_words import ACTIVITIES, ACTIVITY, WHY_GONE, why_gone
from kvsm.explain.timeline.picture import ARROWS, CENTRES, block_machine_svg
from kvsm.explain.timeline.stream import PART_OF, PARTS, EventStream, read_stream
from kvsm.states import BlockState, BlockTrigger, RequestState
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.words import STATE_MASK, StateWords

PAGE = Path(kvsm.__file__).parent / "explain" / "timeline" / "page"
STYLE = (PAGE / "page.css").read_text()
WHOLE = (1, 1 << 60)


# What an event does to the blocks.


def steps_taken(life: Life, monkeypatch: pytest.MonkeyPatch) -> list[Counter[tuple[int, int, int]]]:
    """(state, trigger, state after) of all blocks with each event, overheard from the fold itself."""
    ledger, heard = Ledger(life.config), Counter[tuple[int, int, int]]()
    original = StateWords._next

    def overhear(self: StateWords, ids: Any, trigger: Any, seq: int) -> Any:
        before = [self.words[one] for one in list(ids)]
        after = original(self, ids, trigger, seq)
        if self is ledger.blocks:
            those = [after] * len(before) if isinstance(after, int) else list(after)
            for old, new in zip(before, those, strict=True):
                if old != new or trigger is BlockTrigger.TOUCH:
                    heard[old & STATE_MASK, int(trigger), int(new) & STATE_MASK] += 1
        return after

    found = []
    with monkeypatch.context() as patched:
        patched.setattr(StateWords, "_next", overhear)
        for event in life.events:
            heard.clear()
            ledger.apply(event)
            found.append(Counter(heard))
    return found


@pytest.mark.usefixtures("_python_folds")
@pytest.mark.parametrize("seed", range(6))
def test_the_edges_of_an_event_are_the_ones_that_the_fold_took(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diagram must light up what happened, not another way to the same state."""
    life = random_life(seed, 400)
    taken = steps_taken(life, monkeypatch)
    ledger = Ledger(life.config)
    for event, expected in zip(life.events, taken, strict=True):
        slots = concern(ledger, event).slots
        before = [ledger.blocks.words[slot] for slot in slots]
        ended = ledger.apply(event)
        found = moves(event, [(old, ledger.blocks.words[slot]) for old, slot in zip(before, slots)], ended)
        told = {
            (int(EDGES[edge].source), int(EDGES[edge].trigger), int(EDGES[edge].target)): blocks
            for edge, blocks in found.items()
        }
        assert told == expected, event


def test_an_edge_that_no_table_has_is_an_error() -> None:
    """A wrong word must not light up a wrong edge."""
    stored, free = BLOCK_WORDS.encode(BlockState.STORED), BLOCK_WORDS.encode(BlockState.FREE)
    life = random_life(1, 20)
    with pytest.raises(ValueError, match=r"STORED.* does not become FREE"):
        moves(life.events[-1], [(stored, free)], None)


# The stream.


@settings(max_examples=examples(25))
@given(OPERATIONS, CONFIGS)
def test_the_stream_has_the_pool_and_all_states_after_every_event(
    operations: Operations, config: dict[str, Any]
) -> None:
    """The chart of the pool and the counts in the diagram come from moves; the ledger says what is right."""
    life = Life(**config).drive(operations).drain()
    stream = stream_of(life)
    ledger = Ledger(life.config)
    states = list(stream.checkpoints.blocks[0])
    moved: dict[int, list[tuple[int, int]]] = {}
    for place, edge, blocks in zip(stream.moves.event, stream.moves.edge, stream.moves.blocks):
        moved.setdefault(place, []).append((edge, blocks))
    for place, event in enumerate(life.events):
        ledger.apply(event)
        for edge, blocks in moved.get(place, ()):
            states[EDGES[edge].source] -= blocks
            states[EDGES[edge].target] += blocks
        assert states == np.bincount(ledger.blocks.view & STATE_MASK, minlength=len(BlockState)).tolist()
        sample = bisect_right(stream.pool.event, place) - 1
        parts = {part: column[sample] for part, column in zip(PARTS, stream.pool.parts)}
        assert parts["free"] == len(ledger.free)
        assert parts["idle"] == len(ledger.policy)
        assert sum(parts.values()) == life.config.host_blocks


def stream_of(life: Life) -> EventStream:
    """The stream of a life that was written nowhere."""
    from kvsm.explain.timeline.stream import _Recorder

    stream = EventStream()
    recorder = _Recorder(Ledger(life.config), stream)
    for event in life.events:
        recorder.take(event)
    return stream


def test_a_late_window_is_the_end_of_the_whole_stream(tmp_path: Path) -> None:
    """It is folded from a snapshot, and must not differ from the fold of everything."""
    random_life(3, 500, tmp_path, writer={"segment_bytes": 4096}).close()
    whole = read_stream(tmp_path, Trust(), *WHOLE)
    first = len(whole.number) - 40
    late = read_stream(tmp_path, Trust(), first + 1, WHOLE[1])
    assert len(list(tmp_path.glob("*.kvsm"))) > 3
    assert late.number == whole.number[first:]
    assert late.text == whole.text[first:]
    assert [column[-1] for column in late.pool.parts] == [column[-1] for column in whole.pool.parts]
    moved = [row for row, place in enumerate(whole.moves.event) if place >= first]
    assert late.moves.edge == [whole.moves.edge[row] for row in moved]


def test_a_window_that_ends_before_damage_is_whole(tmp_path: Path) -> None:
    """Nothing behind the last event of the window is read."""
    random_life(3, 200, tmp_path, writer={"segment_bytes": 4096}).close()
    segments = sorted(tmp_path.glob("*.kvsm"))
    last = int(segments[1].stem) - 1
    segments[1].write_bytes(b"not a segment")
    assert read_stream(tmp_path, Trust(), 1, last).number == list(range(1, last + 1))


def test_after_a_gap_the_counts_begin_again(tmp_path: Path) -> None:
    """After a gap the ledger is restored from a snapshot, which gives the number of blocks in each state."""
    gapped(tmp_path)
    stream = read_stream(tmp_path, Trust(), *WHOLE)
    (gap,) = [
        place for place, (one, two) in enumerate(zip(stream.number, stream.number[1:])) if two > one + 1
    ]
    assert gap + 1 in stream.checkpoints.event
    assert gap + 1 in stream.pool.event


# Lanes.


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15))))
def test_lanes_are_few_and_nothing_overlaps(drawn: list[tuple[int, int]]) -> None:
    intervals = sorted((first, first + more) for first, more in drawn)
    lanes = pack(intervals)
    for lane in set(lanes):
        mine = [one for one, where in zip(intervals, lanes) if where == lane]
        assert all(before[1] < after[0] for before, after in pairwise(mine))
    depth = max((sum(a <= at <= b for a, b in intervals) for at in range(60)), default=0)
    assert len(set(lanes)) == depth


# The rows.


def test_the_columns_are_columns_of_the_tables() -> None:
    assert set(COLUMNS) == set(CONDITIONS) == set(TABLES) - {"events", "occupancy", "block_runs"}
    for table, names in COLUMNS.items():
        assert set(names) <= set(TABLES[table].__struct_fields__), table


@pytest.mark.parametrize("seed", range(2))
def test_the_rows_are_the_ones_that_meet_the_window(seed: int, tmp_path: Path) -> None:
    """None that is in view is left out, whatever began before or ends after."""
    random_life(seed, 300, tmp_path).close()
    with kvsm.open(tmp_path) as log:
        first, last = log.last // 3, 2 * log.last // 3
        found = read_tables(log, first, last).columns
        transfers = {one.transfer for one in log.transfers() if meets(one.transfer, one.ended, first, last)}
        assert set(found["transfers"]["transfer"]) == transfers
        assert set(found["copies"]["transfer"]) == {
            one.transfer for one in log.copies() if one.transfer in transfers
        }
        assert found["requests"]["arrived"] == [
            one.arrived for one in log.requests() if meets(one.arrived, one.finished, first, last)
        ]
        assert found["request_states"]["began"] == [
            one.began for one in log.request_states() if meets(one.began, one.ended, first, last)
        ]
        assert len(found["blocks"]["slot"]) == sum(
            meets(one.transfer, one.gone, first, last)
            or (one.wanted is not None and first <= one.wanted <= last)
            for one in log.blocks()
        )
        for table in ("lookups", "resets", "skips", "rejections"):
            expected = [one.event for one in getattr(log, table)() if first <= one.event <= last]
            assert found[table]["event"] == expected, table


def meets(began: int, ended: int | None, first: int, last: int) -> bool:
    return began <= last and (ended is None or ended >= first)


def test_each_stay_belongs_to_the_life_that_it_is_in(tmp_path: Path) -> None:
    """A name that is used again has several lives, and each is drawn in a lane of its own time."""
    random_life(5, 500, tmp_path).close()
    with kvsm.open(tmp_path) as log:
        columns = read_tables(log, log.first, log.last).columns
    requests, stays = columns["requests"], columns["request_states"]
    assert max(Counter(requests["request"]).values()) > 1, "otherwise this test could not fail"
    for row, life in enumerate(stays["life"]):
        later = [
            arrived
            for name, arrived in zip(requests["request"], requests["arrived"])
            if name == stays["request"][row] and arrived <= stays["began"][row]
        ]
        assert requests["request"][life] == stays["request"][row]
        assert requests["arrived"][life] == max(later)


def test_too_many_rows_are_left_out_and_counted() -> None:
    made = MadeTimeline(30)
    tables = read_tables(made.rows, 1, made.last, most_rows=10)
    assert len(tables.columns["copies"]["transfer"]) == 10
    (line,) = [line for line in tables.left_out if "table copies" in line]
    assert line.startswith(f"{len(made.rows.rows['copies']) - 10:,} rows of the table copies are left out")


# Words, looks and colours.


def test_everything_that_can_be_has_words() -> None:
    assert set(WHY_GONE) == set(Gone)
    assert set(ACTIVITY) == set(RequestState)
    assert set(ACTIVITIES) == set(ACTIVITY.values()) - {None}
    assert set(PART_OF) == set(BlockState)
    assert set(PART_OF.values()) | {"pinned"} == set(PARTS)


def test_a_cause_names_the_event_and_the_transfer() -> None:
    said = why_gone("evicted", 1200, "store 1201 of request r1")
    assert said == "it was evicted at event 1,200 to make room for store 1201 of request r1"
    assert why_gone("reset", None, None) == "the cache was reset at event that the log does not tell"


def looks(name: str) -> dict[str, str]:
    """The looks of layout.js: what is drawn -> its pattern."""
    text = (PAGE / "layout.js").read_text()
    found = re.search(rf"const {name}_LOOKS = \[\n(.*?)\];", text, re.DOTALL)
    assert found is not None
    return dict(re.findall(r"\['(\w+)', '(\w+)'\]", found[1]))


def test_everything_that_is_drawn_has_a_look() -> None:
    assert set(looks("ACTIVITY")) == set(ACTIVITIES)
    assert set(looks("POOL")) == set(PARTS)
    assert set(looks("COPY")) == {"store", "load", "unreported", "failed"}


def themes() -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Theme -> name -> linear red, green and blue, as page.css has them."""
    light, dark = re.findall(r":root[^{]*\{(.*?)\}", STYLE, re.DOTALL)
    found, colours = {}, dict[str, Any]()
    for theme, text in (("light", light), ("dark", dark)):
        colours |= {
            name: np.array([int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)])
            for name, digits in re.findall(r"--([\w-]+): #(\w{6});", text)
        }
        found[theme] = {
            name: np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
            for name, value in colours.items()
        }
    return found


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(linear: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """CIE L*a*b* of a colour, under D65."""
    x, y, z = (
        np.cbrt(one) if one > 0.008856 else 7.787 * one + 16 / 116
        for one in TO_XYZ @ np.clip(linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["ACTIVITY", "COPY", "POOL"])
def test_colours_can_be_told_apart_by_everybody(name: str, theme: str, blindness: str) -> None:
    """Two looks of a track differ in colour, or in pattern where an eye may not tell their colours apart."""
    matrix, drawn = BLINDNESS[blindness], looks(name)
    seen = {one: lab(matrix @ themes()[theme][one]) for one in drawn}
    for one in drawn:
        for other in drawn:
            if one < other and drawn[one] == drawn[other]:
                assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "panel"])
@pytest.mark.parametrize("text", ["ink", "faint"])
def test_text_has_the_contrast_that_wcag_asks_for(theme: str, ground: str, text: str) -> None:
    """4.5 to 1, for text of any size (WCAG 2, success criterion 1.4.3)."""
    light = [float(TO_XYZ[1] @ themes()[theme][one]) + 0.05 for one in (ground, text)]
    assert max(light) / min(light) >= 4.5


# The picture of the block machine.


def test_the_picture_has_a_place_for_every_state_and_arrow() -> None:
    assert set(CENTRES) == set(BlockState)
    assert set(ARROWS) == {(one.source, one.target) for one in EDGES if one.source is not one.target}


def test_the_picture_names_every_edge_once() -> None:
    """A new row of the table must be drawn, or the diagram could not light it up."""
    root = ElementTree.fromstring(block_machine_svg())
    drawn = {node.get("data-edge"): node.text for node in root.iter("text") if node.get("data-edge")}
    assert drawn == {str(number): edge.trigger.name for number, edge in enumerate(EDGES)}
    names = [node.text for node in root.iter("text") if node.get("class") == "name"]
    assert names == [state.name for state in BlockState]


# The HTML.

HOSTILE = (
    "</script><script>window.bad=1</script>",
    "<img src=x onerror=window.bad=1>",
    "<!-- <script>",
    "' onmouseover='window.bad=1",
    "${window.bad=1} $policy `${1}`",
    "\u202egnihtemos\u2066",
    "a\u2028b\x1b[31m\x00",
    "]]></svg>&lt;b&gt;",
)


def data_of(page: str) -> Any:
    """What the script of a page reads."""
    found = re.search(r'<script type="application/octet-stream" id="data">([\w+/=]*)</script>', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_the_page_holds_the_window() -> None:
    """All columns, of all tables, with what was left out."""
    made = MadeTimeline(40)
    data = data_of(made.page("the log", ["a note"]))
    assert (data["directory"], data["notes"], data["whole"]) == ("the log", ["a note"], [1, made.last])
    assert np.cumsum(data["events"]["number"]).tolist() == made.stream.number
    began = int(data["began_ns"])
    assert [began + at for at in np.cumsum(data["events"]["at"]).tolist()] == made.stream.at
    assert data["kinds"] == [kind.__name__ for kind in KINDS]
    assert data["tables"] == msgspec.to_builtins(made.tables.columns)


def test_the_page_has_the_hit_rate_of_the_last_requests() -> None:
    """It has a value at each first admission, in the order of the log. Other lookups do not count."""
    lookups = [
        # event, admitted, resumed, asked, on_device, on_host
        (1, 4, False, 4, 1, 1),
        (2, None, False, 8, 0, 0),
        (3, 3, False, 2, 2, 0),
        (5, 5, True, 8, 0, 0),
        (6, 6, False, 0, 0, 0),
        (7, 7, False, None, None, None),
        (8, 8, False, 2, 0, 0),
    ]
    names = ("event", "admitted", "resumed", "asked", "on_device", "on_host")
    made = MadeTimeline(3)
    made.rows.rows["lookups"] = [
        made_row(LookupRow, request="r0", **dict(zip(names, row, strict=True))) for row in lookups
    ]
    hits = data_of(made.page())["hits"]
    assert hits == {"lookups": HIT_LOOKUPS, "event": [3, 4, 8], "percent": [100, 67, 50]}


def test_nothing_of_a_log_is_text_of_the_page() -> None:
    """The data is in base64. So the HTML is the same, whatever a log contains, but for one run of letters."""
    harmless, hostile = (
        MadeTimeline(8, names).page(directory, [directory])
        for names, directory in ((["r"] * 8, "log"), (HOSTILE, HOSTILE[0]))
    )
    without = [re.sub(r'(id="data">)[^<]*', r"\1", page) for page in (harmless, hostile)]
    assert without[0] == without[1]
    assert hostile.isascii()
    names = data_of(hostile)["names"]
    assert {HOSTILE[0], r"\u202egnihtemos\u2066"} <= set(names)


def test_the_page_allows_its_own_script_and_no_network() -> None:
    """The policy has the hashes of the script and the style, so no other script or style runs."""
    page = MadeTimeline(2).page()
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    allowed = dict(part.strip().split(" ", 1) for part in found[1].split(";"))
    script, style = (
        f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
        for text in (
            page.split("<script>")[1].split("</script>")[0],
            page.split("<style>")[1].split("</style>")[0],
        )
    )
    none = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert allowed == {**none, "script-src": script, "style-src": style}
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\((?!#)", page)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_makes_no_markup_and_calls_nobody(name: str) -> None:
    """Text of a log may reach the page as text nodes only, and leaves it never."""
    text = (PAGE / name).read_text()
    for way in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch(",
        "XMLHttpRequest", "WebSocket", "sendBeacon", "import(", "localStorage", "setAttribute('on",
    ):  # fmt: skip
        assert way not in text, way
    assert len(text.splitlines()) <= 600


def test_a_story_is_told_by_name(tmp_path: Path) -> None:
    """In a real log the cause of a miss is the event that lights up EVICT."""
    story_life(tmp_path)
    with kvsm.open(tmp_path) as log:
        tables = read_tables(log, log.first, log.last)
    lookups = tables.columns["lookups"]
    assert str(Gone.EVICTED) in lookups["why"]
    row = lookups["why"].index(str(Gone.EVICTED))
    cause = lookups["cause"][row]
    stream = read_stream(tmp_path, Trust(), *WHOLE)
    assert stream.text[stream.number.index(cause)].startswith("BlocksEvicted")
    assert EDGES[stream.moves.edge[stream.moves.event.index(cause - 1)]].trigger is BlockTrigger.EVICT
