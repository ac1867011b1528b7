"""Every error that kvsm raises on purpose. All of them derive from `KvsmError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsm.properties import Property


class KvsmError(Exception):
    """Base of all errors of this package. All can be pickled: they cross from one process to another."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[KvsmError], args: tuple[Any, ...], facts: dict[str, Any]) -> KvsmError:
    """An error as it was pickled, whatever its constructor takes."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


class IllegalTransition(KvsmError):
    """A trigger that the machine's table does not allow where it arrived. Nothing has changed.

    Attributes: `machine` (its name), `ids` (those concerned), `state` (of the first of them, with its
    counters), `trigger`, `seq` (number of the event that carried it).
    """

    def __init__(self, machine: str, ids: Sequence[int | str], state: str, trigger: str, seq: int) -> None:
        self.machine, self.ids, self.state, self.trigger, self.seq = machine, tuple(ids), state, trigger, seq
        named = ", ".join(str(one) for one in self.ids[:8]) + (", ..." if len(self.ids) > 8 else "")
        super().__init__(f"event {seq}: {machine} {named}: {trigger} is illegal in {state}")


class InvalidEvent(KvsmError):
    """An event that contradicts the ledger it is applied to. Nothing has changed."""

    def __init__(self, seq: int, reason: str) -> None:
        self.seq, self.reason = seq, reason
        super().__init__(f"event {seq}: {reason}")


class ConfigError(KvsmError, ValueError):
    """A configuration that cannot work; the message names the field, the value and the bound."""


class LimitReached(KvsmError):
    """A named limit (live transfers, pins of a block, ...) refuses one more. Nothing has changed."""


class LogError(KvsmError):
    """A log that cannot be read or written; the message names file, offset and event where it can."""


class LogDamaged(LogError):
    """Bytes of a log are not what was written: names file, byte offset and the first event lost.

    Attributes: `path` (str), `offset` (bytes from the start of the file), `seq` (first event not readable).
    """

    def __init__(self, path: str, offset: int, seq: int, reason: str) -> None:
        self.path, self.offset, self.seq, self.reason = path, offset, seq, reason
        super().__init__(f"{path}: damaged at byte {offset}, event {seq}: {reason}")


class LogWriteFailed(LogError):
    """The log could not be written (disk full, I/O error), and the embedder chose to stop."""


class Poisoned(KvsmError):
    """An earlier failure left this offloader without a trustworthy log; make a new one."""


class TransferFailed(KvsmError):
    """A transfer of which nothing ran: an id out of range or used twice, an engine that takes no more."""


class DeviceLost(KvsmError):
    """A device that does nothing any more, and whose memory nothing of this process touches."""


class TraceError(KvsmError):
    """A workload trace that cannot be used; the message names file, line and what is wrong with it.

    Attributes: `path` (str), `line` (from 1; 0 where the file as a whole is meant).
    """

    def __init__(self, path: str, line: int, reason: str) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}: line {line}: {reason}" if line else f"{path}: {reason}")


class PropertyBroken(KvsmError):
    """A property does not hold in running code. Attributes: `property`, and `message` without its name."""

    def __init__(self, property: Property, message: str) -> None:
        self.property, self.message = property, message
        super().__init__(f"{property}: {message}")


def described(error: BaseException) -> str:
    """An error as one line for people: the text alone of those that kvsm raises, for it says all."""
    return str(error) if isinstance(error, KvsmError) else f"{type(error).__name__}: {error}"
