"""A short run of a host pool of four blocks and a disk of eight, for tests that read its logs."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.core.offloader import Offloader, PendingHit
from kvsm.core.plan import WorkerReport
from kvsm.events import OffloadConfig
from kvsm.tiers import DiskTier, disk_config, host_config

HOST_CONFIG = host_config(OffloadConfig(host_blocks=4, device_blocks=8), places=4)
DISK_CONFIG = disk_config(HOST_CONFIG, 8)


def live(host: Offloader, disk: Offloader, keys: Sequence[bytes]) -> None:
    """Store four of six blocks on the disk, let the host lose two of them, and fetch them back."""
    tier = DiskTier(host, disk, lambda _: None, places=4)

    def store(keys: Sequence[bytes]) -> None:
        job = host.store((("r", len(keys)),), keys, range(len(keys))).job
        assert job is not None
        host.submit([job.transfer])
        host.report(job.transfer, 0, True)
        host.rewrite(range(8))

    def copy() -> None:
        for job in tier.plan():
            tier.report(WorkerReport(job.transfer, 0, True))

    store(keys[:4])
    tier.stored(keys[:4])
    copy()
    store(keys[4:])
    assert tier.fetch(PendingHit("asker", keys[2:4])) is not None
    copy()
