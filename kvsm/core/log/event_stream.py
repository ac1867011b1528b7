"""Compressed events: one zstd stream through the frames of a segment.

Each frame is flushed out of the stream, so a reader has all of its events. Its bytes may refer to what stands
in the frames before it, up to `WINDOW_BYTES` of events back: a key that comes back takes a few bytes there.

A frame that refers to none begins a stream (`FRESH`). The first frame of a segment does. So does the first
one behind the place where the next segment begins to open, because it will stand in that segment, too.
"""

from __future__ import annotations

from typing import IO, Any, cast

import zstandard

WINDOW_BYTES = 32 << 20
"""How far back events may refer to others. Each side holds this many bytes of events."""

_SIZE_BYTES = 4
"""What stands before the bytes of the stream: how many bytes of events they are. Little endian."""


class EventCompressor:
    """Compresses the events of one frame after the other."""

    def __init__(self) -> None:
        # Most bytes are keys, which shrink only where they come back. So what pays is a long memory.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            -1, window_log=WINDOW_BYTES.bit_length() - 1, enable_ldm=True, ldm_hash_log=18
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._stream: Any = None
        self._waiting: Any = None

    def restart(self) -> None:
        """The next frame begins a stream."""
        self._stream = self._waiting = None

    def compress(self, events: bytes) -> tuple[bytes, bool]:
        """The payload of the next frame, and whether it begins a stream.

        The frame after it begins one, too, unless `keep` is called before. So an interrupt between the two
        leaves no frame that refers to one that nobody has.
        """
        stream, self._stream = self._stream, None
        is_fresh = stream is None
        if is_fresh:
            stream = self._compressor.compressobj()
        content = stream.compress(events) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self._waiting = stream
        return len(events).to_bytes(_SIZE_BYTES, "little") + content, is_fresh

    def keep(self) -> None:
        """The last frame will be written, and nothing before it."""
        self._stream, self._waiting = self._waiting, None


class _Payloads:
    """A file of the bytes that came last."""

    def __init__(self) -> None:
        self.data = b""

    def read(self, _size: int) -> bytes:
        data, self.data = self.data, b""
        return data


class EventDecompressor:
    """Decompresses the frames of a segment, each of them once, in their order."""

    def __init__(self) -> None:
        self._source = _Payloads()
        self._stream: zstandard.ZstdDecompressionReader | None = None

    def decompress(self, payload: bytes | memoryview, is_fresh: bool, limit: int) -> bytes:
        """The events of a payload. Allocates no more than `limit` bytes for them.

        Raises `ValueError` if these are no such bytes.
        """
        stream, self._stream = self._stream, None
        size = int.from_bytes(payload[:_SIZE_BYTES], "little")
        if size > limit:
            raise ValueError(f"it claims {size} bytes, and {len(payload)} bytes may stand for {limit}")
        if is_fresh:
            self._source = _Payloads()
            decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
            stream = decompressor.stream_reader(cast(IO[bytes], self._source))
        if stream is None:
            raise ValueError("it goes on where no stream was begun")
        self._source.data = bytes(payload[_SIZE_BYTES:])
        try:
            events = stream.read(size)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
        if len(events) != size or self._source.data:
            raise ValueError(f"it stands for other than the {size} bytes that it claims")
        self._stream = stream
        return events
