"""The events: every way in which the state of the offload core can change, as typed records.

An `OffloadingEvent` is one record of the log: its number (`seq`, from 1, without gaps), the engine step
and the wall time at which it was decided (`wall_ns`, data only: nothing decides by it), and the fields of
its kind. Each kind is a class below. `Ledger.apply` gives it its meaning; `TRIGGERS` says which trigger
it pulls on which machine.

On disk an event is a msgpack array `[tag, seq, step, wall_ns, *fields]`. Fields are only ever added at
the end, with a default, so that an older record of the same `SCHEMA_VERSION` always reads.
"""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec

from kvsm.errors import ConfigError
from kvsm.ids import Id, Ids
from kvsm.states import BlockTrigger, LeaseTrigger, RequestTrigger, TransferTrigger
from kvsm.states.block import BLOCK
from kvsm.states.transfer import TRANSFER

SCHEMA_VERSION = 1


class Direction(IntEnum):
    """Which way a transfer copies. STORE: device to host. LOAD: host to device."""

    STORE = 0
    LOAD = 1


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the core must know before its first event; written into the log.

    host_blocks: slots of the host pool. device_blocks: blocks of the device pool, so that a lease has a
    place. block_bytes: bytes of one block on one worker (for accounting). workers: ranks that must report
    each transfer. blocks_per_chunk: device blocks that one slot holds. policy: a name in
    `kvsm.policies.POLICIES`, or `package.module:Class`. max_live_transfers: planned or in flight at once.
    defer_ticks: how long a match may wait for a block in flight; 0 never waits, and the block is computed
    again.
    transfer_ticks: how long a transfer may be in flight until it counts as lost; 0 waits for ever.
    store_threshold: a key is stored when it is offered for the n-th time. offer_history: keys whose offers
    are remembered for that.
    """

    host_blocks: int
    device_blocks: int
    block_bytes: int = 0
    workers: int = 1
    blocks_per_chunk: int = 1
    policy: str = "lru"
    max_live_transfers: int = 1024
    defer_ticks: int = 64
    transfer_ticks: int = 10_000
    store_threshold: int = 1
    offer_history: int = 65_536

    def __post_init__(self) -> None:
        for name, least, most in (
            ("host_blocks", 1, 1 << 31),
            ("device_blocks", 1, 1 << 31),
            ("block_bytes", 0, 1 << 40),
            ("workers", 1, TRANSFER.counters[0].limit),
            ("max_live_transfers", 1, BLOCK.counters[0].limit),
            ("blocks_per_chunk", 1, 1 << 10),
            ("defer_ticks", 0, 1 << 31),
            ("transfer_ticks", 0, 1 << 31),
            ("store_threshold", 1, 1 << 31),
            ("offer_history", 1, 1 << 31),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from {least} to {most}")


class SkipReason(str, Enum):
    """Why an offered block was not stored."""

    __str__ = str.__str__

    POOL_FULL = "pool full"
    KEY_IN_FLIGHT = "key in flight"
    DEVICE_BLOCK_IN_FLIGHT = "device block in flight"
    TOO_MANY_TRANSFERS = "too many live transfers"
    OLDER_EPOCH = "brought by a load of an older epoch"
    BELOW_THRESHOLD = "offered too seldom"
    DRAINING = "a reset is draining"


class RejectReason(str, Enum):
    """Why a worker's report changed nothing."""

    __str__ = str.__str__

    UNKNOWN = "no such transfer was planned"
    STALE = "no live transfer has this id"
    NOT_SUBMITTED = "transfer was not submitted"
    DUPLICATE = "worker has reported before"
    WORKER = "no such worker"
    DIRECTION = "transfer goes the other way"


Owners = tuple[tuple[str, Id], ...]
"""(request, how many of an event's keys are its), in the order of the keys."""

Offer = tuple[str, tuple[Id, ...], tuple[Id, ...]]
"""(request, settled, offered), the latter two in blocks of each KV cache group."""


class OffloadingEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all kinds. seq: event number. step: engine step. wall_ns: Unix time in nanoseconds."""

    seq: Id
    step: Id
    wall_ns: Id

    @property
    def kind(self) -> str:
        return type(self).__name__


class LogOpened(OffloadingEvent, frozen=True, array_like=True, tag=1):
    """First event of a life of the core: an empty pool under this configuration."""

    config: OffloadConfig
    machines: str
    """Digest of the machine tables that wrote the log."""
    schema: int = SCHEMA_VERSION


class RequestArrived(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=2):
    request: str


class RequestPreempted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=3):
    """The engine took its device blocks. Its pins are released and its cursors restart; its copies in flight
    keep their leases."""

    request: str


class RequestFinished(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=4):
    """Finished or aborted. It is RELEASED in this very event, or by the end of its load. Its stores go on:
    others may want them."""

    request: str
    aborted: bool = False


class HitMatched(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=5):
    """The host serves `slots`, in prefix order, and each is pinned. No slots: a miss.

    missed: the first key that was not readable (None: all were).
    """

    request: str
    slots: Ids
    missed: bytes | None = None


class HitReleased(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=6):
    """The request gives back all its hit pins without loading."""

    request: str


class RequestDeferred(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=7):
    """The next block it needs is touched by `transfer`; it waits for its end, or until tick `until`."""

    request: str
    transfer: Id
    until: Id


class KeysRecalled(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=8):
    """Keys offered for a store that the eviction policy remembers evicting (ghost hits)."""

    keys: tuple[bytes, ...]


class BlocksEvicted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=9):
    """The policy's choice: `slots` go, to make room for the store `transfer` (which is the next event that
    plans one); `moved` only change place in the eviction order."""

    slots: Ids
    moved: Ids
    transfer: Id


class StorePlanned(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=10):
    """A transfer will copy the i-th chunk of `device_blocks` to slots[i], which will then hold keys[i].

    A plan's event number is the transfer's id and the generation of the blocks that it allocates: one
    number, never reused, names all three. owners: (request, how many of the keys are its), in their order,
    for whoever reads the log: a store needs no request. Nobody's, if the free queue was stored.
    """

    owners: Owners
    keys: tuple[bytes, ...]
    slots: Ids
    device_blocks: Ids


class StoreSkipped(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=11):
    """Offered blocks that were not stored, and why; the engine may offer them again."""

    owners: Owners
    keys: tuple[bytes, ...]
    reason: SkipReason


class LoadPlanned(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=12):
    """A transfer will copy slots[i], the first pins of the request's match, to the i-th chunk of
    `device_blocks`.

    The event number is the transfer's id. Pins beyond those loaded are released. A pinned block that was
    invalidated since the match is not readable any more: the plan is then empty, `voided` is true, and
    the request is told that its load failed. parts: where not all of every chunk is loaded, which: part p
    is place p % blocks_per_chunk of slots[p // blocks_per_chunk], and goes to the device block beside it.
    """

    request: str
    slots: Ids
    device_blocks: Ids
    voided: bool = False
    parts: Ids = ()


class TransfersSubmitted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=13):
    """These plans leave for the workers; from here on their memory may be touched at any time."""

    transfers: tuple[Id, ...]


class TransferCancelled(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=14):
    """The plan never left for the workers."""

    transfer: Id


class WorkerReported(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=15):
    """Worker `worker` is done with its shard. The last worker's report ends the transfer in this event:
    a good store is published, a failed one gives its slots back, a failed load voids what it read."""

    transfer: Id
    worker: Id
    good: bool


class ReportRejected(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=16):
    """A report that changes nothing, and why."""

    transfer: int
    worker: int
    good: bool
    reason: RejectReason


class TransferLost(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=17):
    """A worker will never report. The memory it may still touch is retired."""

    transfer: Id


class BlocksTouched(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=18):
    """Used again without a load (the device had them too): they move in the eviction order."""

    slots: Ids


class FlushRequested(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=19):
    """The engine is about to reuse memory, or to stop stepping: workers wait for these transfers."""

    transfers: tuple[Id, ...]


class CacheReset(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=20):
    """Nothing stored before this event may match after it. Plans are cancelled, copies abandoned."""

    epoch: Id


class StepEnded(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=21):
    """An engine step in which something was decided is over."""


class Ticked(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=22):
    """The host's count of time, for the bounds of waits; `tick` counts from 1 without gaps."""

    tick: Id


class BlocksOffered(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=23):
    """How far the blocks of these requests have been dealt with, by KV cache group: every block before
    `settled` is stored, being stored, or will not be; those up to `offered` have been looked at once."""

    offers: tuple[Offer, ...]


class OffersCounted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=24):
    """These keys were offered once more; they are not stored before their n-th time (store_threshold)."""

    keys: tuple[bytes, ...]


class BlocksRewritten(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=25):
    """The engine gave these device blocks away to be computed: what a load brought into them is gone."""

    device_blocks: Ids


_B, _T, _L, _R = BlockTrigger, TransferTrigger, LeaseTrigger, RequestTrigger
_BLOCK_ENDS = (_B.END_COPY_GOOD, _B.END_COPY_BAD)
_ENDS = (_L.END_READ, _L.END_WRITE, _R.END_LOAD, _R.WAKE)

TRIGGERS: dict[type[OffloadingEvent], tuple[IntEnum, ...]] = {
    LogOpened: (),
    RequestArrived: (),
    RequestPreempted: (_R.PREEMPT, _B.UNPIN),
    RequestFinished: (_R.FINISH, _B.UNPIN),
    HitMatched: (_R.HIT, _R.MISS, _B.PIN),
    HitReleased: (_R.UNMATCH, _B.UNPIN),
    RequestDeferred: (_R.DEFER,),
    KeysRecalled: (),
    BlocksEvicted: (_B.EVICT, _B.TOUCH),
    StorePlanned: (_B.ALLOCATE, _L.BEGIN_READ),
    StoreSkipped: (),
    LoadPlanned: (_R.BEGIN_LOAD, _B.BEGIN_LOAD, _B.UNPIN, _L.BEGIN_WRITE, _R.END_LOAD),
    TransfersSubmitted: (_T.SUBMIT, _B.SUBMIT_STORE),
    TransferCancelled: (_T.CANCEL, _B.CANCEL, _B.END_COPY_BAD, *_ENDS),
    WorkerReported: (_T.REPORT_GOOD, _T.REPORT_BAD, *_BLOCK_ENDS, _B.INVALIDATE, *_ENDS),
    ReportRejected: (),
    TransferLost: (_T.LOSE, _B.LOSE, _L.LOSE, _L.END_READ, _R.END_LOAD, _R.WAKE),
    BlocksTouched: (_B.TOUCH,),
    FlushRequested: (),
    CacheReset: (_T.CANCEL, _T.ABANDON, _B.CANCEL, _B.END_COPY_BAD, _B.INVALIDATE, *_ENDS),
    StepEnded: (),
    Ticked: (_R.WAKE,),
    BlocksOffered: (),
    OffersCounted: (),
    BlocksRewritten: (),
}
"""Which triggers each kind may pull, on blocks, transfers, leases and requests. Where a kind has several
for one machine, its fields or the transfer that it names decide: good or bad, store or load."""

KINDS = tuple(TRIGGERS)
"""Every kind of event, in the order of its tag."""
