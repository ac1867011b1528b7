"""Faults of the workers, and the connectors that must survive them.

=======  ==================================================================  =================================
fault    effect                                                              connectors that must survive it
=======  ==================================================================  =================================
fail     a copy ends in the middle, and the worker reports the failure       those whose loads can fail
late     the reports of a rank are held back for some steps                  all
double   a rank reports the same ends of copies in two steps                 KvsmConnector
lose     a copy hangs, and is carried out long after its deadline; the       KvsmConnector, with a
         rank never reports it                                               `transfer_timeout_s`
slow     `transfer_timeout_s` passes before the copies in flight have ended  the same
=======  ==================================================================  =================================

vLLM promises to survive a failed load: its scheduler accepts `failed_recving` and `invalid_block_ids`, and
lets the request compute. A connector declares that its loads can fail by overriding `get_transfer_results` or
`get_block_ids_with_load_errors`. In kvsm's workers the copy engine fails, for loads and stores. Other workers
make their copies themselves; there a load that was reported as good is reported as failed instead, and the
loaded bytes are overwritten. vLLM's OffloadingConnector asserts that each copy is good, and
SimpleCPUOffloadConnector cannot report a failure, so these two need not survive one.

vLLM sets no limit to the delay of a report, so all connectors must survive late reports. Only a step without
unfinished requests holds nothing back, because no other step may follow it.

vLLM sends each report once. A finished load that is reported twice fails an assertion of vLLM's scheduler,
whatever the connector is. So `double` repeats only the messages between the two sides of the connector.

vLLM waits for a report without a limit. Only KvsmConnector gives up copies, so only copies of its workers are
lost or slow. `lost_copies.py` says what may be missing afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput

from kvsm.check.vllm_fuzz.lost_copies import LostCopies
from kvsm.check.vllm_fuzz.word_model import Words
from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.failed_copies import count_failed_load
from kvsm.copies.copy_engine import CopyResult
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import listed, pack
from kvsm.properties import Property
from kvsm.vllm.connector import KvsmConnector

LOAD, STORE, PART_OF_LOAD = range(3)
"""What `fail` lets fail: a load, a store, or all but the first block of a load. `lose` takes the first 2."""

LATE = 1.5
"""When a lost copy is carried out, in timeouts after its submission. By then it was given up."""


_SPOILED = 0x5555555555555555
"""The word in blocks whose load has failed. No token has it."""


def survived_by(connectors: Sequence[type], options: Sequence[Mapping[str, Any]] = ()) -> tuple[str, ...]:
    """The faults that an engine with these connectors must survive.

    options: the `kv_connector_extra_config` of each connector, if it has any.
    """
    ours = [issubclass(connector, KvsmConnector) for connector in connectors]
    gives_up = all(extra.get("transfer_timeout_s") != 0 for extra in options)
    return tuple(
        fault
        for fault, is_survived in (
            ("fail", any(map(_can_fail, connectors))),
            ("late", True),
            ("double", all(ours)),
            ("lose", any(ours) and gives_up),
            ("slow", any(ours) and gives_up),
        )
        if is_survived
    )


def _can_fail(connector: type) -> bool:
    """Whether the connector can report a failed load: it overrides a method of vLLM's base class."""
    names = ("get_transfer_results", "get_block_ids_with_load_errors")
    return any(getattr(connector, name) is not getattr(KVConnectorBase_V1, name) for name in names)


class RankFaults:
    """The faults of one rank.

    words: its device blocks, one row each.
    lost: the copies that the engine may have given up.
    blocks_of: returns the device blocks into which a request is loading now.
    """

    def __init__(self, words: Words, lost: LostCopies) -> None:
        self._words, self._lost = words, lost
        lost.watch(self)
        self.blocks_of: Callable[[str], list[int]] = lambda _name: []
        self._engines: list[FaultyCopies] = []
        self._failing: int | None = None
        self._doubled = False
        self._steps = 0
        self._held: list[KVConnectorOutput] = []
        """Reports that were held back, or that are repeated in the next step."""
        self._repeated = 0
        """The number of repeated ones among them."""

    def over(self, engine: Any) -> FaultyCopies:
        """Wrap a copy engine of kvsm's, so that it has these faults."""
        self._engines.append(FaultyCopies(engine, self._lost))
        return self._engines[-1]

    def fail(self, what: int) -> bool:
        """Let the next copy of this kind fail on this rank. Returns whether the rank has such copies."""
        for engine in self._engines:
            engine.failing.add(Direction.STORE if what == STORE else Direction.LOAD)
        if not self._engines and what != STORE:
            self._failing = what
        return bool(self._engines) or what != STORE

    def lose(self, what: int) -> bool:
        """Let the next copy of this kind hang on this rank. Returns whether the rank has such copies."""
        for engine in self._engines:
            engine.losing.add(Direction.STORE if what == STORE else Direction.LOAD)
        return bool(self._engines)

    def at_risk(self) -> Iterator[tuple[int, TransferJob]]:
        """(number of the copy engine, job) for each job that the scheduler may have given up."""
        for number, engine in enumerate(self._engines):
            for job in engine.at_risk.values():
                yield number, job

    def in_flight(self) -> Iterator[TransferJob]:
        """The jobs whose end was not reported to the scheduler yet."""
        for engine in self._engines:
            yield from engine.in_flight.values()

    def time_passed(self) -> None:
        """Record which jobs in flight may be overdue now."""
        for engine in self._engines:
            engine.note_overdue()

    def hold(self, steps: int) -> bool:
        """Hold back the reports of the next `steps` steps; 0 ends this. Returns whether `steps` is not 0."""
        self._steps = steps
        return bool(steps)

    def double(self) -> bool:
        """Repeat the report of the next step in the step after it."""
        self._doubled = True
        return True

    def reported(self, output: KVConnectorOutput, may_hold: bool, groups: int) -> KVConnectorOutput:
        """The output of a step that the scheduler gets, after faults.

        output: the output of the connector.
        may_hold: whether it may be held back.
        groups: the number of KV cache groups.
        """
        if self._failing is not None and output.finished_recving:
            output = self._failed(output, groups)
        again = None
        if self._doubled and output.kv_connector_worker_meta is not None:
            self._doubled = False
            again = KVConnectorOutput(kv_connector_worker_meta=copy.deepcopy(output.kv_connector_worker_meta))
        if self._steps and may_hold:
            self._steps -= 1
            self._held += [output, *([again] if again else ())]
            self._repeated += again is not None
            return KVConnectorOutput()
        for engine in self._engines:
            engine.ends_reported()
        count_case(Property.STALE_REPORTS, "reports that were repeated", self._repeated)
        output, self._held = _together([*self._held, output]), [again] if again else []
        self._repeated = len(self._held)
        return output

    def _failed(self, output: KVConnectorOutput, groups: int) -> KVConnectorOutput:
        """The output with a good load turned into a failed one.

        With several KV cache groups vLLM accepts no failed blocks, only failed loads.
        """
        name = min(output.finished_recving or ())
        blocks = self.blocks_of(name)
        is_part, self._failing = self._failing == PART_OF_LOAD and groups == 1, None
        if is_part:
            blocks = blocks[1:]
        if not blocks:
            return output
        self._words[blocks] = _SPOILED
        count_failed_load()
        if is_part:
            return replace(output, invalid_block_ids={*output.invalid_block_ids, *blocks})
        return replace(output, failed_recving={*output.failed_recving, name})


