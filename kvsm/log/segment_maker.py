"""Making the file of a new segment, up to the moment when readers find it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvsm.events import SCHEMA_VERSION, OffloadConfig, recorded_ns
from kvsm.log.frames import PREAMBLE_BYTES, FrameEncoder, SegmentHead, SegmentTail, encode_preamble
from kvsm.log.retention import Retention
from kvsm.log.segment_file import SegmentFile, Synced
from kvsm.private_files import sync_directory
from kvsm.states import machines_digest


class SegmentMaker:
    """Makes segments, each with its head. Raises `ConfigError` if `max_bytes` has no room for any.

    config, clock, run, life: recorded in each head.
    encoder: makes the frame of the head.
    retention: decides how large a segment may become.
    syncs: whether a segment is durable before it is used.
    """

    def __init__(
        self,
        config: OffloadConfig,
        clock: Callable[[], int],
        run: bytes,
        life: int,
        encoder: FrameEncoder,
        retention: Retention,
        syncs: bool,
    ) -> None:
        self._clock, self._run, self._life, self._machines = clock, run, life, machines_digest()
        self._encoder, self._retention, self._syncs = encoder, retention, syncs
        self.use_config(config)

    def use_config(self, config: OffloadConfig) -> None:
        """Record another config from the next segment on. Raises `ConfigError` as the constructor does."""
        self._config = config
        largest = self._head(1 << 62, 1 << 62, b"")
        self._head_bytes = PREAMBLE_BYTES + len(FrameEncoder(self._run, compress=False).head(largest))
        self._retention.check(self._head_bytes)

    def make(
        self, segment: SegmentFile, snapshot: Callable[[], bytes], ended: SegmentTail | None = None
    ) -> None:
        """Make the file, with its head, not yet under its name. ended: as in the head."""
        self._retention.make_room(PREAMBLE_BYTES)
        segment.create()
        # Before the snapshot is taken: so an attempt costs little while the disk is full.
        segment.write(encode_preamble(), 0)
        state = snapshot()
        more = len(state) + (0 if ended is None else len(self._encoder.tail(ended, segment.first, 0)))
        event_bytes = self._retention.plan(segment, self._head_bytes + more)
        head = self._encoder.head(self._head(segment.first, segment.oldest, state, ended))
        self._retention.make_room(segment.size + len(head))
        segment.write(head, segment.size)
        segment.full_at = segment.size + event_bytes
        if self._syncs:
            segment.sync()
            segment.synced = Synced(segment.size, segment.first - 1, time.monotonic_ns())

    def publish(self, segment: SegmentFile, directory: Path) -> None:
        """Give the file its name, by which readers find it."""
        segment.publish()
        if self._syncs:
            sync_directory(directory)

    def _head(
        self, first: int, oldest: int, snapshot: bytes, ended: SegmentTail | None = None
    ) -> SegmentHead:
        return SegmentHead(
            schema=SCHEMA_VERSION,
            machines=self._machines,
            config=self._config,
            seq=first - 1,
            created_ns=recorded_ns(self._clock()),
            snapshot=snapshot,
            run=self._run,
            oldest=oldest,
            life=self._life,
            ended=ended,
        )
