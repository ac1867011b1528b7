"""Run scripts that use vLLM, each in a fork of this process, which has imported the slow parts of vLLM once.

Reads a line of JSON for each script: {"script": PATH, "patched": DIRECTORY or null}. A patched module is
taken from this directory instead of from vLLM. Answers with a line of JSON: {"code": ..., "output": ...}.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
import tempfile
import traceback
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401 (imported before the forks)
from vllm import config  # noqa: F401 (imported before the forks)


class PatchedModules(MetaPathFinder):
    """Find the modules whose files are in this directory."""

    def __init__(self, directory: Path) -> None:
        self._files = {
            ".".join(file.relative_to(directory).with_suffix("").parts): file
            for file in directory.rglob("*.py")
        }
        if loaded := self._files.keys() & sys.modules.keys():
            raise AssertionError(f"imported before the fork, so a patch would have no effect: {loaded}")

    def find_spec(self, fullname: str, *_args: Any) -> ModuleSpec | None:
        """Return the spec of a patched module."""
        file = self._files.get(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if file else None


def run(script: str, patched: str | None) -> int:
    """Run a script in this process. Returns its exit code."""
    torch.set_num_threads(1)
    try:
        if patched:
            sys.meta_path.insert(0, PatchedModules(Path(patched)))
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def forked(script: str, patched: str | None) -> dict[str, Any]:
    """Run a script in a fork. Returns its exit code and what it has printed."""
    with tempfile.TemporaryFile("w+") as printed:
        if (child := os.fork()) == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            code = run(script, patched)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        return {"code": code, "output": printed.read()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(forked(**json.loads(line))), flush=True)