def _together(outputs: Sequence[KVConnectorOutput]) -> KVConnectorOutput:
    """Merge the outputs of several steps, as vLLM merges those of several ranks."""
    if len(outputs) == 1:
        return outputs[0]
    steps: list[Any] = [SimpleNamespace(kv_connector_output=output) for output in outputs]
    merged: Any = KVOutputAggregator(1).aggregate(steps)
    return replace(merged.kv_connector_output, expected_finished_count=0)


class FaultyCopies:
    """A `CopyEngine` around another one, with faults.

    The next job of a failing direction copies half of its blocks, and ends as bad. The next job of a losing
    direction hangs for `LATE` timeouts, and is not reported.

    failing, losing: these directions.
    lost: the copies that the engine may have given up.
    in_flight: the jobs whose end was not reported to the scheduler yet.
    at_risk: the jobs that the scheduler may give up, or has given up.
    """

    def __init__(self, engine: Any, lost: LostCopies) -> None:
        self._engine, self._losses = engine, lost
        self._doomed, self._lost = set[int](), set[int]()
        self._hanging: list[tuple[float, TransferJob, Any]] = []
        """(time at which the job is carried out, job, mark), oldest first."""
        self._ended: list[int] = []
        self.failing: set[Direction] = set()
        self.losing: set[Direction] = set()
        self.in_flight: dict[int, TransferJob] = {}
        self._began: dict[int, float] = {}
        self.at_risk: dict[int, TransferJob] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job: TransferJob, after: Any = None) -> None:
        self.in_flight[job.transfer], self._began[job.transfer] = job, self._losses.began
        self.note_overdue()
        if job.direction in self.losing and self._losses.lose(job):
            self.losing.remove(job.direction)
            self._lost.add(job.transfer)
            self.at_risk[job.transfer] = job
            self._hanging.append((self._losses.clock() + LATE * self._losses.timeout_s, job, after))
            return
        if job.direction in self.failing:
            self.failing.remove(job.direction)
            self._doomed.add(job.transfer)
            devices, hosts = map(listed, job.pairs())
            half = len(hosts) // 2
            job = msgspec.structs.replace(
                job, device_blocks=pack(devices[:half]), host_blocks=pack(hosts[:half]), keys=job.keys[:half]
            )
        self._engine.submit(job, after)

    def note_overdue(self) -> None:
        """Record which jobs the scheduler may give up from now on."""
        late = [transfer for transfer in self.in_flight if self._losses.is_overdue(self._began[transfer])]
        self.at_risk.update((transfer, self.in_flight[transfer]) for transfer in late)

    def wait(self, transfers: Iterable[int]) -> None:
        self._engine.wait([transfer for transfer in transfers if transfer not in self._lost])

    def poll(self) -> list[CopyResult]:
        while self._hanging and self._hanging[0][0] <= self._losses.clock():
            _, job, after = self._hanging.pop(0)
            self._engine.submit(job, after)
        results = [result for result in self._engine.poll() if result.transfer not in self._lost]
        self._ended += [result.transfer for result in results]
        return [self._outcome(result) for result in results]

    def ends_reported(self) -> None:
        """Record that the output of this step reports all ended jobs to the scheduler."""
        for transfer in self._ended:
            self.in_flight.pop(transfer, None)
        self._ended.clear()

    def _outcome(self, result: CopyResult) -> CopyResult:
        if result.transfer not in self._doomed:
            return result
        self._doomed.remove(result.transfer)
        return msgspec.structs.replace(result, good=False, error="made to fail", bytes=0)
