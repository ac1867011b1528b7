"""The *era* of a disk tier decides which slots are valid. It is one small file for all ranks.

A reset of the cache begins an era: no block that was stored before may be served afterwards, by this process
or a later one. But the slots on disk stay unchanged until they are reused. So an era has a random id, and
each slot names the era in which its store was planned. Only slots of the era in the file are valid. The file
also names the weights that computed them. It is written and flushed before the reset is answered. The
scheduler writes it, because only the scheduler gets resets, and puts the id into its jobs; the workers write
the slots.

If an older era file is restored, all slots that were stored in later eras are invalid, whatever weights
computed them, and however old the files of slots are.

A power loss leaves the old file or the new one. A process that starts continues the era that it finds, or
begins a new era, in which no older slot is valid:

=======================================  =========  ==========================================================
found                                    era        because
=======================================  =========  ==========================================================
no file                                  new        it is unknown which blocks the slots hold
a file that cannot be read               new        likewise
other weights                            new        they have computed other bytes
an era of this life or a later one       new        each opening raises the life of the slot files, so they
                                                    are older copies; their generations would seem older
none of these                            continues
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
    """An era. The slots on disk whose headers name it are valid.

    weights: the version of the weights that computed the blocks of these slots.
    after: the generation at which the era began; slots of the era have newer generations.
        `compare_with_last_log` compares it with the log of the disk.
    id: random, `ERA_ID_BYTES` bytes; the headers of the era's slots have it.
    """

    weights: str
    after: SlotGeneration = SlotGeneration(0, 0)
    id: bytes = msgspec.field(default_factory=new_era_id)

    def write(self, path: Path) -> None:
        """Write the era to this file, durably. Raises `OSError`."""
        write_sealed(path, _MAGIC, self)


class OpenEra:
    """The current era, in the scheduler of the process that has the slot files open.

    path: the era file.
    era: the era at the start of the process (`era_at_start`).
    life: the life of the slot files, equal on all ranks.
    """

    def __init__(self, path: Path, era: DiskEra, life: int) -> None:
        self._path, self._era, self._life = path, era, life

    def named(self, jobs: Iterable[TransferJob]) -> tuple[TransferJob, ...]:
        """Return the disk's jobs of a step (`DiskTier.plan`), each with the id of the era."""
        return tuple([msgspec.structs.replace(job, era=self._era.id) for job in jobs])

    def begin(self, weights: str | None, last: int) -> None:
        """Begin a new era, durably: older blocks stay invalid, also after a crash. Raises `OSError`.

        weights: the new version of the weights; None: unchanged.
        last: the number of the last event of the disk's core.
        """
        weights = self._era.weights if weights is None else weights
        begun = DiskEra(weights, SlotGeneration(self._life, last))
        begun.write(self._path)
        self._era = begun


def read_era(path: Path) -> DiskEra | str:
    """Read an era file. Returns the era, or the reason why it cannot be read."""
    return read_sealed(path, _MAGIC, DiskEra)


def era_at_start(path: Path, weights: str, life: int) -> DiskEra:
    """Return the era of a process that has just opened the slot files: the era in the file, or a new one,
    which is on disk when this returns. A warning says why a new era invalidates the old blocks.

    weights: the version of the weights of this process.
    life: the latest life of the slot files.

    Raises `OSError` if a new era cannot be written.
    """
    found = read_era(path)
    why = found if isinstance(found, str) else _why_over(found, weights, life)
    if isinstance(found, DiskEra) and not why:
        return found
    if life > 1:  # otherwise the files are new, and hold no block
        _LOGGER.warning("nothing that earlier processes stored on disk counts: %s", why)
    begun = DiskEra(weights, SlotGeneration(life, 0))
    begun.write(path)
    return begun


def _why_over(era: DiskEra, weights: str, life: int) -> str:
    """Return why this process must not continue the era; empty if it may."""
    if era.weights != weights:
        return f"weights: {era.weights or 'not named'}, and now {weights or 'not named'}"
    if era.after.life >= life:
        return f"the files of slots are newer than their era, which begins with {era.after}"
    return ""
