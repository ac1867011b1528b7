"""The events: every way in which the state of the offload core can change, as typed records.

An `OffloadingEvent` is one record of the log: its number (`seq`, from 1, without gaps), the engine step and
the wall time of the decision (`wall_ns`, data only: no decision reads it), and the fields of its kind. Each
kind is a class below; `Ledger.apply` defines its effect. Two tables at the end list, for each kind, which
triggers it may pull (`TRIGGERS`) and what it changes besides the things that its fields name (`REACHES`).
docs/extending.md describes how to add a kind.

On disk an event is a msgpack array `[tag, seq, step, wall_ns, *fields]`. New fields come at the end, with a
default, so that every older record of the same `SCHEMA_VERSION` can be read. `kvsm.core.log.records` reads
older versions.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from operator import index
from typing import SupportsIndex

import msgspec

from kvsm.errors import ConfigError
from kvsm.identity import KeptPools
from kvsm.ids import Id, Ids
from kvsm.states import BlockTrigger, LeaseTrigger, RequestTrigger, TransferTrigger
from kvsm.states.block import BLOCK
from kvsm.states.transfer import TRANSFER
from kvsm.system.field_types import check_types

SCHEMA_VERSION = 3
"""Version of the log format that this kvsm writes. docs/extending.md says what raises it."""

ERROR_CHARACTERS_MAX = 400
"""The most characters of an error in `WorkerReported`. A longer error is cut off."""


class Direction(IntEnum):
    """Which way a transfer copies. STORE: device to host. LOAD: host to device."""

    STORE = 0
    LOAD = 1


# Also names of this module: `LOAD` takes 2 ns to look up, `Direction.LOAD` 50.
STORE, LOAD = Direction


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a core, fixed before its first event. The log stores it.

    host_blocks: slots of the host pool.
    device_blocks: blocks of the device pool.
    block_bytes: bytes of one device block on one worker, for metrics.
    workers: ranks that must report each transfer.
    blocks_per_chunk: device blocks that one slot holds.
    policy: the eviction policy, a name in `kvsm.core.policies.POLICIES` or `package.module:Class`.
    max_live_transfers: transfers that may be planned or in flight at once.
    defer_ticks: longest wait of a request for a block in flight. 0: never wait, compute the block again.
    transfer_ticks: ticks in flight after which a transfer counts as lost. 0: never.
    store_threshold: the number of offers of a key until it is stored.
    block_tokens: tokens of one device block, the unit in which `HitMatched` counts a prompt. If KV cache
        groups have blocks of different sizes: their least common multiple. 0: unknown.
    load_only_if_faster: whether a hit is declined if the measured times (`TimesMeasured`) say that its
        tokens are computed at least as fast as its blocks are loaded.
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
    block_tokens: int = 0
    load_only_if_faster: bool = False

    @property
    def counted_keys(self) -> int:
        """The number of keys whose offers are counted, for `store_threshold`, while they are not stored."""
        return 2 * self.host_blocks

    def __post_init__(self) -> None:
        check_types(self)
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
            ("block_tokens", 0, 1 << 31),
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
    NOT_ADMITTED = "not admitted: would evict what is wanted sooner"


class RejectReason(str, Enum):
    """Why a worker's report changed nothing."""

    __str__ = str.__str__

    UNKNOWN = "no such transfer was planned"
    STALE = "no live transfer has this id"
    NOT_SUBMITTED = "transfer was not submitted"
    DUPLICATE = "worker has reported before"
    WORKER = "no such worker"
    DIRECTION = "transfer goes the other way"


class HintOutcome(str, Enum):
    """What became of a client's hint. The first three answer the hint; the others say how its lease ended."""

    __str__ = str.__str__

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    """The lease has fewer blocks than the hint asked for."""
    REFUSED = "refused"
    EXPIRED = "expired"
    RELEASED = "released"
    """The session gave its lease up."""
    REPLACED = "replaced"
    """The session took another lease."""
    CROWDED_OUT = "crowded out"
    """Newer leases needed its part of the share."""
    REVOKED = "revoked"
    """By a reset or a shutdown, or because all its blocks were lost."""


