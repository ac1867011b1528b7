"""A native body of another kvsm: Python folds, and `kvsm --version` says why.

Each test has a copy of the package with the body that was built here, and changes one of the two.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT

from kvsm.core import native

if native.WHY_NOT:
    pytest.skip(f"Python folds: {native.WHY_NOT}", allow_module_level=True)

_LIFE = """
from kvsm import events as ev
from kvsm.core import native
from kvsm.core.ledger import Ledger, NativeLedger
from kvsm.core.offloader import Offloader
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.check.worlds.saving import Saver
from kvsm.cli import main
core = Offloader(ev.OffloadConfig(host_blocks=4, device_blocks=4))
job = core.prepare_store("request", [b"a", b"b"], [0, 1]).job
core.submit([job.transfer])
core.complete_store(job.transfer)
assert core.match("request", [b"a", b"b"]).hits == 2
print(type(core).__name__, type(core.ledger).__name__, len(SlotQueue(3)), native.described())
main(["--version"])
"""

_KIND = '''
class BlocksSpilled(OffloadingEvent, frozen=True, array_like=True, tag=99):
    """A kind that the body does not know."""


TRIGGERS: '''


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), encoding="utf-8")


def another_kind_of_event(package: Path) -> None:
    """As a `git pull` brings it."""
    events = package / "events.py"
    change(events, "\nTRIGGERS: ", _KIND)
    for table, row in (("TRIGGERS", "()"), ("REACHES", "()")):
        head, tail = events.read_text(encoding="utf-8").split(f"\n{table}: ")
        tail = tail.replace("\n}\n", f"\n    BlocksSpilled: {row},\n}}\n", 1)
        events.write_text(f"{head}\n{table}: {tail}", encoding="utf-8")
    change(
        package / "core" / "ledger" / "ledger.py",
        "\nreport_rejected = ",
        "\nblocks_spilled = report_rejected = ",
    )


def another_table(package: Path) -> None:
    """A machine has an arc that the body lacks."""
    row = "        Row((WRITING,), LOSE, RETIRED, "
    change(package / "states" / "lease.py", row, f'        Row((RETIRED,), LOSE, RETIRED, "twice"),\n{row}')


def another_limit(package: Path) -> None:
    """Batches have another form."""
    change(package / "ids.py", "\nSMALL = 16\n", "\nSMALL = 15\n")


def another_source(package: Path) -> None:
    """The C sources are newer than the body."""
    source = package / "core" / "native" / "ledger.c"
    source.write_text(source.read_text(encoding="utf-8") + "/* mended */\n", encoding="utf-8")


def one_source_less(package: Path) -> None:
    """No file is newer than the body."""
    (package / "core" / "native" / "frozen.h").unlink()


def other_functions(package: Path) -> None:
    """The body has neither what this kvsm calls, nor the name of its sources."""
    built(package).unlink()
    text = "MACHINES = KINDS = ''\nSMALL = 16\ndef connect(): raise SystemError('connected')\n"
    (package / "core" / "native" / "_body.py").write_text(text, encoding="utf-8")


def what_it_asks_for_is_gone(package: Path) -> None:
    """Its first look at Python fails."""
    ids = package / "ids.py"
    ids.write_text(ids.read_text(encoding="utf-8").replace("array_of", "array_from"), encoding="utf-8")
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "array_of" in text:
            path.write_text(text.replace("array_of", "array_from"), encoding="utf-8")


def no_library(package: Path) -> None:
    """A file that was cut short."""
    built(package).write_bytes(b"\x7fELF")


def none_at_all(package: Path) -> None:
    """No compiler was there."""
    built(package).unlink()


def built(package: Path) -> Path:
    (body,) = (package / "core" / "native").glob("_body*.so")
    return body


STALE: dict[Callable[[Path], None], str] = {
    another_kind_of_event: "it was built for other kinds of events; install kvsm again",
    another_table: "it was built for other machine tables; install kvsm again",
    another_limit: "it was built for other machine tables; install kvsm again",
    another_source: "it was built from other C sources; install kvsm again",
    one_source_less: "it was built from other C sources; install kvsm again",
    other_functions: "it was built from other C sources; install kvsm again",
    what_it_asks_for_is_gone: "it cannot be loaded: module 'kvsm.ids' has no attribute",
    no_library: "it cannot be loaded: ",
    none_at_all: "it was not built: no C compiler was there",
}
"""What makes a body stale, and why it does not run."""
FIRST = (another_kind_of_event, another_source, none_at_all)
"""One for each reason. The others take as long, so they are slow tests."""


def run(house: Path, chosen: str, *arguments: str) -> str:
    """What Python prints there, however it ends."""
    environment = {**os.environ, "KVSM_NATIVE": chosen, "PYTHONPATH": str(house)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # The next process need not compile the package again.
    done = subprocess.run(
        [sys.executable, *arguments], cwd=house, env=environment, text=True, capture_output=True
    )
    assert (done.returncode == 0) == (chosen != "1"), done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "make_stale",
    [pytest.param(make, marks=() if make in FIRST else pytest.mark.slow, id=make.__name__) for make in STALE],
)
def test_a_stale_body_leaves_all_to_python(tmp_path: Path, make_stale: Callable[[Path], None]) -> None:
    """Conformance: the events of a life are folded, whatever body lies beside the code."""
    package = tmp_path / "kvsm"
    # With what is compiled: the next process need not do it again. Other tests may be writing such files.
    shutil.copytree(ROOT / "kvsm", package, ignore=shutil.ignore_patterns("*.pyc.*"))
    make_stale(package)
    asked = [("0", "KVSM_NATIVE is 0")] if make_stale is FIRST[0] else []  # no other body is looked at either
    for chosen, why in (("auto", STALE[make_stale]), *asked):
        said = run(tmp_path, chosen, "-c", _LIFE)
        life, version = said.split("\n", 1)
        assert life.startswith(f"Offloader Ledger 0 Python ({why}"), said
        assert f"Python ({why}" in version, said
    refused = run(tmp_path, "1", "-m", "kvsm", "--version")
    assert f"KVSM_NATIVE is 1, but the native body cannot run: {STALE[make_stale]}" in refused
    assert "Traceback" not in refused
