"""Faults of the workers: what may go wrong there, and which connectors must survive it.

=======  ==================================================================  =================================
fault    what happens                                                        who must survive it
=======  ==================================================================  =================================
fail     a copy ends in the middle, and the worker says so                   connectors whose loads can fail
late     a rank's reports are held back for some steps                       all connectors
double   a rank reports the same ends of copies in two steps                 KvsmConnector
lose     a copy hangs, and happens long after its time is up; the rank       KvsmConnector, with a
         never reports it                                                    `transfer_timeout_s`
slow     `transfer_timeout_s` passes, and copies on the way have not ended   the same
=======  ==================================================================  =================================

vLLM promises to survive a failed load: its scheduler takes `failed_recving` and `invalid_block_ids`, and lets
the request compute. A connector says that its loads can fail by a `get_transfer_results` or a
`get_block_ids_with_load_errors` of its own. kvsm's workers fail in their copy engine, loads and stores.
Other workers copy by themselves; there a load that was reported as good is reported as failed instead, and
what it has brought is spoiled. vLLM's OffloadingConnector asserts that each copy is good, and
SimpleCPUOffloadConnector cannot report a failure: these two do not promise to survive one.

Nothing says how soon the end of a copy is reported, so all connectors must survive late reports. Only a step
without unfinished requests holds nothing back: after it there may be no other step.

vLLM sends each report once. A finished load that is reported twice fails an assertion of vLLM's scheduler,
whatever the connector is. So `double` repeats only what the connector's sides tell each other.

vLLM waits for a report without a bound. Only KvsmConnector gives a copy up, so only its workers' copies
are lost or slow. What may be missing afterwards, `lost_copies.py` says.
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
from kvsm.copies.copy_engine import CopyResult
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import listed, pack
from kvsm.vllm.connector import KvsmConnector

LOAD, STORE, PART_OF_LOAD = range(3)
"""What `fail` lets fail: a load, a store, or all blocks of a load but the first. `lose` knows two of them."""

LATE = 1.5
"""When a lost copy is carried out (timeouts after its submission). It was given up before that."""


_SPOILED = 0x5555555555555555
"""What is left where a load has failed. No token has this word."""


def survived_by(connectors: Sequence[type], options: Sequence[Mapping[str, Any]] = ()) -> tuple[str, ...]:
    """The faults that an engine with these connectors must survive.

    options: the `kv_connector_extra_config` of each connector, if it has any.
    """
    ours = [issubclass(one, KvsmConnector) for one in connectors]
    gives_up = all(one.get("transfer_timeout_s") != 0 for one in options)
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
    """Whether the connector can report a failed load, by a method that is not vLLM's."""
    names = ("get_transfer_results", "get_block_ids_with_load_errors")
    return any(getattr(connector, name) is not getattr(KVConnectorBase_V1, name) for name in names)


