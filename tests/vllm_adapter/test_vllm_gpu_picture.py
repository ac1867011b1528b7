"""The picture of `benchmarks/vllm_gpu.py` shows when copies and compute ran at the same time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda s: (float(s[0]), float(sum(s))))
)


@pytest.fixture(scope="module")
def picture() -> Iterator[Any]:
    """Import the module, which is outside the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield import_module("vllm_gpu_picture")


def moments(of: Any) -> set[int]:
    """The unit intervals in which one of these spans runs."""
    return {moment for began, ended in of for moment in range(int(began), int(ended))}


@given(one=spans, other=spans)
def test_merged_and_shared_count_moments(picture: Any, one: Any, other: Any) -> None:
    left, right = picture.merged(one), picture.merged(other)
    assert moments(left) == moments(one)
    assert all(before[1] < after[0] for before, after in pairwise(left))
    assert picture.shared(left, right) == len(moments(one) & moments(other))


def event(name: str, began: float, lasted: float, kind: str) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": began, "dur": lasted, "cat": kind}


GPU_TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        event("kvsm clock", 1000, 1, "user_annotation"),
        event("gemm", 1000, 100, "kernel"),
        event("attention", 1100, 50, "kernel"),
        event("kvsm_copy", 1120, 60, "kernel"),
        event("Memcpy HtoD (Pinned -> Device)", 1300, 20, "gpu_memcpy"),
        event("Memcpy DtoD (Device -> Device)", 1400, 20, "gpu_memcpy"),
        event("aten::mm", 1000, 500, "cpu_op"),
    ]
}


def test_a_gpu_has_its_kernels_and_copies(picture: Any) -> None:
    """A copy within the device is neither; kvsm's kernel is a copy."""
    beside = {"clock": 5.0, "copies": [["STORE", 64, 5.00012, 5.00018]], "steps": [[5.0, 5.0005]]}
    lanes = picture.lanes_of(GPU_TRACE, beside)
    assert lanes[picture.COMPUTE] == [(1000, 1150)]
    assert lanes[picture.COPIES] == [(1120, 1180), (1300, 1320)]
    ((began, ended),) = lanes[picture.REPORTED]
    assert (began, ended) == (pytest.approx(1120), pytest.approx(1180))
    assert picture.overlap(lanes) == pytest.approx(30 / 80)


def test_without_a_gpu_steps_are_compute(picture: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    events = [
        one for one in GPU_TRACE["traceEvents"] if not str(one.get("cat", "")).startswith(("kernel", "gpu"))
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    beside = {"clock": 5.0, "copies": [["LOAD", 64, 5.0001, 5.0003]], "steps": [[5.0, 5.0002]]}
    Path(f"{trace}.kvsm").write_text(json.dumps(beside))
    facts = picture.draw(trace, tmp_path / "picture.svg")
    assert facts["overlap"] == pytest.approx(0.5)
    assert facts["busy_ms"] == pytest.approx({picture.COMPUTE: 0.2, picture.REPORTED: 0.2})
    drawn = ElementTree.parse(tmp_path / "picture.svg").getroot()
    colours = [one.get("fill") for one in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert colours == ["white", picture.COLOURS[picture.COMPUTE], picture.COLOURS[picture.REPORTED]]


def test_a_long_trace_is_drawn_in_few_pieces(picture: Any) -> None:
    """No more than one piece for each pixel, however many kernels ran."""
    many = [(float(began), began + 0.5) for began in range(20_000)]
    drawn = picture.picture(
        {picture.COMPUTE: many, picture.COPIES: [(0.0, 1.0), (19_000.0, 20_000.0)]}, width=200
    )
    assert 3 <= drawn.count("<rect") <= 200


def test_without_copies_there_is_no_share(picture: Any) -> None:
    assert picture.overlap({picture.COMPUTE: [(0.0, 1.0)]}) is None
