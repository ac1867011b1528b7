"""Store three blocks with kvsm, and load them again: an engine without steps."""

import numpy as np

from kvsm import HostCopyEngine, OffloadConfig, Offloader, TransferJob, Worker

device = np.zeros((64, 4096), np.uint8)  # your KV cache: 64 blocks of 4 KiB
host = np.zeros((256, 4096), np.uint8)  # room for 256 of them
worker = Worker(0, HostCopyEngine(device, host))
keys = [b"hash-of-block-%d" % n + bytes(4) for n in range(3)]


def carry_out(core: Offloader, job: TransferJob | None) -> None:
    if job is None:
        return  # nothing to copy
    core.submit([job.transfer])  # the log is written before the copy starts
    worker.submit([job])
    worker.wait([job.transfer])  # an engine does not wait: it polls once a step
    for report in worker.poll():
        core.report(report.transfer, report.worker, report.good, report.error)


with Offloader.open(OffloadConfig(host_blocks=256, device_blocks=64), "kv-log") as core:
    device[:3] = 42  # a forward pass wrote blocks 0..2 for request "a"
    carry_out(core, core.prepare_store("a", keys, [0, 1, 2]).job)
    assert core.match("b", keys).hits == 3  # "b" has the same prefix; the hits are pinned
    carry_out(core, core.prepare_load("b", [10, 11, 12]))
    assert (device[10:13] == 42).all()
    for request in ("a", "b"):
        core.finish(request)
    core.end_step()
worker.close()
