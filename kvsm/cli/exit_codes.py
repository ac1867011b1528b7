"""What the exit code of a command says. Each number has one meaning in all commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code. Defined as MEMBER = number, meaning."""

    GOOD = 0, "What was asked for is done, and nothing is wrong."
    BROKEN = (
        1,
        "A property is broken or a model refuted; a log is damaged or lacks events; a bug escapes the "
        "museum's checkers; two logs part; or, with `--strict`, something never ended.",
    )
    UNUSABLE = 2, "The input cannot be used: an option, a file, a directory, or a version that is missing."
    UNDETERMINED = 3, "A limit ended the search before there was a verdict."
    BUG = 70, "kvsm itself failed. It prints a traceback; please report it."
    OUTPUT_LOST = 74, "Standard output cannot be written, so the result is not told in full."
    INTERRUPTED = 130, "Ctrl-C."
    TERMINATED = 143, "SIGTERM. `kvsm fuzz` and `kvsm vllm-fuzz` save what they have first."

    says: str
    """The meaning, for people."""

    def __new__(cls, number: int, says: str = "") -> ExitCode:
        """The value is the number alone, so that an exit code is an int."""
        member = int.__new__(cls, number)
        member._value_, member.says = number, says
        return member


class Terminated(KeyboardInterrupt):
    """SIGTERM came (`kvsm.cli.signals`). Whatever ends well with Ctrl-C ends well with this."""
