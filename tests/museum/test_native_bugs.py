"""Walks of the product, which run the native body, find bugs that are written in C."""

from __future__ import annotations

import pytest
from museum import EXHIBITS
from museum.native_bugs import NATIVE_BUGS, NativeEdit
from mutants import MUTANTS
from native_house import COMPILER, NATIVE, Bench, House
from places import ROOT

BUGS = {**EXHIBITS, **MUTANTS}
FOUND_BY_LAYERS = ("M57",)
"""Bugs that the walk of layers finds; the walk of the core finds the others."""


@pytest.mark.parametrize("id", NATIVE_BUGS)
def test_an_edit_of_c_names_text_that_is_there(id: str) -> None:
    assert NATIVE_BUGS[id].applied(ROOT / NATIVE)
    assert id in BUGS


def test_an_edit_of_text_that_is_gone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order\.c says 0 times, not once: gone"):
        NativeEdit("order.c", "gone", "").applied(ROOT / NATIVE)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    if COMPILER is None:
        pytest.skip("there is no gcc")
    return Bench(House(tmp_path_factory.mktemp("native_bugs") / "house"), "-O0")


@pytest.mark.slow
@pytest.mark.parametrize("id", NATIVE_BUGS)
def test_a_walk_finds_a_bug_in_c(bench: Bench, id: str) -> None:
    edit, target = NATIVE_BUGS[id], "layers" if id in FOUND_BY_LAYERS else "core"
    options = ("--seed", "1", "--runs", "60", "--jobs", "1", "--reduce-seconds", "0")
    with bench.changed(edit.file, edit.applied(bench.house.native)) as is_another:
        assert is_another
        done = bench.house.run("-m", "kvsm", "fuzz", "--target", target, *options)
    assert done.returncode == 1, done.stdout[-3000:]
    assert "broken: " in done.stdout
