"""`kvsm query` and `kvsm export`: they only read, a wrong query is one clear line, and cells are harmless."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from places import ROOT
from replay_life import Life, random_life

import kvsm
from kvsm.cli import main
from kvsm.errors import ConfigError
from kvsm.explain.tables import arrow
from kvsm.explain.tables.row_kinds import KEYS, TABLES

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("query") / "log"
    random_life(3, 300, directory).close()
    return directory


def named(directory: Path, *names: str) -> Path:
    life = Life(directory)
    for name in names:
        life.core.arrive(name)
    life.close()
    return directory


# Answers.


def test_a_query_gives_a_table_json_and_csv(log: Path) -> None:
    query = "SELECT direction, COUNT(*) AS n FROM transfers GROUP BY direction ORDER BY direction"
    with kvsm.open(log) as opened:
        expected = [list(row) for row in opened.sql(query)]
    answer = json.loads(run("query", log, query, "--json").stdout)
    assert answer["schema"] == "kvsm.query/1"
    assert (answer["columns"], answer["rows"]) == (["direction", "n"], expected)
    rows = list(csv.reader(io.StringIO(run("query", log, query, "--csv").stdout)))
    assert rows == [["direction", "n"], *[[name, str(n)] for name, n in expected]]
    for form in ("table", "tsv"):
        table = run("query", log, query, "--format", form).stdout
        assert [line.split() for line in table.splitlines()] == rows


WIDE = "SELECT 'x' || hex(zeroblob(200)) AS wide, NULL AS empty, 'a' || char(9) || 'b' AS tabbed"


def test_a_pipe_gets_whole_cells(log: Path) -> None:
    """A script reads one row per line: no cell is wrapped, and tabs separate cells."""
    wide = "x" + "00" * 200
    assert run("query", log, WIDE).stdout == f"wide\tempty\ttabbed\n{wide}\t\ta\\tb\n"


def test_a_terminal_gets_a_table(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True)
    shown = run("query", log, "SELECT 1 AS one, 2 AS two").stdout
    assert [line.split() for line in shown.splitlines()] == [["one", "two"], ["1", "2"]]
    assert "\t" not in shown


def test_a_query_prints_one_format(log: Path) -> None:
    refused = run("query", log, "SELECT 1", "--format", "tsv", "--csv")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "query prints one format, not csv and tsv" in refused.stderr


def test_a_json_list_can_be_taken_apart(log: Path) -> None:
    """Columns such as `requests` hold one, and SQLite's table functions read it."""
    query = (
        "SELECT DISTINCT owner.value FROM transfers, json_each(transfers.requests) AS owner"
        " UNION SELECT atom FROM transfers, json_tree(transfers.requests) WHERE atom IS NOT NULL ORDER BY 1"
    )
    with kvsm.open(log) as opened:
        names = {name for row in opened.transfers() for name in json.loads(row.requests)}
    assert names
    answer = json.loads(run("query", log, query, "--json").stdout)
    assert answer["rows"] == [[name] for name in sorted(names)]


def test_a_limit_is_said(log: Path) -> None:
    """Else an engineer counts 200 rows and believes it."""
    shown = run("query", log, "SELECT * FROM events", "--limit", 3)
    assert len(shown.stdout.splitlines()) == 4
    assert "there are more than 3 rows" in shown.stderr
    answer = json.loads(run("query", log, "SELECT * FROM events", "--limit", 3, "--json").stdout)
    assert answer["more"] is True
    lines = run("query", log, "SELECT * FROM events", "--csv", "--limit", 3)
    assert len(lines.stdout.splitlines()) == 4
    assert "there are more than 3 rows" in lines.stderr


def test_the_tables_are_listed_with_every_column() -> None:
    """A log is not needed for it."""
    shown = run("query", "--tables")
    assert shown.exit_code == 0
    for table, kind in TABLES.items():
        assert f"{table}   (key: {', '.join(KEYS[table])})" in shown.stdout
        assert all(f"    {column} " in shown.stdout for column in kind.__struct_fields__)


# What a query may not do.


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM requests",
        "UPDATE requests SET request = 'x'",
        "DROP TABLE requests",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t (a)",
        "ATTACH 'stolen.sqlite' AS stolen",
        "VACUUM INTO 'stolen.sqlite'",
        "PRAGMA query_only = OFF",
        "SELECT * FROM pragma_database_list",
        "SELECT load_extension('x')",
        "SELECT sql FROM sqlite_master",
        "BEGIN",
        "COMMIT",
        "SELECT 1; DELETE FROM requests",
        "EXPLAIN DELETE FROM requests",
    ],
)
def test_a_query_only_reads(log: Path, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in log.iterdir()}
    refused = run("query", log, query)
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in log.iterdir()} == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELECT nonsense FROM requests", "no such column: nonsense"),
        ("SELECT * FROM nonsense", "no such table: nonsense"),
        ("SELEC 1", "syntax error"),
        ("", "no SELECT"),
        ("/* nothing */", "no SELECT"),
        ("SELECT 1\0", "null character"),
    ],
)
def test_a_wrong_query_is_one_clear_line(log: Path, query: str, says: str) -> None:
    refused = run("query", log, query)
    assert refused.exit_code == 2
    assert says in refused.stderr
    assert refused.stderr.startswith("kvsm: ")
    assert len(refused.stderr.splitlines()) == 1


