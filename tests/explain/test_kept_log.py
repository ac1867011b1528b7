"""Logs that release 0.1.0 wrote: every later release reads them, with the same results.

`tests/support/kept_log.py` has made the logs and the results beside them. If a test here fails, a promise of
docs/versions.md is broken: change the code, and never the logs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kept_log import LOGS, columns, differences, read_results, results
from places import ROOT

from kvsm.core.log import LogReader
from kvsm.explain.tables import table_index
from kvsm.explain.tables.opened import open as open_log

KEPT = ROOT / "tests" / "data" / "log-0.1.0"


@pytest.mark.parametrize("log", LOGS)
def test_a_log_of_0_1_0_reads_as_it_did(log: str) -> None:
    """Not in wording: events, fold, metrics and tables, and the answers of `verify`, `replay`, `report`,
    `tail`, `top`, `timeline`, `why` and `show`."""
    assert differences(read_results(KEPT)[log], results(KEPT, log)) == []


@pytest.mark.parametrize("log", LOGS)
def test_an_index_of_a_log_of_0_1_0_has_the_same_tables(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both when it is made, and when it is opened again."""
    monkeypatch.setattr(table_index, "SMALL_LOG", 0)
    copy = tmp_path / "log"
    shutil.copytree(KEPT / log, copy)
    copy.chmod(0o700)
    kept = read_results(KEPT)[log]["tables"]
    for _ in range(2):
        with open_log(str(copy)) as opened:
            assert differences(kept, columns(opened)) == []
        assert (copy / table_index.INDEX_NAME).exists()


def test_the_logs_of_0_1_0_say_their_version_and_have_every_kind_of_event() -> None:
    """What is not in them is not proved to be readable."""
    kinds = {kind for result in read_results(KEPT).values() for kind in result["events"]}
    assert len(kinds) == 27
    versions = {segment.head.schema for log in LOGS for segment in LogReader(KEPT / log).segments()}
    assert versions == {3}


@pytest.mark.parametrize(
    ("kept", "now", "found"),
    [
        ({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 2], "more": 3}, []),
        ({"a": {"b": 1}}, {"a": {}}, ["/a/b: gone"]),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, ["/a: was [1, 2], is [1, 2, 3]"]),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, ["/a/1/b: was 2, is 3"]),
        ({"a": 1}, {"a": None}, ["/a: was 1, is None"]),
    ],
)
def test_additions_are_no_difference(kept: object, now: object, found: list[str]) -> None:
    assert differences(kept, now) == found
