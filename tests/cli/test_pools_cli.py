"""`kvsm pools`: the pools in a directory, the processes that use them, and which pools can be removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvsm.cli import main
from kvsm.copies import HostPool, KeptPool
from kvsm.identity import PoolIdentity

KEEP = KeptPool(PoolIdentity.of({"model": "m", "dtype": "bfloat16"}))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a directory with a pool that no process uses, and a file that is no pool."""
    HostPool(4, 64, path=tmp_path / "engine0-rank0", keep=KEEP).close()
    (tmp_path / "notes.txt").write_text("no pool")
    return tmp_path


def told(*words: str | Path) -> str:
    result = CliRunner().invoke(main, ["pools", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_pool_is_listed_with_what_its_bytes_mean(kept: Path) -> None:
    output = told(kept)
    assert "engine0-rank0" in output
    assert "nobody" in output
    assert "dtype: bfloat16" in output
    assert "notes.txt" not in output


def test_only_a_pool_that_nobody_uses_is_removed(kept: Path) -> None:
    """The pool of a running engine is kept, and the engine is named."""
    used = HostPool(4, 64, path=kept / "engine1-rank0", keep=KEEP)
    output = told(kept, "--remove")
    assert f"process {os.getpid()}" in " ".join(output.split())
    assert {path.name for path in kept.iterdir()} == {"engine1-rank0", "notes.txt"}
    used.close()
    told(kept, "--remove")
    assert told(kept) == f"{kept}: no host pool of this user is kept here\n"


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["pools", str(tmp_path / "nowhere")])
    assert (result.exit_code, "cannot be listed" in result.output) == (2, True)