def test_a_query_that_takes_too_long_is_stopped(log: Path) -> None:
    began = time.monotonic()
    refused = run("query", log, ENDLESS, "--timeout", 0.2)
    assert refused.exit_code == 2
    assert "more than 0.2 s" in refused.stderr
    assert time.monotonic() - began < 10


def test_ctrl_c_stops_a_query(log: Path) -> None:
    """SQLite runs for as long as it likes, and would swallow the interrupt."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    stopped = run("query", log, ENDLESS, "--timeout", 30)
    assert stopped.exit_code == 130
    assert "interrupted" in stopped.stderr


# What a log contains is data.


def test_cells_are_harmless(tmp_path: Path) -> None:
    """A request's name is whatever a client sent."""
    names = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\x1b[31mred", "a\nkvsm: fine", 'b",c')
    log = named(tmp_path / "log", *names)
    shown = run("query", log, "SELECT request FROM requests ORDER BY arrived", "--csv")
    cells = [row[0] for row in csv.reader(io.StringIO(shown.stdout))][1:]
    assert len(cells) == len(names)
    assert not any(cell[0] in "=+-@\t\r" for cell in cells)
    assert "\x1b" not in shown.stdout
    assert cells[-1] == 'b",c'
    table = run("query", log, "SELECT request FROM requests ORDER BY arrived")
    assert "\x1b" not in table.stdout
    assert len(table.stdout.splitlines()) == 1 + len(names)


def test_numbers_of_csv_stay_numbers(log: Path) -> None:
    """Only text is guarded: -1 is a number, and no formula."""
    assert run("query", log, "SELECT -1 AS a, NULL AS b, x'00ff' AS c", "--csv").stdout == "a,b,c\n-1,,00ff\n"


# Arrow and Parquet.


def test_every_table_is_the_same_in_arrow(log: Path) -> None:
    pytest.importorskip("pyarrow")
    with kvsm.open(log) as opened:
        for table in TABLES:
            order = ", ".join(KEYS[table])
            rows = [tuple(row.values()) for row in opened.arrow(table).to_pylist()]
            assert rows == list(opened.sql(f"SELECT * FROM {table} ORDER BY {order}")), table
        assert list(opened.frame("resets").columns) == list(TABLES["resets"].__struct_fields__)
        with pytest.raises(ConfigError, match="there is no table 'nonsense'"):
            opened.arrow("nonsense")


def test_an_export_holds_the_tables_of_each_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(arrow, "BATCH_ROWS", 10)
    logs = [tmp_path / name for name in ("one", "two")]
    for seed, path in enumerate(logs):
        random_life(seed, 200, path).close()
    for _ in range(2):  # A second export replaces the first.
        answer = json.loads(run("export", *logs, "--parquet", tmp_path / "out", "--json").stdout)
    assert answer["schema"] == "kvsm.export/1"
    for told, path in zip(answer["logs"], logs):
        with kvsm.open(path) as opened:
            for table in TABLES:
                found = parquet.read_table(tmp_path / "out" / table / f"{told['name']}.parquet")
                assert found.drop_columns("log").equals(opened.arrow(table))
                assert set(found["log"].to_pylist()) <= {str(path)}
                assert told["rows"][table] == found.num_rows
    assert {path.suffix for path in (tmp_path / "out").rglob("*") if path.is_file()} == {".parquet"}


def test_an_export_of_one_log_twice_is_refused(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    refused = run("export", log, log, "--parquet", tmp_path / "out")
    assert refused.exit_code == 2
    assert "are one run" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_without_the_extra_one_line_says_what_to_install(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused = run("export", log, "--parquet", tmp_path / "out")
    assert refused.exit_code == 2
    assert "pip install 'kvsm[analysis]'" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its output is real: the run is simulated, so it gives the same log every time."""
    pytest.importorskip("pandas")
    pytest.importorskip("torch")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda: str(tmp_path))
    notebook = json.loads((ROOT / "examples" / "open_a_log.ipynb").read_text())
    space: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), space)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert printed.getvalue() == shown
