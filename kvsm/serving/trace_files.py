"""Read the JSON texts of a trace file, plain or compressed with gzip."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from itertools import chain

import msgspec

from kvsm.errors import TraceError

Text = tuple[int, bytes]
"""A line and its number; number 0: the whole file, which is one JSON document over several lines."""

NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that decoding raises for a text that is not the expected JSON."""

_GZIP_MAGIC = b"\x1f\x8b"


def texts_of(path: str | os.PathLike[str]) -> Iterator[Text]:
    """Stream the JSON texts of a file: its lines, or the whole file if it is one indented JSON object.

    The file is opened only once, so it may be a pipe. Raises `TraceError` if it cannot be read.
    """
    lines = _lines_of(path)
    head = [line for line in (next(lines, None), next(lines, None)) if line is not None]
    if len(head) < 2 or not head[0][1].lstrip().startswith(b"{") or _is_json(head[0][1]):
        yield from chain(head, lines)
        return
    every = [*head, *lines]
    document = b"".join(text for _, text in every)
    has_object_lines = head[1][1].lstrip().startswith(b"{")
    if b'"block_size"' in document and (_is_json(document) or not has_object_lines):
        yield 0, document
    else:
        yield from every  # One object per line, the first of them broken.


def not_json(text: bytes, error: Exception, wanted: str) -> str:
    """Say why `text` is not JSON of the wanted kind, in one line."""
    if not text.strip():
        return "is empty; each line is one JSON object"
    if isinstance(error, RecursionError):
        return "not JSON: nested too deeply"
    what = f"not {wanted}" if isinstance(error, msgspec.ValidationError) else "not JSON"
    return f"{what}: {error}"


def _lines_of(path: str | os.PathLike[str]) -> Iterator[Text]:
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
                with gzip.open(file) as plain:
                    yield from enumerate(plain, 1)
            else:
                yield from enumerate(file, 1)
    except OSError as error:
        raise TraceError(name, 0, f"cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(name, 0, f"cannot be decompressed: {error}") from error


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except NOT_DECODED:
        return False
    return True
