"""The ledger: all state of the offload core, and the one function that changes it.

`Ledger.apply(event)` is a fold. It checks the whole event first, and raises with nothing changed if the
event is illegal; then it makes all changes of the event. No other code writes to a ledger, no decision is
made here, and no clock is read. So `fold(log) == live state` by construction (S10).

Each kind of event has one handler, which `ledger.HANDLERS` finds by its name. The life of one block, from
allocate to evict:

1. `store_planned` (stores.py)          a free slot is ALLOCATED, its key enters the index but cannot be
                                        read yet, and the device block is leased for reading;
2. `transfers_submitted` (transfers.py) STORING: from now on a copy may touch the slot;
3. `worker_reported` (transfers.py)     the last worker's report ends the transfer: the block is STORED and
                                        readable, it joins the eviction order, and the lease ends;
4. `hit_matched` (requests.py)          a match pins the block, and it leaves the eviction order;
5. `load_planned` (loads.py)            the pin becomes a reader: LOADING, and the target device block is
                                        leased for writing;
6. `worker_reported` (transfers.py)     the last reader leaves: STORED again, youngest in the eviction order;
7. `blocks_evicted` (stores.py)         the policy chose the block: its key leaves the index (index.py), and
                                        its slot is free again.

changes.py tells readers of a log what an event has changed.

order.py decides which blocks are in the eviction order; cache.py has resets and touches, restart.py the next
process, state.py the state, records.py its records.

The index (key -> slot) has every block that is ALLOCATED, STORING, STORED or LOADING. The state of the block
says whether it can be read. An idle slot is in exactly one list: in the free queue if it is FREE or EVICTED,
in the policy's order if it is STORED without a pin or a copy. Copies to another tier do not count: they
neither take a block out of the order nor move it. After a reset both lists are as at the start: the order is
empty, and the free slots are sorted by number.
"""

from kvsm.core.ledger.changes import Changes, follow
from kvsm.core.ledger.index import index_made_again, indexed_slots, readable_keys
from kvsm.core.ledger.key_index import DictIndex
from kvsm.core.ledger.ledger import HANDLERS, Ledger, NativeLedger
from kvsm.core.ledger.records import OfferHistory, Provenance, RequestRecord, TransferRecord
from kvsm.core.ledger.restart import ALIKE, why_not_alike
from kvsm.core.ledger.state import CacheListener

__all__ = [
    "ALIKE",
    "HANDLERS",
    "CacheListener",
    "Changes",
    "DictIndex",
    "Ledger",
    "NativeLedger",
    "OfferHistory",
    "Provenance",
    "RequestRecord",
    "TransferRecord",
    "follow",
    "index_made_again",
    "indexed_slots",
    "readable_keys",
    "why_not_alike",
]