class HintReason(str, Enum):
    """Why a hint was refused or clipped; `NONE` for all other outcomes."""

    __str__ = str.__str__

    NONE = ""
    NOT_UNDERSTOOD = "it cannot be read"
    NO_SHARE = "leases have no share of this host"
    SHARE = "one session may hold no more"
    NOT_ON_HOST = "the other blocks are not on the host"
    NOTHING_ON_HOST = "none of its blocks is on the host"
    TOO_MANY_HOLDS = "a block is held too often"
    NO_LEASE = "the session has no lease"
    NOT_SUPPORTED = "kvsm does not offload or prefetch by a hint"


Owners = tuple[tuple[str, Id], ...]
"""(request, number of its keys) pairs, in the order of the event's keys. Empty if no request owns them."""

Parents = tuple[tuple[Id, Id | None], ...]
"""(place, slot) pairs, sorted by place: in its prompt, the block at `place` in the event follows the block in
`slot`, and not the block at the place before. `slot` may be another slot of the event. slot None: the host
does not have the preceding block. The block's own slot: the block begins a prompt. Without an entry for place
0, the first block begins a prompt, or its parent is unknown."""

Offer = tuple[str, tuple[Id, ...], tuple[Id, ...]]
"""(request, settled, offered). `settled` and `offered` have a number of blocks for each KV cache group."""


class OffloadingEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all kinds.

    seq: event number.
    step: engine step.
    wall_ns: Unix time (ns), below 0 before 1970.
    """

    seq: Id
    step: Id
    wall_ns: int

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self).__name__


def recorded_ns(now: SupportsIndex) -> int:
    """Convert the time of a clock to what a log can hold: nanoseconds since 1970, from 0 to 2**63 - 1.

    A time outside this range is replaced by the nearest bound, since no decision reads it. Raises
    `ConfigError` for a time that is no integer.
    """
    try:
        nanoseconds = int(index(now))
    except TypeError:
        message = f"the clock says {now!r}; it must give Unix time in whole nanoseconds (int)"
        raise ConfigError(message) from None
    return min(max(nanoseconds, 0), (1 << 63) - 1)


class LogOpened(OffloadingEvent, frozen=True, array_like=True, tag=1):
    """First event of a core: an empty pool under this configuration."""

    config: OffloadConfig
    machines: str
    """Digest of the machine tables that wrote the log."""
    schema: int = SCHEMA_VERSION
    kept: KeptPools | None = None
    """The host pools that outlive this process. None: what is stored ends with the process."""
    weights: str = ""
    """Version of the model weights under which blocks are computed from here on."""
    cold: tuple[str, ...] = ()
    """Why this process did not take over the blocks of the process before it, a line each. Empty: there was
    none, or the start does not say."""


class RequestArrived(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=2):
    """A request is registered.

    target: empty for a request of the engine. Otherwise the request stands for copies to or from another
        tier, named here: "disk", the tier below. It matches and loads blocks to copy them there; or it loads
        nothing, and pins blocks while others are copied from there.
    """

    request: str
    target: str = ""


class RequestPreempted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=3):
    """The engine took the request's device blocks. Its pins are released and its cursors restart. Its
    transfers in flight keep their leases."""

    request: str


class RequestFinished(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=4):
    """The request finished or was aborted. It is RELEASED now, or when its load ends. Its stores
    continue, because other requests may want the blocks.

    hand_over: if it held blocks for another engine, how the hand-over ended
        (`kvsm.tiers.hand_over.leases.LeaseEnd`): "taken", "not needed" because the other engine had the
        blocks, or why no engine took them. Empty: a request of the engine, or a copy to the disk.
    """

    request: str
    aborted: bool = False
    hand_over: str = ""


class HitMatched(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=5):
    """The result of a lookup: the host serves `slots`, in prefix order, and each is pinned. No slots: a miss.
    A request may be looked up many times before it is admitted; `RequestAdmitted` has the result that counts.

    missed: the first key that was not readable, where the hit ends. None if all keys were readable, none was
        looked up, or the hit was declined (`SlowHitFound`).
    asked: full blocks of the request's tokens: of its prompt, and after a preemption of its output too. If
        `on_device` is None, only the blocks that were looked up on the host.
    on_device: how many of these blocks the device had.
    on_host: how many of these blocks the host serves, after the ones on the device.

    A request with slots for which no block was looked up loads none. It pins them for another engine, which
    copies them out of the host pool, or as the lease of an agent's session (`HintAnswered`).

    The last three fields count device blocks of `OffloadConfig.block_tokens` tokens, once for all KV cache
    groups. None: the caller gave no number.
    """

    request: str
    slots: Ids
    missed: bytes | None = None
    asked: Id | None = None
    on_device: Id | None = None
    on_host: Id | None = None


class HitReleased(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=6):
    """The pins of the request's match are released without a load."""

    request: str


