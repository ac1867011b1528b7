"""Switches inside code that shares data without a lock.

A switch may happen before each line of chosen modules that reads or writes an attribute, an item or a closure
variable, and before each write that follows a read in the same line: for example between the read and the
write of `self.count += 1`. One bytecode instruction is one step: a call into C, such as `list.append` or a
copy by numpy, is never interrupted.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from kvsm.check.threads.control import GOES_ON, TraceCalls, control

_READS = frozenset(
    (
        "BINARY_SLICE",
        "BINARY_SUBSCR",
        "CONTAINS_OP",
        "FOR_ITER",
        "LOAD_ATTR",
        "LOAD_DEREF",
        "LOAD_METHOD",
        "LOAD_SUPER_ATTR",
    )
)
if sys.version_info >= (3, 14):
    _READS |= {"BINARY_OP"}  # also an item
_WRITES = frozenset(
    ("DELETE_ATTR", "DELETE_SUBSCR", "STORE_ATTR", "STORE_DEREF", "STORE_SLICE", "STORE_SUBSCR")
)


def points_of(code: CodeType) -> frozenset[int]:
    """The instructions of a function before which other threads may run, by their offsets."""
    points, line, seen_line, has_read = set(), -1, -1, False
    starts = dict(dis.findlinestarts(code))
    for one in dis.get_instructions(code):
        line = starts.get(one.offset, line) or line
        if one.opname not in _READS and one.opname not in _WRITES:
            continue
        if line != seen_line or (one.opname in _WRITES and has_read):
            points.add(one.offset)
            seen_line, has_read = line, False
        has_read = has_read or one.opname in _READS
    return frozenset(points)


def tracing_of(modules: Iterable[str]) -> TraceCalls:
    """A function for `sys.settrace` that makes a step at each such point of these modules."""
    names = frozenset(modules)
    known: dict[CodeType, frozenset[int]] = {}

    def follow(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in known[frame.f_code]:
            control().reach(GOES_ON, depth=2)
        return follow

    def called(frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if code not in known:
            known[code] = points_of(code) if frame.f_globals.get("__name__") in names else frozenset()
        if not known[code]:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return follow

    return called
