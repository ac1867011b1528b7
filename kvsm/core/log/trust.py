"""Limits on what a log may make its reader do: run code of other packages, and allocate memory.

A log may come from anyone. Its head names an eviction policy, which may be code of another package, and the
sizes of the pools, for which memory is allocated before the first event is read. The first event of each
later process (`Restarted`) names them too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvsm.core.log.frames import segment_paths
from kvsm.core.policies import refuse_foreign
from kvsm.errors import ConfigError, KvsmError, LogError
from kvsm.events import OffloadConfig

if TYPE_CHECKING:
    from kvsm.core.log.reader import Segment

SMALL_POOL = 1 << 20
"""Host slots, and device blocks, that any log may claim: about 300 bytes of memory each to verify it."""


class Trust(NamedTuple):
    """The limits of a reader for a log.

    allow_policies: policies of other packages, `package.module:Class`, whose code may run.
    max_slots: the largest pool, in host slots or device blocks. None: the larger of `SMALL_POOL` and the size
        of the log on disk in bytes, so that a small log cannot claim much memory.
    """

    allow_policies: Collection[str] = ()
    max_slots: int | None = None

    def admit(self, segment: Segment) -> None:
        """Check the configuration in the head of a segment now, and those of its `Restarted` events when
        read.

        Call it before an event of the segment is read. Raises `LogError` for the head; reading raises it in
        place of such an event.
        """
        check = partial(self.check, log=segment.path.parent)
        check(segment.head.config)
        segment.check_claim = check

    def check(self, config: OffloadConfig, log: Path) -> None:
        """Raise `LogError` if a configuration exceeds the limits. Call it before anything is made from
        `config`.

        log: the directory.
        """
        try:
            refuse_foreign(config.policy, self.allow_policies)
        except ConfigError as error:
            raise LogError(f"{log}: {error}") from error
        claimed = max(config.host_blocks, config.device_blocks)
        limit = SMALL_POOL if self.max_slots is None else self.max_slots
        if claimed > limit and (self.max_slots is not None or claimed > _bytes_on_disk(log)):
            raise LogError(
                f"{log}: it claims {config.host_blocks} host slots and {config.device_blocks} device blocks, "
                f"and each takes memory; if you trust it, read it with --max-slots {claimed}"
            )

    @contextmanager
    def guarded(self, log: str | os.PathLike[str]) -> Iterator[None]:
        """Use `with` around reading: an error, or `sys.exit`, of an allowed policy becomes a `LogError`.

        Without an allowed policy every other error is a bug of kvsm, and is raised unchanged.
        """
        try:
            yield
        except KvsmError:
            raise
        except (Exception, SystemExit) as error:
            if not self.allow_policies:
                raise
            raise LogError(
                f"{os.fspath(log)}: cannot be read with the policy that was allowed: "
                f"{type(error).__name__}: {error}"
            ) from error


def _bytes_on_disk(log: Path) -> int:
    """Return the bytes of a log's segments on disk, without holes."""
    found = [path.stat() for path in segment_paths(log)]
    return sum(min(one.st_size, 512 * one.st_blocks) for one in found)
