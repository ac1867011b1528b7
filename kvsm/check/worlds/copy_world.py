"""The world of a copy engine: the real `StreamCopyEngine` on a device whose every step is chosen.

The world plays the worker and the compute of one rank. It submits copies behind a new mark or an older one;
queues kernels that write or read blocks; polls, waits, holds compute and closes; and says which step of a
submitter or of a stream comes next. Like the ledger it keeps live copies and compute off each other's
bytes, unless something orders them.

It compares with a plain reference, in which a copy is done when it is submitted, because that is what an
engine's order promises. Watched:

- nothing unordered touches the same bytes, or the same table of ids: the order of copies (S12, B37);
- a kernel finds the bytes that it must find, and at rest all memory holds what it must: correct bytes (S15);
- each copy ends once, good or bad as it must, and awaited copies have ended: progress (S9), failure is not
  success (S6).

Not watched: how bytes move. A copy of one block is one access here.
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
"""The value of a block that a bad copy may have written, and of copies of such a block."""

COPIES = {"store": Direction.STORE, "load": Direction.LOAD}


class CopyEngineWorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How large a world is, and how much may happen in it. Raises `ConfigError`.

    device_blocks, host_blocks: sizes of the pools.
    transfer_blocks: most blocks of one copy.
    copies, kernels, marks: how many may be made in total.
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
    """A copy whose end was not polled yet. is_held: whether compute waits for it."""

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
    """A `World`. make_device, make_engine: make its device, and the engine on that."""

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
        # One byte a block and one unused byte after it, because pools with gaps are made fastest.
        memory = np.arange(devices + hosts, dtype=np.uint8)[:, None].repeat(2, axis=1)
        self._pools = {"device": memory[:devices, :1], "host": memory[devices:, :1]}
        # A call that runs steps itself, as a wait does, takes the first one. The others can be chosen before.
        self.device = make_device(
            [self._pools["device"]], self._pools["host"], lambda _options: 0, options.transfer_blocks
        )
        self.engine = make_engine(self.device)
        self.live: dict[int, _LiveCopy] = {}
        self._expected = {side: pool[:, 0].astype(int).tolist() for side, pool in self._pools.items()}
        self._kernels: deque[tuple[str, int, int]] = deque()
        """Queued kernels: what they do, to which block, and the value that they write or must find."""
        self._used = dict.fromkeys(self._pools, 0)
        """How many of the first blocks of each side were ever used by a copy or a kernel."""
        self._misread = ""
        self._mark: Any = None
        self._touched: set[tuple[str, int]] = set()
        """Blocks that compute or a held copy was given since the mark was made."""
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
        """The possible actions of the kind that has this name."""
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
        for place, one in enumerate(self.live.values()):
            yield ("wait", place)
            if self._left["holds"] and not one.is_held:
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
        """Untouched blocks are all alike, so only the first of them may be chosen."""
        return range(min(self._used[side] + 1, len(self._expected[side])))

    def _busy(self, side: str, only_targets: bool = False) -> set[int]:
        """Blocks of this side that a live copy touches, and for which compute does not wait.

        only_targets: count only blocks that the copy writes.
        """
        return {
            block
            for one in self.live.values()
            if not one.is_held and (one.target == side or not only_targets)
            for block in one.blocks(side)
        }

    # How it happens.

    def _do_step(self, _name: str, source: str, place: int) -> None:
        self.device.run(SimulatedStep(self._sources[source], place))

    def _do_store(self, name: str, device_block: int, host_block: int, blocks: int) -> None:
        devices = tuple(range(device_block, device_block + blocks))
        hosts = tuple(range(host_block, host_block + blocks))
        direction, is_bad = COPIES[name.split()[-1]], name.startswith("bad")
        self._transfers += 1
        one = _LiveCopy(TransferJob(self._transfers, direction, devices, hosts), is_bad)
        if is_bad:
            self.device.failing[self._transfers] = 1
        self._left["copies"] -= 1
        self._left["bad"] -= is_bad
        source, target = ("device", "host") if one.target == "host" else ("host", "device")
        for here, there in zip(one.blocks(source), one.blocks(target)):
            self._expected[target][there] = UNKNOWN if is_bad else self._expected[source][here]
        self.live[self._transfers] = one
        self._use("device", devices[-1])
        self._use("host", hosts[-1])
        # The older mark serves only a copy of blocks that compute was not given since then.
        blocks_of = {("device", block) for block in devices} | {("host", block) for block in hosts}
        after = None if self._touched & blocks_of else self._mark
        self.engine.submit(one.job, after)

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
        one = list(self.live.values())[place]
        self._left["holds"] -= 1
        self.engine.hold_compute([one.job.transfer])
        one.is_held = True
        self._touched |= {(side, block) for side in self._pools for block in one.blocks(side)}

    def _do_poll(self, _name: str) -> None:
        ends = self.engine.poll()
        self._watch()  # a race explains why an end is wrong
        for end in ends:
            one = self.live.pop(end.transfer, None)
            if one is None:
                raise PropertyBroken(Property.PROGRESS, f"transfer {end.transfer} has ended twice")
            if end.good is one.is_bad:
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
        """Compare memory at rest. Everything else is watched after each action."""
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
            """A name for a value. Only whether values are equal matters."""
            return names.setdefault(value, len(names))

        memory = [[name(int(row[0])) for row in pool] for pool in self._pools.values()]
        expected = [[name(value) for value in values] for values in self._expected.values()]
        kernels = [(what, block, name(value)) for what, block, value in self._kernels]
        held = [(one.is_held, one.is_bad) for one in self.live.values()]
        left, used = list(self._left.values()), list(self._used.values())
        whole = (memory, expected, kernels, held, left, used, self._is_closed)
        engine = value_of(self.device, self.engine, self._mark)
        packed = msgspec.msgpack.encode((whole, sorted(self._touched), engine))
        return blake2b(packed, digest_size=16).digest()

    def describe(self) -> dict[str, str]:
        """What can be seen of the world, for people, by name."""
        seen = {}
        for side, pool in self._pools.items():
            for block, value in enumerate(self._expected[side]):
                seen[f"{side} block {block}"] = str(int(pool[block, 0]))
                seen[f"{side} block {block}, once all is done"] = "?" if value == UNKNOWN else str(value)
        for transfer, one in self.live.items():
            pairs = f"device blocks {one.blocks('device')}, host blocks {one.blocks('host')}"
            held = ", and compute waits for it" if one.is_held else ""
            seen[f"transfer {transfer}"] = f"{one.job.direction.name.lower()} of {pairs}{held}"
        for name, source in self._sources.items():
            seen[name] = f"{source.backlog} queued"
        return seen
