"""Format `kvsm` command lines that can be pasted into a shell."""

from __future__ import annotations

import shlex

from kvsm.explain.report.figures import LogFigures


def command(figures: LogFigures, verb: str, *arguments: object) -> str:
    """A `kvsm` command line with quoted arguments, safe to paste into a shell."""
    return " ".join(["kvsm", verb, *map(quoted, (figures.log, *arguments))])


def quoted(argument: object) -> str:
    """Quote an argument for a shell; SQL that contains single quotes, in double quotes if that is safe."""
    text = str(argument)
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)