class RequestDeferred(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=7):
    """The request waits for a block that `transfer` copies: until the transfer ends, or tick `until`."""

    request: str
    transfer: Id
    until: Id


class KeysRecalled(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=8):
    """Keys offered for a store that the eviction policy remembers evicting (ghost hits)."""

    keys: tuple[bytes, ...]


class BlocksEvicted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=9):
    """The policy chose `slots` to make room for the store `transfer`, which the next event plans. The slots
    `moved` only change place in the eviction order."""

    slots: Ids
    moved: Ids
    transfer: Id


class StorePlanned(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=10):
    """A transfer will copy the i-th chunk of `device_blocks` to slots[i], which will then hold keys[i].

    The number of this event is the transfer's id and the generation of the blocks that it allocates: one
    number, never reused, names all three. owners: for readers of the log. Blocks stored from the engine's
    free queue have no owner.

    source: for readers of the log, where the bytes come from if not from the device: "engine p-1" for the
        host pool of that engine. Then the store names no device blocks. Empty: from `device_blocks`.
    parents: the blocks before these in their prompts (`Parents`). A block is evicted before its parent.
    """

    owners: Owners
    keys: tuple[bytes, ...]
    slots: Ids
    device_blocks: Ids
    source: str = ""
    parents: Parents = ()


class StoreSkipped(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=11):
    """Offered blocks that were not stored, and why. The engine may offer them again."""

    owners: Owners
    keys: tuple[bytes, ...]
    reason: SkipReason


class LoadPlanned(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=12):
    """A transfer will copy slots[i], the first pins of the request's match, to the i-th chunk of
    `device_blocks`. The event's number is the transfer's id. Pins beyond those loaded are released.

    voided: a pinned block was invalidated since the match. The plan is then empty, and the load has failed.
    parts: which device blocks of the chunks are loaded; empty if all are. Part p is place
        p % blocks_per_chunk of slots[p // blocks_per_chunk], and goes to the device block at its index.
    target: for readers of the log, where the bytes go if not to the device: "disk", the tier below. Then
        `device_blocks` are placeholders. Empty: to `device_blocks`.
    """

    request: str
    slots: Ids
    device_blocks: Ids
    voided: bool = False
    parts: Ids = ()
    target: str = ""


class TransfersSubmitted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=13):
    """These plans leave for the workers. From here on a copy may touch their memory."""

    transfers: tuple[Id, ...]


class TransferCancelled(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=14):
    """The plan is cancelled before it leaves for the workers."""

    transfer: Id


class WorkerReported(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=15):
    """Worker `worker` is done with its shard. The last worker's report ends the transfer in this event: a
    good store is published, a failed store gives its slots back, a failed load voids what it read.

    error: why the copy failed, as reported (at most `ERROR_CHARACTERS_MAX` characters). Empty if the copy is
        good, or if no reason was reported.
    queued_us: time from the submission to the worker to the start of its copy (us). None: not reported.
    copied_us: time from the first byte of its copy to the last (us). None: not reported.

    Both are measured by the worker's clock, which may differ from the clock of `wall_ns`. The rest of the
    time from `TransfersSubmitted` to this event is spent on the way to the worker and back, and until a step
    noticed the end.
    """

    transfer: Id
    worker: Id
    good: bool
    error: str = ""
    queued_us: Id | None = None
    copied_us: Id | None = None


