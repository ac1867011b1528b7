"""Two tiers under random traffic: the ledgers agree, and every byte that is served is the one that was
stored.

Copies are carried out at random moments between their plan and their report, to memory that stands for the
disk. A copy that was given up may still be carried out later, with other bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsm.events import Direction, OffloadConfig
from kvsm.ids import listed
from kvsm.invariants import check_ledger
from kvsm.offloader import Offloader
from kvsm.plan import TransferJob, WorkerReport
from kvsm.tiers import DiskTier, disagreements, disk_config, host_config

DEVICE, HOST, DISK, PLACES, BYTES, WORKERS = 8, 4, 7, 3, 8, 2
KEYS = [f"key {n}".encode() for n in range(9)]
PROMPTS = [KEYS[0:3], KEYS[3:6], KEYS[6:9], KEYS[0:1]]
MOSTLY = st.sampled_from([True, True, True, False])
"""Whether a copy is good."""

Copies = dict[int, TransferJob]


@cache
def content(epoch: int, key: bytes) -> Any:
    return np.random.default_rng(epoch * 1000 + KEYS.index(key)).integers(1, 256, BYTES, dtype=np.uint8)


GARBAGE = np.zeros(BYTES, np.uint8)


class TwoTiers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        above = host_config(
            OffloadConfig(host_blocks=HOST, device_blocks=DEVICE, workers=WORKERS, defer_ticks=3), PLACES
        )
        self.host = Offloader(above)
        self.disk = Offloader(disk_config(above, DISK))
        self.voids: list[str | None] = []
        self.tier = DiskTier(self.host, self.disk, self.voids.append, PLACES)
        self.memory = {
            name: np.zeros((size, BYTES), np.uint8)
            for name, size in (("device", DEVICE), ("host", HOST), ("disk", DISK))
        }
        self.host_jobs: Copies = {}
        self.disk_jobs: Copies = {}
        self.expected: dict[int, list[bytes]] = {}
        """Load in flight -> its keys."""
        self.lost: list[tuple[Any, Sequence[int]]] = []
        """Memory that a lost copy may still write."""
        self.requests = 0

    @property
    def epoch(self) -> int:
        return self.host.ledger.epoch

    def free_blocks(self, wanted: int) -> list[int]:
        leases = self.host.ledger.leases.words
        return [block for block in range(DEVICE) if not leases[block]][:wanted]

    # What an engine does.

    @rule(keys=st.sampled_from(PROMPTS))
    def store(self, keys: list[bytes]) -> None:
        blocks = self.free_blocks(len(keys))
        keys = keys[: len(blocks)]
        if not keys or self.host.ledger.draining():
            return
        for key, block in zip(keys, blocks):
            self.memory["device"][block] = content(self.epoch, key)
        self.host.rewrite(blocks)
        job = self.host.store((), keys, blocks).job
        if job is not None:
            self.host.submit([job.transfer])
            self.host_jobs[job.transfer] = job

    @rule(prompt=st.sampled_from(PROMPTS))
    def ask(self, prompt: list[bytes]) -> None:
        """A prompt comes: what the disk has is fetched, and what the host can serve is loaded."""
        name = f"r{self.requests}"
        self.requests += 1
        index = self.host.ledger.index
        keys: list[bytes] = []
        for key in prompt:
            if key not in index and not self.tier.has(key):
                break
            keys.append(key)
        if any(key not in index for key in keys):
            self.tier.fetch(name, keys)
        hits = self.host.match(name, keys).hits
        blocks = self.free_blocks(hits)
        if hits and len(blocks) == hits:
            job = self.host.prepare_load(name, blocks)
            if job is not None:
                self.host.submit([job.transfer])
                self.host_jobs[job.transfer] = job
                self.expected[job.transfer] = keys[:hits]
        self.host.finish(name)

    @rule()
    def plan(self) -> None:
        for job in self.tier.plan():
            self.disk_jobs[job.transfer] = job

    @rule()
    def tick(self) -> None:
        self.host.tick()
        self.disk.tick()

    @rule(weights=st.sampled_from([None, "v2", "v3"]), really=st.integers(0, 4))
    def reset(self, weights: str | None, really: int) -> None:
        if really:
            return  # seldom, or the disk would always be empty
        self.tier.reset(weights)
        self.host.reset(weights)
        assert self.voids[-1:] == [weights]

    # What copies do.

    @precondition(lambda self: self.host_jobs)
    @rule(data=st.data(), good=MOSTLY)
    def end_host_copy(self, data: st.DataObject, good: bool) -> None:
        self.end_copy_of_host(data.draw(st.sampled_from(sorted(self.host_jobs))), good)

    def end_copy_of_host(self, transfer: int, good: bool) -> None:
        job = self.host_jobs.pop(transfer)
        to_host = job.direction is Direction.STORE
        self.copy(job, "device", "host", to_below=to_host, good=good)
        for worker in range(WORKERS):
            ended = self.host.report(job.transfer, worker, good or worker > 0).ended
        assert ended is not None
        keys = self.expected.pop(job.transfer, [])
        if ended.good and to_host:
            self.tier.stored(ended.keys)
        elif ended.good:
            for key, block in zip(keys, listed(ended.device_blocks)):
                # No stale data (S14): what a request gets is what this epoch has computed.
                assert np.array_equal(self.memory["device"][block], content(self.epoch, key))

    @precondition(lambda self: self.disk_jobs)
    @rule(data=st.data(), good=MOSTLY)
    def end_disk_copy(self, data: st.DataObject, good: bool) -> None:
        self.end_copy_of_disk(data.draw(st.sampled_from(sorted(self.disk_jobs))), good)

    def end_copy_of_disk(self, transfer: int, good: bool) -> None:
        job = self.disk_jobs.pop(transfer)
        self.copy(job, "host", "disk", to_below=job.direction is Direction.STORE, good=good)
        for worker in range(WORKERS):
            self.tier.report(
                WorkerReport(job.transfer, worker, good or worker > 0, "" if good else "it broke")
            )

    @precondition(lambda self: self.disk_jobs)
    @rule(data=st.data())
    def lose_disk_copy(self, data: st.DataObject) -> None:
        """The engine gives a copy up. It may be carried out at any time from here on."""
        job = self.disk_jobs.pop(data.draw(st.sampled_from(sorted(self.disk_jobs))))
        self.tier.lose(self.tier.copies[job.transfer].host)
        blocks, slots = map(listed, job.pairs())
        to_disk = job.direction is Direction.STORE
        self.lost.append((self.memory["disk" if to_disk else "host"], slots if to_disk else blocks))

    @precondition(lambda self: self.lost)
    @rule()
    def a_lost_copy_writes(self) -> None:
        memory, rows = self.lost[0]
        memory[list(rows)] = GARBAGE

    def copy(self, job: TransferJob, above: str, below: str, *, to_below: bool, good: bool) -> None:
        blocks, slots = map(listed, job.pairs())
        source, target = (blocks, slots) if to_below else (slots, blocks)
        names = (above, below) if to_below else (below, above)
        for one, other in zip(source, target):
            self.memory[names[1]][other] = self.memory[names[0]][one] if good else GARBAGE

    @rule()
    def settle(self) -> None:
        """A quiet moment: everything that waits is copied well."""
        self.plan()
        while self.host_jobs:
            self.end_copy_of_host(min(self.host_jobs), good=True)
        self.plan()
        while self.disk_jobs:
            self.end_copy_of_disk(min(self.disk_jobs), good=True)

    @initialize(prompts=st.sampled_from([0, 3, 3]))
    def fill(self, prompts: int) -> None:
        """More is stored than the host can hold, so the disk has what the host has lost."""
        for prompt in PROMPTS[:prompts]:
            self.store(prompt)
            self.settle()

    # What always holds.

    @invariant()
    def each_ledger_is_whole(self) -> None:
        assert check_ledger(self.host.ledger) == []
        assert check_ledger(self.disk.ledger) == []

    @invariant()
    def the_ledgers_agree(self) -> None:
        assert disagreements(self.tier) == []

    @invariant()
    def what_can_be_read_is_right(self) -> None:
        """Publish after the copy (S1), no stale data (S14) and no reuse in flight (S3), on both tiers."""
        for name, core in (("host", self.host), ("disk", self.disk)):
            for key, slot in core.ledger.index.items():
                if core.ledger.readable(slot):
                    assert np.array_equal(self.memory[name][slot], content(self.epoch, key)), (name, key)

    def teardown(self) -> None:
        """Everything ends when all have reported (S17)."""
        while self.tier.copies or self.host_jobs:
            self.plan()
            for transfer in list(self.disk_jobs):
                for worker in range(WORKERS):
                    self.tier.report(WorkerReport(transfer, worker, False, "the end"))
                del self.disk_jobs[transfer]
            for transfer in list(self.host_jobs):
                for worker in range(WORKERS):
                    self.host.report(transfer, worker, False)
                del self.host_jobs[transfer]
        assert not self.host.ledger.transfers
        assert not self.disk.ledger.transfers


TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = settings(max_examples=60, stateful_step_count=40)
