"""Only what pyproject.toml cannot say: the native body, and the description of the package on an index.

The environment variable `KVSM_NATIVE` chooses at the build, with the values that it has when kvsm runs:

- `auto`, or nothing: build the native body if a C compiler is there. Otherwise kvsm is installed without it,
  and Python does the same (`kvsm --version`);
- `0`: build no native body. The wheel is for every machine (`py3-none-any`);
- `1`: build the native body. The build fails if it cannot.

From Python 3.11 on the native body uses the stable ABI alone: one build serves all.

An index shows the README alone. A link into the source leads nowhere there, so it becomes the file's path. A
picture does, too.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

_LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
_NOTE = "Paths in this text name files of the source distribution.\n"


def description(readme: str) -> str:
    """The README as text that stands alone: each link to a file is the path of the file."""

    def path(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        return target if text == target else f"{text} ({target})"

    return f"{_LINK.sub(path, readme)}\n{_NOTE}"


def native_body(chosen: str) -> dict[str, Any]:
    """The arguments of `setup` that build the native body.

    chosen: the value of `KVSM_NATIVE`.
    """
    if chosen not in ("0", "1", "auto"):
        raise SystemExit(f"KVSM_NATIVE is {chosen!r}; it must be 0, 1 or auto")
    if chosen == "0":
        return {}
    from setuptools import Extension

    folder = Path("kvsm") / "core" / "native"
    # The buffer protocol is in the stable ABI since 3.11.
    stable = sys.version_info >= (3, 11)
    limits = [("Py_LIMITED_API", "0x030B0000")] if stable else []
    digest = run_path(str(folder / "sources.py"))["digest_of_sources"](folder)
    body = Extension(
        "kvsm.core.native._body",
        sources=[str(source) for source in sorted(folder.glob("*.c"))],
        depends=[str(header) for header in sorted(folder.glob("*.h"))],
        define_macros=[("SOURCES_DIGEST", f'"{digest}"'), *limits],
        py_limited_api=stable,
        # Hidden: a symbol of the same name in another library must not replace one of these.
        extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
        optional=chosen == "auto",
    )
    wheel = {"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {}
    return {"ext_modules": [body], "options": wheel}


if __name__ == "__main__":
    from setuptools import setup

    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(readme),
        long_description_content_type="text/markdown",
        **native_body(os.environ.get("KVSM_NATIVE", "auto")),
    )