class ReportRejected(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=16):
    """A report that changes nothing, and why."""

    transfer: int
    worker: int
    good: bool
    reason: RejectReason


class TransferLost(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=17):
    """A worker will never report. The memory that its copy may still write is retired."""

    transfer: Id


class BlocksTouched(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=18):
    """Blocks are used without a load, because the device has them too. They move in the eviction order.

    parents: the blocks before these in their prompts (`Parents`). A block is evicted before its parent.
    """

    slots: Ids
    parents: Parents = ()


class FlushRequested(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=19):
    """The engine will reuse memory or stop stepping: the workers wait for these transfers."""

    transfers: tuple[Id, ...]


class CacheReset(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=20):
    """Nothing stored before may match afterwards. Plans are cancelled, copies in flight abandoned.

    weights: version of the weights that compute what is stored from here on. None: unchanged.
    """

    epoch: Id
    weights: str | None = None


class StepEnded(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=21):
    """The end of an engine step in which something was decided."""


class Ticked(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=22):
    """The clock of the core advances. Ticks bound all waits; `tick` counts from 1 without gaps."""

    tick: Id


class BlocksOffered(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=23):
    """How far the blocks of these requests were offered for a store, by KV cache group. Every block before
    `settled` is stored, being stored, or will not be stored. Every block before `offered` was offered at
    least once. `settled` goes back to a block whose store failed."""

    offers: tuple[Offer, ...]


class OffersCounted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=24):
    """These keys were offered once more. A key is stored from its `store_threshold`-th offer on."""

    keys: tuple[bytes, ...]


class BlocksRewritten(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=25):
    """The engine computes other content into these device blocks. What a load wrote there is gone."""

    device_blocks: Ids


class Restarted(OffloadingEvent, frozen=True, array_like=True, tag=26):
    """The process that wrote the log so far has ended, with its workers and its device pool. Another process
    continues the log, with the same host pool. Copies in flight, pins, leases and requests have ended.
    Readable blocks stay stored; all other slots can be allocated.

    life: number of this process among those that have written the log. Numbers may have gaps: a process that
        was killed at its start may have left no event.
    config: of the new process. `kvsm.core.ledger.ALIKE` names the fields that must be unchanged.
    machines: digest of the machine tables that write the log from here on.
    ended: how the last process ended, for people. Empty: it closed the log.
    """

    life: Id
    config: OffloadConfig
    machines: str
    ended: str = ""


class RequestAdmitted(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=27):
    """The engine has allocated the blocks of a request that reads the cache, with the result of its last
    lookup. Its pins, if it has any, are about to be loaded. Only this event says which blocks a request had;
    metrics, tables, `kvsm top`, `kvsm report` and `kvsm whatif` count it. A request that does not read the
    cache (vLLM's `skip_reading_prefix_cache`) has no such event.

    asked: full blocks of the request's tokens: of its prompt, and after a preemption of its output too.
    on_device: how many of these blocks the device had.
    on_host: how many of these blocks the engine takes from the host, after the ones on the device. A load
        that fails later does not change it.
    missed: the first key that was not readable, where the hit ends. None if all keys were readable, none was
        looked up, or the hit was declined (`SlowHitFound`).
    resumed: the request was admitted before, and has lost its blocks since: a preemption or a failed load.
        Figures of a run leave it out, as vLLM's prefix cache metrics leave out preempted requests.

    The counts are of device blocks of `OffloadConfig.block_tokens` tokens, once for all KV cache groups.
    None: the caller gave no number.
    """

    request: str
    asked: Id | None = None
    on_device: Id | None = None
    on_host: Id | None = None
    missed: bytes | None = None
    resumed: bool = False


