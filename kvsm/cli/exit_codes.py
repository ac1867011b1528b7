"""The exit codes of commands. Each number has one meaning in all commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code. Defined as MEMBER = number, meaning."""

    GOOD = 0, "The command did its work, and nothing is wrong."
    BROKEN = (
        1,
        "A property is broken or a model refuted; a log is damaged or lacks events; a bug escapes the "
        "museum's checkers; two logs differ; or, with `--strict`, something never ended.",
    )
    UNUSABLE = 2, "The input cannot be used: an option, a file, a directory, or a version that is missing."
    UNDETERMINED = 3, "A limit ended the search before there was a verdict."
    BUG = 70, "kvsm itself failed. It prints a traceback; please report it."
    OUTPUT_LOST = 74, "Standard output cannot be written, so the printed result is incomplete."
    INTERRUPTED = 130, "Ctrl-C."
    TERMINATED = 143, "SIGTERM. `kvsm fuzz` and `kvsm vllm-fuzz` save their results first."

    says: str
    """The meaning, for people."""

    def __new__(cls, number: int, says: str = "") -> ExitCode:
        """Make the number alone the value, so that an exit code is an int."""
        member = int.__new__(cls, number)
        member._value_, member.says = number, says
        return member
