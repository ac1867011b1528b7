"""Workflow commands of GitHub: lines of output by which a job marks a line of code."""

from __future__ import annotations

import os


def error_line(place: str, title: str, message: str) -> str:
    """Return an `::error` at a place, "FILE:LINE"."""
    file, _, line = place.rpartition(":")
    parameters = {"file": shown(file), "line": line, "title": title}
    about = ",".join(f"{name}={_escaped(value, is_parameter=True)}" for name, value in parameters.items())
    return f"::error {about}::{_escaped(message)}"


def shown(file: str) -> str:
    """Return a file relative to the current directory if it is below it, as GitHub needs it."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def _escaped(text: str, *, is_parameter: bool = False) -> str:
    for old, new in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(old, new)
    return text.replace(":", "%3A").replace(",", "%2C") if is_parameter else text
