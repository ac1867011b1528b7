"""Make the file of a new segment, until readers can find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvsm.core.ledger.state_copy import StateCopy
from kvsm.core.log.frames import PREAMBLE_BYTES, FrameEncoder, SegmentHead, SegmentTail, encode_preamble
from kvsm.core.log.retention import Retention
from kvsm.core.log.segment_file import SegmentFile
from kvsm.events import SCHEMA_VERSION, OffloadConfig, recorded_ns
from kvsm.states import machines_digest

MOST_COUNTS = 1 / 64
"""The largest size of counts in a head, as a share of a full segment. Only a segment with few events over a
long time has larger counts; readers can count its events quickly."""


class SegmentMaker:
    """Makes segments with their heads. Raises `ConfigError` if `max_bytes` has no room for segments.

    config, clock, run, life, life_id: recorded in each head.
    compress: whether to compress with zstd.
    retention: decides how large a segment may become.
    syncs: whether a segment is synced before events go to it.
    """

    def __init__(
        self,
        config: OffloadConfig,
        clock: Callable[[], int],
        run: bytes,
        life: int,
        life_id: bytes,
        compress: bool,
        retention: Retention,
        syncs: bool,
    ) -> None:
        self._clock, self._run, self._life, self._life_id = clock, run, life, life_id
        self._machines = machines_digest()
        # Separate from the writer's encoder, because another thread may use it.
        self._encoder = FrameEncoder(run, compress, life)
        self._retention, self.syncs = retention, syncs
        self.use_config(config)

    def use_config(self, config: OffloadConfig) -> None:
        """Record this config from the next segment on. Raises `ConfigError` like the constructor."""
        self._config = config
        self._head_bytes = PREAMBLE_BYTES + self._encoder.most_head_bytes(self.new_head(1 << 62))
        self._retention.check(self._head_bytes)

    def make(
        self, segment: SegmentFile, state: StateCopy, ended: SegmentTail | None = None, before: bytes = b""
    ) -> None:
        """Make the file, write its head, and publish it. ended, before: the fields of the head with these
        names."""
        head = self.new_head(segment.first, ended, before)
        self.create(segment)
        while not state.go_on():
            pass
        snapshot = [*state.pieces()]
        state.drop()
        event_bytes = self.plan(segment, head, snapshot)
        self.write_head(segment, head, snapshot, event_bytes)
        if self.syncs:
            segment.sync_to(head.seq)
        self.publish(segment)

    def create(self, segment: SegmentFile) -> None:
        """Make the file, with its preamble only. So an attempt on a full disk costs no snapshot."""
        self._retention.make_room(PREAMBLE_BYTES)
        segment.create()
        segment.write(encode_preamble(), 0)
        self._retention.opening_bytes = PREAMBLE_BYTES

    def new_head(self, first: int, ended: SegmentTail | None = None, before: bytes = b"") -> SegmentHead:
        """Return the head of the segment whose first event is `first`; snapshot and `oldest` come later."""
        return SegmentHead(
            schema=SCHEMA_VERSION,
            machines=self._machines,
            config=self._config,
            seq=first - 1,
            created_ns=recorded_ns(self._clock()),
            run=self._run,
            oldest=first,
            life=self._life,
            life_id=self._life_id,
            ended=ended,
            before=before if len(before) <= MOST_COUNTS * self._retention.segment_bytes else b"",
        )

    def plan(self, segment: SegmentFile, head: SegmentHead, snapshot: Sequence[bytes]) -> int:
        """Make room for the segment, and decide which older ones are kept. Returns how many bytes of events
        fill it."""
        retention = self._retention
        more = 0 if head.ended is None else len(self._encoder.tail(head.ended, segment.first, 0))
        size = self._head_bytes + len(head.before) + sum(map(len, snapshot)) + more
        retention.opening_bytes = 0  # It is in `size`.
        event_bytes = retention.plan(segment, size)
        retention.opening_bytes = size
        return event_bytes

    def write_head(
        self, segment: SegmentFile, head: SegmentHead, snapshot: list[bytes], event_bytes: int
    ) -> None:
        """Write the head after `plan`. Any thread may call it. It empties the list `snapshot`."""
        pieces = self._encoder.head(replace(head, oldest=segment.oldest), snapshot)[::-1]
        snapshot.clear()
        while pieces:  # Free them one by one: freeing all at once would delay other threads.
            segment.write(pieces.pop(), segment.size)
        segment.full_at = segment.size + event_bytes

    def publish(self, segment: SegmentFile) -> None:
        """Give the file the name by which readers find it."""
        segment.publish()
        if self.syncs:
            segment.sync_name()
        else:
            segment.name_is_durable = True  # As durable as everything else without syncs.
