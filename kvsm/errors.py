"""Every error that kvsm raises on purpose. All derive from `KvsmError`."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from kvsm.properties import Property


class KvsmError(Exception):
    """Base of all errors of this package. All can be pickled: they cross from one process to another."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[KvsmError], args: tuple[Any, ...], attributes: dict[str, Any]) -> KvsmError:
    """Unpickle an error without calling its constructor, whose arguments are not stored."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


TWICE = "named twice in one batch"
"""The `state` of an `IllegalTransition` if a batch names a thing twice."""


class IllegalTransition(KvsmError):
    """The machine's table does not allow this trigger in this state. Nothing has changed.

    machine: its name.
    ids: the slots, device blocks, transfers or requests that the trigger is illegal for.
    state: the state of the first one, with its counters; or `TWICE`.
    trigger: its name.
    seq: number of the event that pulls the trigger.
    """

    def __init__(self, machine: str, ids: Sequence[int | str], state: str, trigger: str, seq: int) -> None:
        self.machine, self.ids, self.state, self.trigger, self.seq = machine, tuple(ids), state, trigger, seq
        named = ", ".join(map(str, self.ids[:8])) + (", ..." if len(self.ids) > 8 else "")
        where = f": {state}" if state == TWICE else f" in {state}"
        super().__init__(f"event {seq}: {machine} {named}: {trigger} is illegal{where}")


class InvalidEvent(KvsmError):
    """An event that contradicts the ledger. Nothing has changed."""

    def __init__(self, seq: int, reason: str) -> None:
        self.seq, self.reason = seq, reason
        super().__init__(f"event {seq}: {reason}")


class WrongArgument(KvsmError, TypeError, ValueError):
    """A call cannot use an argument: its type, or its value, is wrong. Nothing has changed.

    call, argument: their names.
    """

    def __init__(self, call: str, argument: str, problem: str) -> None:
        self.call, self.argument = call, argument
        super().__init__(f"{call}(): {argument} {problem}")


class ConfigError(KvsmError, ValueError):
    """A configuration that cannot work; the message names the field, the value and the bound."""


class UnusableFiles(ConfigError):
    """Files that kvsm cannot use now: no permission, no space, another owner. An engine that can serve
    without them starts anyway."""


class LimitReached(KvsmError):
    """A limit is reached: of live transfers, or of the pins of a block. Nothing has changed."""


class LogError(KvsmError):
    """A log that cannot be read or written. The message names file, offset and event where it can."""


class LogDamaged(LogError):
    """Bytes of a log are not the bytes that were written.

    path: the file.
    offset: bytes from the start of the file.
    seq: the first event that cannot be read.
    """

    def __init__(self, path: str, offset: int, seq: int, reason: str) -> None:
        self.path, self.offset, self.seq, self.reason = path, offset, seq, reason
        super().__init__(f"{path}: damaged at byte {offset}, event {seq}: {reason}")


class LogWriteFailed(LogError):
    """The log could not be written (disk full, I/O error), and the embedder chose to stop."""


class Poisoned(KvsmError):
    """This offloader stopped: it was closed, or a failure left its log behind its ledger. Make a new one."""


class WrongThread(KvsmError):
    """A thread called an offloader that another thread drives. Nothing has changed."""


class TransferFailed(KvsmError):
    """A copy engine refused a transfer and copied nothing: an id is out of range or used twice, or the engine
    accepts no more transfers."""


class DeviceLost(KvsmError):
    """The device has stopped for good: this process no longer touches its memory."""


class TraceError(KvsmError):
    """A workload trace that cannot be used.

    path: the file.
    line: from 1; 0 if the whole file is meant.
    """

    def __init__(self, path: str, line: int, reason: str) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}: line {line}: {reason}" if line else f"{path}: {reason}")


class PropertyBroken(KvsmError):
    """A property does not hold in running code. Attributes: `property`; `message` without its name; `place`:
    the line that raised an error, if one did."""

    def __init__(self, property: Property, message: str, place: str = "") -> None:
        self.property, self.message, self.place = property, message, place
        super().__init__(f"{property}: {message}")


def described(error: BaseException) -> str:
    """Return an error as one line. The type is named unless it is an error of kvsm."""
    if isinstance(error, KvsmError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def raised_at(error: BaseException, is_hidden: Callable[[str], bool]) -> tuple[str, str]:
    """Return ("FILE:LINE", its source) of the innermost frame whose file is not hidden, or ("", "")."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_hidden(frame.filename):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}", line
    return "", ""