class HintAnswered(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=28):
    """A client's hint (`agent_hint`) was answered when its request ended, or its lease ended.

    It changes no state: a session's lease is a request that pins the blocks, so `HitMatched` and
    `RequestFinished` of that request begin and end it.

    request: the request that brought the hint.
    session: as the client names it. Empty if the hint names none.
    lease: the request that pins the blocks. Empty if there is no lease.
    asked: how many blocks (host slots) the hint asked to keep: all that a hit of its request needs.
    leased: how many of them, counted from the first one, the lease holds, or held when it ended. Blocks that
        are still being stored count.
    ttl_ms: how long the lease may last (ms).
    why: why the lease does not hold all of them.
    """

    request: str
    session: str
    lease: str
    outcome: HintOutcome
    asked: Id = 0
    leased: Id = 0
    ttl_ms: Id = 0
    why: HintReason = HintReason.NONE


class TimesMeasured(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=29):
    """The measured times of loads and of computation have changed since the last such event. With
    `load_only_if_faster`, decisions use these times until the next one.

    start_us: time of a load that does not depend on its size (us).
    block_ns: time for each device block of a load, and for each block in flight ahead of it (ns).
    token_ns: time to compute one token of a prompt (ns).
    """

    start_us: Id
    block_ns: Id
    token_ns: Id


class SlowHitFound(OffloadingEvent, frozen=True, array_like=True, gc=False, tag=30):
    """Loading the hit of this request is expected to take at least as long as computing its tokens.

    blocks: device blocks that the load would fill.
    blocks_ahead: device blocks of the loads in flight, for which requests wait.
    tokens: tokens of the hit.
    load_us, compute_us: the expected times of the load and of the computation (us), from `TimesMeasured`.
    declined: whether the request computes the tokens. False: they are loaded nevertheless, to measure a load.
    """

    request: str
    blocks: Id
    blocks_ahead: Id
    tokens: Id
    load_us: Id
    compute_us: Id
    declined: bool


class Reach(Enum):
    """Things that an event changes although none of its fields names them. `kvsm.explain.story.concern` finds
    them."""

    PLAN = "the transfer that it plans"
    PINS = "the slots that its request's match holds"
    TRANSFERS = "what its transfers touch, whose they are, and who waits for them"
    WAITS = "the requests whose wait ends with this tick"
    CACHE = "every block and transfer, what loads brought, and all cursors"
    PROCESS = "every slot that holds something, and all device blocks, transfers and requests"


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
    Restarted: (_B.RESTART, _T.CANCEL, _T.LOSE, _L.RESTART, _R.RESTART),
    RequestAdmitted: (),
    HintAnswered: (),
    TimesMeasured: (),
    SlowHitFound: (),
}
"""Which triggers each kind may pull, on blocks, transfers, leases and requests. Where a kind has several for
one machine, its fields or its transfer decide between them: good or bad, store or load."""

KINDS = tuple(TRIGGERS)
"""Every kind of event, in the order of its tag."""

REACHES: dict[type[OffloadingEvent], tuple[Reach, ...]] = {
    LogOpened: (),
    RequestArrived: (),
    RequestPreempted: (Reach.PINS,),
    RequestFinished: (Reach.PINS,),
    HitMatched: (),
    HitReleased: (Reach.PINS,),
    RequestDeferred: (),
    KeysRecalled: (),
    BlocksEvicted: (),
    StorePlanned: (Reach.PLAN,),
    StoreSkipped: (),
    LoadPlanned: (Reach.PLAN, Reach.PINS),
    TransfersSubmitted: (Reach.TRANSFERS,),
    TransferCancelled: (Reach.TRANSFERS,),
    WorkerReported: (Reach.TRANSFERS,),
    ReportRejected: (Reach.TRANSFERS,),
    TransferLost: (Reach.TRANSFERS,),
    BlocksTouched: (),
    FlushRequested: (Reach.TRANSFERS,),
    CacheReset: (Reach.CACHE,),
    StepEnded: (),
    Ticked: (Reach.WAITS,),
    BlocksOffered: (),
    OffersCounted: (),
    BlocksRewritten: (),
    Restarted: (Reach.PROCESS,),
    RequestAdmitted: (),
    HintAnswered: (),
    TimesMeasured: (),
    SlowHitFound: (),
}
"""What each kind changes besides the things that its fields name."""
