"""The world of a copy engine: the real `StreamCopyEngine` on a simulated device, step by step.

The world plays the worker and the compute of one rank. It submits copies behind a new mark or an older one;
launches kernels that write or read blocks; polls, waits, holds compute and closes; and chooses which
submitter or stream makes the next step. Like the ledger it never lets a live copy and compute touch the same
bytes, unless they are ordered.

The reference is a plain model in which each copy is done at once, because the engine must order its work as
if it were. Checked:

- two accesses to the same bytes, or to the same table of ids, are ordered: order of copies (S12, B37);
- each kernel reads the expected bytes, and at rest all memory holds the expected bytes: correct bytes (S15);
- each copy ends once, good or bad as expected, and awaited copies have ended: progress (S9), failure is not
  success (S6).

Not checked: how bytes move. Here the copy of a block is a single access.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import product
from random import Random
from typing import Any

import msgspec
import numpy as np

from kvsm.check.worlds.device_state import value_of
from kvsm.check.worlds.world import Action
from kvsm.copies.simulated import SimulatedDevice, SimulatedStep
from kvsm.copies.streams import StreamCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import Direction, OffloadingEvent
from kvsm.properties import Property

UNKNOWN = -1
"""The expected value of a block that a bad copy may have written, or that was copied from such a block."""

COPIES = {"store": Direction.STORE, "load": Direction.LOAD}


class CopyEngineWorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and budgets of a copy engine world. Raises `ConfigError`.

    device_blocks, host_blocks: sizes of the pools.
    transfer_blocks: the most blocks of one copy.
    copies, kernels, marks: how many are made at most in a run.
    bad: how many of the copies may fail, after their first piece.
    holds: how often compute may be held.
    closes: whether the engine may be closed.
    """

    device_blocks: int = 2
    host_blocks: int = 1
    transfer_blocks: int = 1
    copies: int = 2
    kernels: int = 1
    marks: int = 0
    bad: int = 0
    holds: int = 1
    closes: bool = False

    def __post_init__(self) -> None:
        for name in ("device_blocks", "host_blocks", "transfer_blocks", "copies"):
            if not 1 <= getattr(self, name) <= 8:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to 8")


class _LiveCopy:
    """A copy whose end was not polled yet. is_held: compute waits for its end."""

    __slots__ = ("is_bad", "is_held", "job")

    def __init__(self, job: TransferJob, is_bad: bool) -> None:
        self.job, self.is_bad, self.is_held = job, is_bad, False

    def blocks(self, side: str) -> tuple[int, ...]:
        ids = self.job.device_blocks if side == "device" else self.job.host_blocks
        assert isinstance(ids, tuple)
        return ids

    @property
    def target(self) -> str:
        return "host" if self.job.direction is Direction.STORE else "device"


