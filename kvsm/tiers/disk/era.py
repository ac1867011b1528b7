"""The *era* of a disk tier: which of its slots are valid. One small file beside the files of all ranks.

A reset of the cache begins an era: nothing that was stored before may be served afterwards, by this process
or by a later one. But the slots stay as they are on disk until they are used again. So an era has a random
id, and each slot names the era in which its store was planned: only slots of the era that the file names
count. The file also says which weights have computed them. It is written and flushed before the reset is
answered. The scheduler writes it, because it alone knows of resets, and gives its jobs the id; the workers
write the slots.

If an older era file is restored, it names an older era. So all slots that were stored since then are invalid,
whatever weights computed them, and however old the files of slots are.

A power loss leaves the old file or the new one. A process that starts goes on with the era that it finds, or
begins one of its own, before which nothing counts:

=======================================  =========  ==========================================================
found                                    era        because
=======================================  =========  ==========================================================
no file                                  begins     nobody knows what the slots hold
a file that cannot be read               begins     the same
other weights                            begins     they have computed other bytes
an era of this life or of a later one    begins     the files of slots are newer than it: each opening raises
                                                    their life. Their generations would count as older
anything else                            goes on
=======================================  =========  ==========================================================
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvsm.core.plan import TransferJob
from kvsm.tiers.disk.formats import ERA_ID_BYTES, SlotGeneration
from kvsm.tiers.disk.sealed_file import read_sealed, write_sealed

_LOGGER = logging.getLogger("kvsm.tiers.disk")

_MAGIC = b"kvsm-era"


def new_era_id() -> bytes:
    """Return a random era id of `ERA_ID_BYTES` bytes."""
    return os.urandom(ERA_ID_BYTES)


class DiskEra(msgspec.Struct, frozen=True):
    """Which slots on disk are valid: those whose headers name this era.

    weights: the version of the weights that computed the blocks of these slots.
    after: the generation at which the era began; slots of the era have newer ones. `compare_with_last_log`
        compares it with the log of the disk.
    id: random, `ERA_ID_BYTES` bytes. Only slots that name this id are valid.
    """

    weights: str
    after: SlotGeneration = SlotGeneration(0, 0)
    id: bytes = msgspec.field(default_factory=new_era_id)

    def write(self, path: Path) -> None:
        """Put it under this name, durably: it holds when this returns. Raises `OSError`."""
        write_sealed(path, _MAGIC, self)


class OpenEra:
    """The era of the process that has the files of slots open.

    path: of its file.
    era: with which the process starts (`era_at_start`).
    life: of the files, which all ranks go on with.
    """

    def __init__(self, path: Path, era: DiskEra, life: int) -> None:
        self._path, self._era, self._life = path, era, life

    def named(self, jobs: Iterable[TransferJob]) -> tuple[TransferJob, ...]:
        """Return the disk's jobs of a step (`DiskTier.plan`), each with the id of the era."""
        return tuple([msgspec.structs.replace(job, era=self._era.id) for job in jobs])

    def begin(self, weights: str | None, last: int) -> None:
        """Begin another era: nothing that was stored before may come back, after a crash either.

        weights: their new version; None: the same.
        last: the last event of the disk's core.
        Raises `OSError`.
        """
        weights = self._era.weights if weights is None else weights
        begun = DiskEra(weights, SlotGeneration(self._life, last))
        begun.write(self._path)
        self._era = begun


def read_era(path: Path) -> DiskEra | str:
    """The era that this file tells, or why it tells none."""
    return read_sealed(path, _MAGIC, DiskEra)


def era_at_start(path: Path, weights: str, life: int) -> DiskEra:
    """The era with which a process starts that has just opened the files of slots. It is on disk when this
    returns, and one warning tells why nothing of earlier processes counts.

    weights: with which it computes.
    life: the latest of the files' lives.
    Raises `OSError` if an era cannot begin.
    """
    found = read_era(path)
    why = found if isinstance(found, str) else _why_over(found, weights, life)
    if isinstance(found, DiskEra) and not why:
        return found
    if life > 1:  # Otherwise there is nothing that could count.
        _LOGGER.warning("nothing that earlier processes stored on disk counts: %s", why)
    begun = DiskEra(weights, SlotGeneration(life, 0))
    begun.write(path)
    return begun


def _why_over(era: DiskEra, weights: str, life: int) -> str:
    """Why no process may go on with this era; empty if it may."""
    if era.weights != weights:
        return f"weights: {era.weights or 'not named'}, and now {weights or 'not named'}"
    if era.after.life >= life:
        return f"the files of slots are newer than their era, which begins with {era.after}"
    return ""
