"""The native body as it is built: with sanitizers, without a compiler, and over ten million events."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from native_house import COMPILER, SANITIZERS, House, sanitized
from places import ROOT

from examples import TODAY
from kvsm.core import native

WARNINGS = ("-Wall", "-Wextra", "-Werror")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no gcc"),
]


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """What the command prints. Fails with the end of it if the command does."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, text=True, stdout=-1, stderr=subprocess.STDOUT
    )
    return printed(done)


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A copy of this checkout."""
    return House(tmp_path_factory.mktemp("sanitized") / "house")


@pytest.fixture(scope="module")
def checks(house: House) -> dict[str, str]:
    """The environment of a body with the address and undefined-behaviour sanitizers."""
    environment = sanitized(house)
    if environment is None:
        pytest.skip("this gcc has no AddressSanitizer")
    return environment


def selected(names: Iterable[str], *chosen: str) -> list[str]:
    """The arguments with which Python runs these tests."""
    files = sorted(str(path) for name in names for path in (ROOT / "tests").rglob(f"test_{name}.py"))
    return ["-m", "pytest", "-p", "no:cacheprovider", f"--hypothesis-seed={TODAY}", *chosen, *files]


def test_no_access_is_wrong_and_no_behaviour_undefined(house: House, checks: dict[str, str]) -> None:
    """Run the parity tests under the sanitizers: random walks, long batches, wrong events with random bytes,
    states that are copied meanwhile, right and wrong calls, plans of copies; and then direct calls of the
    native types that kvsm itself never makes (`hostile_native.py`), others each day."""
    chosen = (
        "folded_alike or refused_alike or a_ledger_has or slot_queue or frozen or calls or offers or hostile"
    )
    names = (
        "native",
        "native_calls",
        "native_offers",
        "native_hostile",
        "slot_queue",
        "frozen_state",
        "geometry",
    )
    house.build(*SANITIZERS, *WARNINGS)
    # With the examples of a developer's run: a wrong access shows whenever its line runs.
    printed(house.run(*selected(names, "-k", f"{chosen} or geometry"), more=checks, less=("CI",)))
    hostile = printed(house.run("tests/support/hostile_native.py", str(60 * TODAY), "60", more=checks))
    assert hostile.endswith("all were refused\n")


def test_no_access_is_wrong_if_there_is_no_memory(house: House, checks: dict[str, str]) -> None:
    """Here each allocation of C in each call also fails once (`test_native_memory.py`). No memory leaks."""
    pytest.importorskip("_testcapi")
    house.count_memory()
    house.build(*SANITIZERS, *WARNINGS)
    assert "OfC" in printed(house.run(*selected(["native_memory"], "-vv"), more=checks))


_TEN_MILLION = """
import gc
from kvsm import events as ev
from kvsm.events import OffloadConfig
from kvsm.core.ledger.frozen import freeze
from kvsm.core.ledger import Ledger, NativeLedger

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def lives(ledger, seq, times):
    '''Requests of 20 blocks: stored, evicted to make room, matched and loaded by another one, touched.
    The state is copied now and then.'''
    apply, slots, blocks = ledger.apply, tuple(range(16)), tuple(range(16))
    keys = [tuple(b"%d-%d" % (life, slot) for slot in slots) for life in range(2)]
    for number in range(times):
        name, other = f"a{number}", f"b{number}"
        plan = seq + 3
        if number % 50 == 0:
            copy = freeze(ledger)
        for kind, *fields in (
            (ev.RequestArrived, name),
            (ev.HitMatched, name, (), keys[0][0], 16, 0, 0),
            (ev.StorePlanned, ((name, 16),), keys[number % 2], slots, blocks),
            (ev.TransfersSubmitted, (plan,)),
            (ev.WorkerReported, plan, 0, True),
            (ev.BlocksOffered, ((name, (16,), (16,)),)),
            (ev.HitMatched, other, slots, None, 16, 0, 16),
            (ev.LoadPlanned, other, slots, blocks),
            (ev.TransfersSubmitted, (seq + 8,)),
            (ev.WorkerReported, seq + 8, 0, True),
            (ev.BlocksTouched, slots),
            (ev.RequestFinished, name),
            (ev.RequestFinished, other),
            (ev.BlocksEvicted, slots, (), seq + 15),
        ):
            seq += 1
            apply(kind(seq, number, 0, *fields))
            copy.go_on()
    return seq

ledger = Ledger(OffloadConfig(host_blocks=16, device_blocks=16))
assert isinstance(ledger, NativeLedger)
seq = lives(ledger, 0, 20_000)
gc.collect()
before = resident()
while seq < 10_000_000:
    seq = lives(ledger, seq, 20_000)
gc.collect()
assert not ledger.requests and not ledger.transfers and len(ledger.free) == 16
print(resident() - before)
"""


def test_ten_million_events_leave_nothing_behind() -> None:
    """The life of a block loses no reference, nor does a copy: the memory of the process does not grow."""
    assert not native.WHY_NOT
    grown = int(run(sys.executable, "-c", _TEN_MILLION).split()[-1])
    assert grown < 4 << 20, f"{grown} bytes more after ten million events"


def built_with(compiler: str | None, chosen: str) -> dict[str, str]:
    """The environment of a build with this compiler and this value of `KVSM_NATIVE`."""
    return {"CC": str(compiler), "KVSM_NATIVE": chosen}


@pytest.mark.parametrize(
    ("compiler", "chosen"),
    [(COMPILER, "auto"), ("false", "auto"), (COMPILER, "0")],
    ids=["with a compiler", "without", "native body not wanted"],
)
def test_a_wheel_is_built_in_any_case(tmp_path: Path, compiler: str | None, chosen: str) -> None:
    """With a compiler it has the native body, for every Python from 3.11 on. Without one it has none."""
    house = House(tmp_path / "house")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(house.place)]
    run(*command, **built_with(compiler, chosen))
    (wheel,) = tmp_path.glob("*.whl")
    built = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    if chosen == "0":
        assert wheel.name.endswith("-py3-none-any.whl")
    if compiler == "false" or chosen == "0":
        assert built == []
    elif sys.version_info >= (3, 11):
        assert built == ["kvsm/core/native/_body.abi3.so"]
        assert "-cp311-abi3-" in wheel.name
    else:
        assert len(built) == 1


def test_a_wheel_without_the_native_body_is_refused_if_it_is_wanted(tmp_path: Path) -> None:
    """`KVSM_NATIVE=1` at the build: a release must not lack it unseen."""
    house = House(tmp_path / "house")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(house.place)]
    environment = {**os.environ, **built_with("false", "1")}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode != 0
    assert "Failed building wheel for kvsm" in done.stderr
    assert "kvsm/core/native/" in done.stderr, "the error names the file that was not compiled"
    assert list(tmp_path.glob("*.whl")) == []