class RankFaults:
    """What goes wrong on one rank.

    words: its device blocks, one row each.
    lost: what the engine may have given up.
    blocks_of: the device blocks that a request loads into now.
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
        """Reports that were held back."""

    def over(self, engine: Any) -> FaultyCopies:
        """A copy engine of kvsm's, with these faults."""
        self._engines.append(FaultyCopies(engine, self._lost))
        return self._engines[-1]

    def fail(self, what: int) -> bool:
        """The next copy of this kind that begins here fails. Returns whether there are such copies."""
        for engine in self._engines:
            engine.failing.add(Direction.STORE if what == STORE else Direction.LOAD)
        if not self._engines and what != STORE:
            self._failing = what
        return bool(self._engines) or what != STORE

    def lose(self, what: int) -> bool:
        """The next copy of this kind that begins here is never reported. Returns whether there are such
        copies."""
        for engine in self._engines:
            engine.losing.add(Direction.STORE if what == STORE else Direction.LOAD)
        return bool(self._engines)

    def at_risk(self) -> Iterator[tuple[int, TransferJob]]:
        """The jobs that the engine may have given up, each with the number of its copy engine."""
        for number, engine in enumerate(self._engines):
            for job in engine.at_risk.values():
                yield number, job

    def on_the_way(self) -> Iterator[TransferJob]:
        """The jobs whose end the scheduler has not been told."""
        for engine in self._engines:
            yield from engine.on_the_way.values()

    def time_passed(self) -> None:
        """What is on the way may be overdue from now on."""
        for engine in self._engines:
            engine.note_overdue()

    def hold(self, steps: int) -> bool:
        """Hold back what the next steps report. Returns whether there are any. 0: hold nothing any more."""
        self._steps = steps
        return bool(steps)

    def double(self) -> bool:
        """What the next step reports is reported once more in the step after it."""
        self._doubled = True
        return True

    def reported(self, told: KVConnectorOutput, may_hold: bool, groups: int) -> KVConnectorOutput:
        """What the scheduler hears of this step. groups: KV cache groups."""
        if self._failing is not None and told.finished_recving:
            told = self._failed(told, groups)
        again = None
        if self._doubled and told.kv_connector_worker_meta is not None:
            self._doubled = False
            again = KVConnectorOutput(kv_connector_worker_meta=copy.deepcopy(told.kv_connector_worker_meta))
        if self._steps and may_hold:
            self._steps -= 1
            self._held += [told, *([again] if again else ())]
            return KVConnectorOutput()
        for engine in self._engines:
            engine.told()
        told, self._held = _together([*self._held, told]), [again] if again else []
        return told

    def _failed(self, told: KVConnectorOutput, groups: int) -> KVConnectorOutput:
        """A load that ended well, as a failed one.

        Blocks have no meaning of their own if there are several groups, so vLLM takes only whole loads then.
        """
        name = min(told.finished_recving or ())
        blocks = self.blocks_of(name)
        is_part, self._failing = self._failing == PART_OF_LOAD and groups == 1, None
        if is_part:
            blocks = blocks[1:]
        if not blocks:
            return told
        self._words[blocks] = _SPOILED
        if is_part:
            return replace(told, invalid_block_ids={*told.invalid_block_ids, *blocks})
        return replace(told, failed_recving={*told.failed_recving, name})


def _together(outputs: Sequence[KVConnectorOutput]) -> KVConnectorOutput:
    """The reports of several steps as those of one, put together as vLLM does it for several ranks."""
    if len(outputs) == 1:
        return outputs[0]
    steps: list[Any] = [SimpleNamespace(kv_connector_output=one) for one in outputs]
    told: Any = KVOutputAggregator(1).aggregate(steps)
    return replace(told.kv_connector_output, expected_finished_count=0)


class FaultyCopies:
    """A `CopyEngine` over another one. The next job of a failing direction copies half of its blocks, and
    ends as bad. The next job of a losing direction hangs until `LATE` timeouts are over, and is not reported.

    failing, losing: these directions.
    lost: what the engine may have given up.
    on_the_way: jobs whose end the scheduler has not been told.
    at_risk: jobs that the scheduler may give up, or has given up.
    """

    def __init__(self, engine: Any, lost: LostCopies) -> None:
        self._engine, self._losses = engine, lost
        self._doomed, self._lost = set[int](), set[int]()
        self._hanging: list[tuple[float, TransferJob, Any]] = []
        """(when it is carried out, job, mark), the oldest first."""
        self._ended: list[int] = []
        self.failing: set[Direction] = set()
        self.losing: set[Direction] = set()
        self.on_the_way: dict[int, TransferJob] = {}
        self._began: dict[int, float] = {}
        self.at_risk: dict[int, TransferJob] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job: TransferJob, after: Any = None) -> None:
        self.on_the_way[job.transfer], self._began[job.transfer] = job, self._losses.began
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
        """Note which jobs the scheduler may give up from now on."""
        late = [one for one in self.on_the_way if self._losses.is_overdue(self._began[one])]
        self.at_risk.update((one, self.on_the_way[one]) for one in late)

    def wait(self, transfers: Iterable[int]) -> None:
        self._engine.wait([one for one in transfers if one not in self._lost])

    def poll(self) -> list[CopyResult]:
        while self._hanging and self._hanging[0][0] <= self._losses.clock():
            _, job, after = self._hanging.pop(0)
            self._engine.submit(job, after)
        results = [result for result in self._engine.poll() if result.transfer not in self._lost]
        self._ended += [result.transfer for result in results]
        return [self._outcome(result) for result in results]

    def told(self) -> None:
        """The scheduler will be told all that has ended, with the output of this step."""
        for transfer in self._ended:
            self.on_the_way.pop(transfer, None)
        self._ended.clear()

    def _outcome(self, result: CopyResult) -> CopyResult:
        if result.transfer not in self._doomed:
            return result
        self._doomed.remove(result.transfer)
        return msgspec.structs.replace(result, good=False, error="made to fail", bytes=0)
