"""A shared library of 64-bit ELF without code: symbols, versions of glibc, and what it loads.

It lets a test have any fault in a library, for any machine, without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack
from typing import NamedTuple

X86_64, AARCH64 = 62, 183
"""Machines, as ELF numbers them."""

_STRINGS, _DYNAMIC, _SYMBOLS, _NEEDED_VERSIONS = 3, 6, 11, 0x6FFFFFFE
"""Types of sections."""
_TAG_NEEDED, _TAG_RUN_PATH = 1, 29


class _Strings:
    """A table of strings that end in a zero byte."""

    def __init__(self) -> None:
        self.content = b"\0"

    def place(self, text: str) -> int:
        """Add a string. Return its place."""
        place = len(self.content)
        self.content += text.encode() + b"\0"
        return place


class _Section(NamedTuple):
    name: str
    kind: int
    content: bytes
    count: int = 0
    entry_bytes: int = 0


def small_library(
    machine: int = X86_64,
    exported: Sequence[str] = ("PyInit__body",),
    undefined: Sequence[str] = ("PyModule_Create2", "memcpy"),
    glibc: Sequence[str] = ("2.17",),
    needed: Sequence[str] = ("libc.so.6",),
    run_path: str = "",
    data: bytes = b"",
) -> bytes:
    """Return a library with these symbols, versions of glibc and needed libraries; `data` is at its end."""
    strings, names = _Strings(), _Strings()
    symbols = bytes(24)
    for section, listed in ((0, undefined), (1, exported)):
        for name in listed:
            symbols += pack("<IBBHQQ", strings.place(name), 0x12, 0, section, 0, 0)
    dynamic = b"".join(pack("<qQ", _TAG_NEEDED, strings.place(name)) for name in needed)
    if run_path:
        dynamic += pack("<qQ", _TAG_RUN_PATH, strings.place(run_path))
    versions = pack("<HHIII", 1, len(glibc), strings.place("libc.so.6"), 16, 0)
    for place, version in enumerate(glibc):
        following = 16 if place + 1 < len(glibc) else 0
        versions += pack("<IHHII", 0, 0, 2 + place, strings.place(f"GLIBC_{version}"), following)
    sections = [
        _Section("", 0, b""),
        _Section(".dynstr", _STRINGS, strings.content),
        _Section(".dynsym", _SYMBOLS, symbols, 1, 24),
        _Section(".dynamic", _DYNAMIC, dynamic + bytes(16), 0, 16),
        *([_Section(".gnu.version_r", _NEEDED_VERSIONS, versions, 1)] if glibc else []),
    ]
    places = [names.place(section.name) for section in [*sections, _Section(".shstrtab", 0, b"")]]
    sections.append(_Section(".shstrtab", _STRINGS, names.content))
    headers, contents = b"", b""
    for place, section in zip(places, sections):
        at = 64 + len(contents)
        size, linked = len(section.content), int(section.kind not in (0, _STRINGS))
        headers += pack(
            "<IIQQQQIIQQ", place, section.kind, 0, 0, at, size, linked, section.count, 8, section.entry_bytes
        )
        contents += section.content
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    ends = (64 + len(contents), 0, 64, 0, 0, 64, len(sections), len(sections) - 1)
    return identity + pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, *ends) + contents + headers + data