class CopyEngineWorld:
    """A `World` of one copy engine. make_device, make_engine: create its device, and the engine on it."""

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: there is no offload core here."""

    def __init__(
        self,
        options: CopyEngineWorldOptions,
        make_device: Callable[..., SimulatedDevice] = SimulatedDevice,
        make_engine: Callable[[SimulatedDevice], StreamCopyEngine] = StreamCopyEngine,
    ) -> None:
        self.options = options
        devices, hosts = options.device_blocks, options.host_blocks
        # One byte a block and one unused byte after it: for pools with gaps the device is created fastest.
        memory = np.arange(devices + hosts, dtype=np.uint8)[:, None].repeat(2, axis=1)
        self._pools = {"device": memory[:devices, :1], "host": memory[devices:, :1]}
        # A call that runs steps itself, as a wait does, always takes the first possible step (option 0).
        # Runs with another order are explored by "step" actions before the call.
        self.device = make_device(
            [self._pools["device"]], self._pools["host"], lambda _options: 0, options.transfer_blocks
        )
        self.engine = make_engine(self.device)
        self.live: dict[int, _LiveCopy] = {}
        self._expected = {side: pool[:, 0].astype(int).tolist() for side, pool in self._pools.items()}
        self._kernels: deque[tuple[str, int, int]] = deque()
        """Launched kernels that have not run: "write" or "read", the block, the value to write or to find."""
        self._used = dict.fromkeys(self._pools, 0)
        """Side -> its first blocks, up to the last one that a copy or a kernel has used (count)."""
        self._misread = ""
        self._mark: Any = None
        self._touched: set[tuple[str, int]] = set()
        """(side, block) that a kernel or a held copy has touched since the mark."""
        self._left = {
            name: int(getattr(options, name)) for name in ("copies", "kernels", "marks", "bad", "holds")
        }
        self._is_closed = False
        self._transfers = self._values = devices + hosts
        names = ("store submitter", "load submitter", "compute", "store stream", "load stream")
        sources: list[Any] = [*self.device.submitters, *self.device._streams]
        self._sources = dict(zip(names, sources, strict=True))

    # What may happen.

    def actions(self) -> list[Action]:
        return [*self._steps(), *self._calls(), *self._submissions(), *self._launches()]

    def draw(self, random: Random) -> Action:
        """Half of the actions are steps of the device."""
        steps = list(self._steps()) if random.random() < 0.5 else []
        return random.choice(steps or self.actions())

    def do(self, action: Action) -> bool:
        name, *numbers = action
        if action not in self._possible(str(name)):
            return False
        getattr(self, f"_do_{str(name).split()[-1]}")(str(name), *numbers)
        self._watch()
        return True

    def _possible(self, name: str) -> Iterator[Action]:
        """The possible actions of the same kind as the action `name`."""
        if name == "step":
            return self._steps()
        if name.split()[-1] in COPIES:
            return self._submissions()
        return self._launches() if name in ("write", "read") else self._calls()

    def _steps(self) -> Iterator[Action]:
        for name, source in self._sources.items():
            for place in range(source.choices()):
                yield ("step", name, place)

    def _calls(self) -> Iterator[Action]:
        if self._left["copies"] < self.options.copies:
            yield ("poll",)
        for place, copy in enumerate(self.live.values()):
            yield ("wait", place)
            if self._left["holds"] and not copy.is_held:
                yield ("hold", place)
        if self._left["marks"] and not self._is_closed:
            yield ("mark",)
        if self.options.closes and not self._is_closed:
            yield ("close",)

    def _submissions(self) -> Iterator[Action]:
        if not self._left["copies"] or self._is_closed:
            return
        busy = {side: self._busy(side) for side in self._pools}
        for device_block, host_block in product(self._choosable("device"), self._choosable("host")):
            for blocks in range(1, self.options.transfer_blocks + 1):
                devices = range(device_block, device_block + blocks)
                hosts = range(host_block, host_block + blocks)
                if devices.stop > self.options.device_blocks or hosts.stop > self.options.host_blocks:
                    break
                if busy["device"].intersection(devices) or busy["host"].intersection(hosts):
                    continue
                for name in COPIES:
                    yield (name, device_block, host_block, blocks)
                    if self._left["bad"]:
                        yield (f"bad {name}", device_block, host_block, blocks)

    def _launches(self) -> Iterator[Action]:
        if not self._left["kernels"]:
            return
        written, read = self._busy("device"), self._busy("device", only_targets=True)
        for block in self._choosable("device"):
            if block not in written:
                yield ("write", block)
            if block not in read and self._expected["device"][block] != UNKNOWN:
                yield ("read", block)

    def _choosable(self, side: str) -> range:
        """The used blocks of a side and one unused block: all unused blocks are interchangeable."""
        return range(min(self._used[side] + 1, len(self._expected[side])))

    def _busy(self, side: str, only_targets: bool = False) -> set[int]:
        """The blocks of this side that are touched by live copies for which compute does not wait.

        only_targets: only the blocks that such copies write.
        """
        return {
            block
            for copy in self.live.values()
            if not copy.is_held and (copy.target == side or not only_targets)
            for block in copy.blocks(side)
        }

    # How it happens.

    def _do_step(self, _name: str, source: str, place: int) -> None:
        self.device.run(SimulatedStep(self._sources[source], place))

    def _do_store(self, name: str, device_block: int, host_block: int, blocks: int) -> None:
        devices = tuple(range(device_block, device_block + blocks))
        hosts = tuple(range(host_block, host_block + blocks))
        direction, is_bad = COPIES[name.split()[-1]], name.startswith("bad")
        self._transfers += 1
        copy = _LiveCopy(TransferJob(self._transfers, direction, devices, hosts), is_bad)
        if is_bad:
            self.device.failing[self._transfers] = 1
        self._left["copies"] -= 1
        self._left["bad"] -= is_bad
        source, target = ("device", "host") if copy.target == "host" else ("host", "device")
        for here, there in zip(copy.blocks(source), copy.blocks(target)):
            self._expected[target][there] = UNKNOWN if is_bad else self._expected[source][here]
        self.live[self._transfers] = copy
        self._use("device", devices[-1])
        self._use("host", hosts[-1])
        # The older mark is enough only if neither compute nor a held copy has touched these blocks since.
        blocks_of = {("device", block) for block in devices} | {("host", block) for block in hosts}
        after = None if self._touched & blocks_of else self._mark
        self.engine.submit(copy.job, after)

    _do_load = _do_store

    def _use(self, side: str, block: int) -> None:
        self._used[side] = max(self._used[side], block + 1)

    def _do_write(self, _name: str, block: int) -> None:
        self._values += 1
        self._expected["device"][block] = self._values
        self._launch("write", block, self._values, writes=[block])

    def _do_read(self, _name: str, block: int) -> None:
        self._launch("read", block, self._expected["device"][block], reads=[block])

    def _launch(self, what: str, block: int, value: int, **accesses: list[int]) -> None:
        self._left["kernels"] -= 1
        self._use("device", block)
        self._touched.add(("device", block))
        self._kernels.append((what, block, value))
        self.device.launch(f"{what} of block {block}", action=self._run_kernel, **accesses)

    def _run_kernel(self) -> None:
        what, block, value = self._kernels.popleft()
        held = self._pools["device"][block]
        if what == "write":
            held[:] = value
        elif int(held[0]) != value:
            self._misread = f"compute reads {held[0]} in device block {block}, where {value} must be"

    def _do_mark(self, _name: str) -> None:
        self._left["marks"] -= 1
        self._mark = self.engine.mark()
        self._touched = set()

    def _do_hold(self, _name: str, place: int) -> None:
        copy = list(self.live.values())[place]
        self._left["holds"] -= 1
        self.engine.hold_compute([copy.job.transfer])
        copy.is_held = True
        self._touched |= {(side, block) for side in self._pools for block in copy.blocks(side)}

    def _do_poll(self, _name: str) -> None:
        ends = self.engine.poll()
        self._watch()  # report a race first: it is the cause of a wrong end
        for end in ends:
            copy = self.live.pop(end.transfer, None)
            if copy is None:
                raise PropertyBroken(Property.PROGRESS, f"transfer {end.transfer} has ended twice")
            if end.good is copy.is_bad:
                says = "good" if end.good else f"bad ({end.error})"
                raise PropertyBroken(
                    Property.FAILURE_IS_NOT_SUCCESS,
                    f"the end of transfer {end.transfer} is {says}; it is not",
                )

    def _do_wait(self, name: str, place: int) -> None:
        transfer = list(self.live)[place]
        self.engine.wait([transfer])
        self._do_poll(name)
        if transfer in self.live:
            raise PropertyBroken(Property.PROGRESS, f"transfer {transfer} was waited for, and has not ended")

    def _do_close(self, name: str) -> None:
        self.engine.close()
        self._is_closed = True
        self._do_poll(name)
        if self.live:
            raise PropertyBroken(
                Property.PROGRESS, f"after the close transfers {list(self.live)} have not ended"
            )

    # What must hold.

    @property
    def is_at_rest(self) -> bool:
        return not self.live and not self.device.backlog

    def _watch(self) -> None:
        if self.device.races:
            raise PropertyBroken(Property.COPY_ORDER, str(self.device.races[0]))
        if self._misread:
            raise PropertyBroken(Property.CORRECT_BYTES, self._misread)

    def check(self) -> None:
        """Compare memory at rest. All other checks run after each action."""
        if not self.is_at_rest:
            return
        for side, pool in self._pools.items():
            for block, value in enumerate(self._expected[side]):
                if value not in (UNKNOWN, int(pool[block, 0])):
                    raise PropertyBroken(
                        Property.CORRECT_BYTES,
                        f"{side} block {block} holds {pool[block, 0]}, where {value} must be",
                    )

    def wind_down(self) -> Action | None:
        step = next(self._steps(), None)
        return step or (("poll",) if self.live else None)

    def fingerprint(self) -> bytes:
        names: dict[int, int] = {UNKNOWN: UNKNOWN}

        def name(value: int) -> int:
            """A number for a value, because only equality of values matters."""
            return names.setdefault(value, len(names))

        memory = [[name(int(row[0])) for row in pool] for pool in self._pools.values()]
        expected = [[name(value) for value in values] for values in self._expected.values()]
        kernels = [(what, block, name(value)) for what, block, value in self._kernels]
        held = [(copy.is_held, copy.is_bad) for copy in self.live.values()]
        left, used = list(self._left.values()), list(self._used.values())
        whole = (memory, expected, kernels, held, left, used, self._is_closed)
        engine = value_of(self.device, self.engine, self._mark)
        packed = msgspec.msgpack.encode((whole, sorted(self._touched), engine))
        return blake2b(packed, digest_size=16).digest()

    def describe(self) -> dict[str, str]:
        """Describe memory, transfers and queues for people."""
        seen = {}
        for side, pool in self._pools.items():
            for block, value in enumerate(self._expected[side]):
                seen[f"{side} block {block}"] = str(int(pool[block, 0]))
                seen[f"{side} block {block}, once all is done"] = "?" if value == UNKNOWN else str(value)
        for transfer, copy in self.live.items():
            pairs = f"device blocks {copy.blocks('device')}, host blocks {copy.blocks('host')}"
            held = ", and compute waits for it" if copy.is_held else ""
            seen[f"transfer {transfer}"] = f"{copy.job.direction.name.lower()} of {pairs}{held}"
        for name, source in self._sources.items():
            seen[name] = f"{source.backlog} queued"
        return seen
