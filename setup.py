"""Only what pyproject.toml cannot say: the description of the package on an index. The rest stands there.

An index shows the README alone. A link into the source leads nowhere there, so it becomes the file's path. A
picture does, too.
"""

from __future__ import annotations

import re
from pathlib import Path

_LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
_NOTE = "Paths in this text name files of the source distribution.\n"


def description(readme: str) -> str:
    """The README as text that stands alone: each link to a file is the path of the file."""

    def path(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        return target if text == target else f"{text} ({target})"

    return f"{_LINK.sub(path, readme)}\n{_NOTE}"


if __name__ == "__main__":
    from setuptools import setup

    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme), long_description_content_type="text/markdown")
