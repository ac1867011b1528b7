"""Compressed events: one zstd stream through the frames of a segment.

The stream is flushed after each frame, so a reader has all events of the frame. Its bytes may refer to
earlier frames, up to `WINDOW_BYTES` of events back: a repeated key takes a few bytes.

A frame that refers to no earlier frame begins a stream (`FRESH`). The first frame of a segment does, and also
the first frame after the place where the next segment begins to open, because that segment will have it too.
"""

from __future__ import annotations

from typing import IO, Any, cast

import zstandard

WINDOW_BYTES = 32 << 20
"""How far back events may refer to earlier events (bytes). Writer and reader each hold this many bytes."""

_SIZE_BYTES = 4
"""Size of the number before the bytes of a frame: the bytes of its events uncompressed, little endian."""


class EventCompressor:
    """Compresses the events of each frame, in order."""

    def __init__(self) -> None:
        # Most bytes are keys, which shrink only when they are repeated. So a long window pays.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            -1, window_log=WINDOW_BYTES.bit_length() - 1, enable_ldm=True, ldm_hash_log=18
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._stream: Any = None
        self._waiting: Any = None

    def restart(self) -> None:
        """Let the next frame begin a stream."""
        self._stream = self._waiting = None

    def compress(self, events: bytes) -> tuple[bytes, bool]:
        """Return the payload of the next frame, and whether it begins a stream.

        The frame after it also begins a stream, unless `keep` is called in between. So after an interrupt no
        frame refers to a frame that was not written.
        """
        stream, self._stream = self._stream, None
        is_fresh = stream is None
        if is_fresh:
            stream = self._compressor.compressobj()
        content = stream.compress(events) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self._waiting = stream
        return len(events).to_bytes(_SIZE_BYTES, "little") + content, is_fresh

    def keep(self) -> None:
        """Let the next frame refer to the last one, which is sure to be written next."""
        self._stream, self._waiting = self._waiting, None


class _Payloads:
    """A file object with the bytes of one payload."""

    def __init__(self) -> None:
        self.data = b""

    def read(self, _size: int) -> bytes:
        data, self.data = self.data, b""
        return data


class EventDecompressor:
    """Decompresses the frames of a segment, each once and in order."""

    def __init__(self) -> None:
        self._source = _Payloads()
        self._stream: zstandard.ZstdDecompressionReader | None = None

    def decompress(self, payload: bytes | memoryview, is_fresh: bool, limit: int) -> bytes:
        """Return the encoded events of a payload. Allocates at most `limit` bytes for them.

        Raises `ValueError` if the payload is malformed.
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
