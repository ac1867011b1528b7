"""`KvsmOffloadingWorker`: kvsm's copy engine of one rank behind vLLM's `OffloadingWorker`.

vLLM names device blocks one by one, group after group, and slots of `blocks_per_chunk` blocks each. The
blocks of a group are consecutive in their request, from block index i on. So the first slot of the group is
used from place i % blocks_per_chunk on, and the last one may be used in part.

    blocks_per_chunk 4, a group of 5 blocks, block index 6     slots   | 9: . . 0 1 | 3: 2 3 4 . |

vLLM's connector cannot be told that a copy failed: it would treat a failed load as loaded and a failed store
as stored. So a failed copy stops the engine, with the reason. `KvsmOffloadingConnector` can be told: it has
a `ReportingWorker`.

A vLLM newer than 0.32 may make a step wait for a load and compute with what it brings: an expedited load.
Such a step must not begin without these bytes. So if the load fails or is given up, `wait` itself raises.

A copy that never ends is given up when it is `patience_s` old. vLLM remembers a job until every rank has
reported it, and a step may wait for a job. So a store that is given up is reported as done; `spec_manager`
counts it as lost by then. A load is never reported before it has ended, because its request would read the
blocks. But no step waits for it any longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvsm.copies import CopyResult
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack
from kvsm.vllm.canonical_layout import CanonicalRows
from kvsm.vllm.kv_cache_config import byte_rows
from kvsm.vllm.rank_copies import HostSharing, RankCopies, make_copies, pauses

log = init_logger("vllm.kvsm")


class KvsmOffloadingWorker(OffloadingWorker):
    """The worker of one rank. Raises `ConfigError`."""

    def __init__(
        self,
        rank: int,
        caches: Sequence[Any],
        num_slots: int,
        blocks_per_chunk: int,
        patience_s: float = 0.0,
        verify: bool = False,
        sharing: HostSharing | None = None,
        canonical: CanonicalRows | None = None,
    ) -> None:
        """caches: vLLM's `CanonicalKVCacheTensor`s. patience_s: how old a copy becomes before it is given up
        (s); 0: it never is. verify, sharing, canonical: see `make_copies`."""
        self.clock: Callable[[], float] = time.monotonic
        """The time (s). Public, as `pause` is, so that a test can choose it."""
        self.pause: Callable[[float], None] = time.sleep
        """Sleeps for this time (s)."""
        self._rank, self._chunk, self._patience_s = rank, blocks_per_chunk, patience_s
        self._verify, self._sharing, self._canonical = verify, sharing, canonical
        self._began: dict[Direction, dict[int, float]] = {direction: {} for direction in Direction}
        """Direction -> job -> when it was submitted, the oldest first. Jobs that have not ended."""
        self._given_up: set[int] = set()
        """Stores that were reported as done, and whose copy has not ended."""
        self._ended: list[CopyResult] = []
        """Copies that have ended, and vLLM has not been told."""
        self._expedited: set[int] = set()
        """Loads for which the step has not waited yet."""
        self._rows = [block_rows(cache) for cache in caches]
        self._num_slots = num_slots
        self._copies = self._make_copies()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin a store, from device blocks into slots."""
        self._submit(job_id, Direction.STORE, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Begin a load, from slots into device blocks. expedited: whether this step waits for it.

        It overtakes no other load. Copying threads take turns, so it waits for a piece of each of the others;
        on a GPU it waits for the others.
        """
        if expedited:
            self._expedited.add(job_id)
        self._submit(job_id, Direction.LOAD, dst_spec, src_spec)
        return True

    def _submit(self, job_id: int, direction: Direction, device: Any, host: Any) -> None:
        num_slots = getattr(host, "num_slots", 0)  # vLLM's own managers do not say.
        if num_slots > self._num_slots:
            # Pipeline stages may have different numbers of layers, so the scheduler's stage may have counted
            # more slots. This is the first job, so nothing is lost.
            self._copies.close()
            self._num_slots = num_slots
            self._copies = self._make_copies()
        hosts = host_blocks(device, host.block_ids.tolist(), self._chunk)
        blocks = device.block_ids.tolist()
        self._copies.engine.submit(TransferJob(job_id, direction, pack(blocks), pack(hosts)))
        self._began[direction][job_id] = self.clock()

    def get_finished(self) -> list[TransferResult]:
        """The jobs that are over since the last call: ended, or given up. Raises `TransferFailed` if one
        failed."""
        self._poll()
        results, self._ended = self._ended, []
        for result in results:
            if not result.good:
                self._stop(f"a {result.direction.name.lower()} failed on rank {self._rank}: {result.error}")
        over = [TransferResult(one.transfer, True, one.bytes, one.seconds) for one in results]
        return over + [TransferResult(job, True) for job in self._give_up_stores()]

    def _stop(self, reason: str) -> NoReturn:
        """Stop the engine. Raises `TransferFailed`."""
        text = (
            f"{reason}. vLLM's OffloadingConnector cannot be told, and would serve wrong tokens. With "
            "KvsmConnector such a request is recomputed, and with KvsmOffloadingConnector too, unless a step "
            "waits for its load (sync_load_budget_bytes)"
        )
        log.error("kvsm: %s", text)
        raise TransferFailed(text)

    def _poll(self) -> None:
        """Note which copies have ended."""
        for result in self._copies.engine.poll():
            job = result.transfer
            if job in self._given_up:
                self._given_up.remove(job)
                log.info("kvsm: store %d ended on rank %d after it was given up", job, self._rank)
            else:
                del self._began[result.direction][job]
                self._ended.append(result)

    def _give_up_stores(self) -> list[int]:
        """The stores that are too old, each once."""
        stores = self._began[Direction.STORE]
        given_up: list[int] = []
        while self._patience_s and stores and self._is_too_old(next(iter(stores.items()))[1]):
            job = next(iter(stores))
            del stores[job]
            given_up.append(job)
        if given_up:
            self._given_up.update(given_up)
            log.error(
                "kvsm: stores %s have not ended on rank %d for %g s and are given up",
                given_up,
                self._rank,
                self._patience_s,
            )
        return given_up

    def _is_too_old(self, began: float) -> bool:
        return self.clock() - began >= self._patience_s

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs have ended, or are too old to wait for. Unknown ones have ended.

        Raises `TransferFailed` if the step would compute without an expedited load.
        """
        self._wait(job_ids)
        expedited = job_ids & self._expedited
        if expedited:
            self._expedited -= expedited
            self._check_loaded(expedited)

    def _check_loaded(self, jobs: set[int]) -> None:
        """Raises `TransferFailed` if one of these loads failed, or has not ended."""
        self._poll()
        for result in self._ended:
            if result.transfer in jobs and not result.good:
                self._stop(f"a load for which a step waits failed on rank {self._rank}: {result.error}")
        hanging = jobs & self._began[Direction.LOAD].keys()
        if hanging:
            self._stop(
                f"loads {sorted(hanging)}, for which a step waits, have not ended on rank {self._rank} for "
                f"{self._patience_s:g} s"
            )

    def _wait(self, job_ids: set[int]) -> None:
        if not self._patience_s:
            self._copies.engine.wait(sorted(job_ids))
            return
        for pause_s in pauses():
            self._poll()
            awaited = {
                job: began
                for jobs in self._began.values()
                for job, began in jobs.items()
                if job in job_ids and not self._is_too_old(began)
            }
            if not awaited:
                return
            self.pause(pause_s)

    def shutdown(self) -> None:
        """Wait for all copies, and free the host memory."""
        self._copies.close()

    def _make_copies(self) -> RankCopies:
        copies = make_copies(
            self._rows, self._num_slots * self._chunk, self._verify, None, self._sharing, self._canonical
        )
        log.info("kvsm: rank %d has %d host slots of %d blocks", self._rank, self._num_slots, self._chunk)
        return copies


class ReportingWorker(KvsmOffloadingWorker):
    """The worker of one rank under `KvsmOffloadingConnector`: a copy that failed is a reason, not the end.

    Nothing is given up here: the scheduler's side decides that. But if a step stops waiting for a store, it
    may overwrite what the store still reads. So when such a store ends, it has failed.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Takes what `KvsmOffloadingWorker` takes."""
        super().__init__(*arguments, **named)
        self._errors: dict[int, str] = {}
        self._overtaken: set[int] = set()
        """Stores for which a step no longer waited."""

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended since the last call, well or not: `take_errors` tells."""
        self._poll()
        results, self._ended = self._ended, []
        for result in results:
            job, error = result.transfer, None if result.good else result.error or "unknown reason"
            if job in self._overtaken:
                self._overtaken.remove(job)
                error = error or "a step overwrote its device blocks, because it took too long"
            if error is not None:
                self._errors[job] = error
                name = result.direction.name.lower()
                log.error("kvsm: a %s failed on rank %d: %s", name, self._rank, error)
        return [TransferResult(one.transfer, True, one.bytes, one.seconds) for one in results]

    def take_errors(self) -> dict[int, str]:
        """Job -> why it failed, for the failed ones since the last call."""
        errors, self._errors = self._errors, {}
        return errors

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs have ended, or are too old to wait for. Unknown ones have ended.

        Raises `TransferFailed` if the step would compute without an expedited load.
        """
        super().wait(job_ids)
        self._poll()
        self._overtaken.update(job_ids & self._began[Direction.STORE].keys())


def host_blocks(device: Any, slots: Sequence[int], blocks_per_chunk: int) -> list[int]:
    """The host block for each device block, in order.

    device: vLLM's `GPULoadStoreSpec`.
    Raises `TransferFailed` if the number of slots does not fit these blocks.
    """
    entered = [index % blocks_per_chunk for index in device.block_indices]
    counts = [
        -(-(first + size) // blocks_per_chunk) if size else 0
        for first, size in zip(entered, device.group_sizes)
    ]
    if sum(counts) != len(slots):
        raise TransferFailed(
            f"vLLM names {len(slots)} slots for groups of {list(device.group_sizes)} blocks from block "
            f"indices {list(device.block_indices)} on, which are {sum(counts)} slots of {blocks_per_chunk} "
            "blocks each"
        )
    places: list[int] = []
    left = list(slots)
    for first, size, count in zip(entered, device.group_sizes, counts):
        of_group, left = left[:count], left[count:]
        places += [
            of_group[place // blocks_per_chunk] * blocks_per_chunk + place % blocks_per_chunk
            for place in range(first, first + size)
        ]
    return places


def block_rows(cache: Any) -> Any:
    """A `CanonicalKVCacheTensor` as `byte_rows`. Raises `ConfigError` if a block is not contiguous."""
    tensor, page_bytes = cache.tensor, cache.page_size_bytes
    if not tensor[0].is_contiguous() or not 0 < page_bytes <= tensor.stride(0) * tensor.element_size():
        raise ConfigError(
            f"a KV cache tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has blocks that "
            f"are not {page_bytes} contiguous bytes; kvsm copies whole pages"
        )
    return byte_rows(tensor, page_bytes)
