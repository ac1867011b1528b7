"""Make the page as one HTML file, from its parts in `page/` and the data of a window.

No text of a log is written into the HTML directly. The data is compressed JSON in base64, inside an element
that browsers do not run; the script converts it to text nodes and pixels only. A content security policy
allows only this script and this style sheet, by their hashes, and forbids all network requests.
"""

from __future__ import annotations

import base64
import gzip
from hashlib import sha256
from importlib.resources import files
from itertools import pairwise
from string import Template

import msgspec

from kvsm.events import KINDS
from kvsm.explain.timeline.columns import WindowTables
from kvsm.explain.timeline.hits import HIT_LOOKUPS, hit_track
from kvsm.explain.timeline.moves import EDGES, BlockEdge
from kvsm.explain.timeline.page_words import ACTIVITIES, ACTIVITY, WHY_GONE
from kvsm.explain.timeline.picture import block_machine_svg
from kvsm.explain.timeline.stream import PARTS, EventStream
from kvsm.states import BlockState

SCRIPTS = ("model.js", "layout.js", "draw.js", "why.js", "list.js", "search.js", "main.js")
"""The parts of the script, in order. They share one scope."""

SCHEMA = "kvsm.explain.timeline-page/1"


class PageHead(msgspec.Struct):
    """The page's description of its log.

    directory: the log's directory, as given to the command.
    began_ns: Unix time of the log's first event (ns).
    whole: (first, last) event of the log.
    notes: what is wrong with the log, and what was left out.
    """

    directory: str
    began_ns: int
    whole: tuple[int, int]
    notes: list[str]


def make_page(head: PageHead, stream: EventStream, tables: WindowTables) -> str:
    """Make the text of the HTML file: ASCII."""
    style = _part("page.css")
    script = "\n".join(["'use strict';", "(() => {", *map(_part, SCRIPTS), "})();", ""])
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_part("page.html")).substitute(
        policy=policy,
        style=style,
        machine=block_machine_svg(),
        data=base64.b64encode(gzip.compress(page_data(head, stream, tables), 6, mtime=0)).decode("ascii"),
        script=script,
    )


def page_data(head: PageHead, stream: EventStream, tables: WindowTables) -> bytes:
    """Encode the script's data as JSON. Increasing columns become differences, which compress better."""
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "directory": head.directory,
            # A JavaScript number cannot represent a Unix time in nanoseconds exactly.
            "began_ns": str(head.began_ns),
            "whole": head.whole,
            "notes": head.notes,
            "events": {
                "number": _differences(stream.number),
                "at": _differences([at - head.began_ns for at in stream.at]),
                "step": _differences(stream.step),
                "kind": stream.kind,
                "text": stream.text,
            },
            "kinds": [kind.__name__ for kind in KINDS],
            "moves": stream.moves,
            "hits": {"lookups": HIT_LOOKUPS, **msgspec.structs.asdict(hit_track(tables.columns["lookups"]))},
            "pool": {"event": stream.pool.event, **dict(zip(PARTS, stream.pool.parts))},
            "checkpoints": stream.checkpoints,
            "states": [state.name for state in BlockState],
            "edges": [_edge(edge) for edge in EDGES],
            "names": tables.names,
            "tables": tables.columns,
            "activity": {state.name: activity for state, activity in ACTIVITY.items()},
            "activities": ACTIVITIES,
            "why_gone": {str(why): sentence for why, sentence in WHY_GONE.items()},
        }
    )


def _edge(edge: BlockEdge) -> dict[str, int | str]:
    return {
        "source": int(edge.source),
        "trigger": edge.trigger.name,
        "target": int(edge.target),
        "why": edge.why,
    }


def _differences(column: list[int]) -> list[int]:
    """The first value, then the difference of each value from the one before."""
    return column[:1] + [after - before for before, after in pairwise(column)]


def _part(name: str) -> str:
    return (files("kvsm.explain.timeline") / "page" / name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    """A source expression of a content security policy that allows exactly this text."""
    return f"sha256-{base64.b64encode(sha256(text.encode('ascii')).digest()).decode('ascii')}"
