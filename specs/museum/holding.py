"""Who holds memory: bugs in references, slots and their release."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import BLOCK_ROWS, Edit, Exhibit

HOLDING = (
    Exhibit(
        id="B04",
        source="vllm#29870",
        title="a preempted request's blocks are rewritten under their store",
        story="A request's blocks were queued for a store when it was preempted. The blocks were given to"
        " another request, which computed into them, and the copy saved the new tenant's bytes under the old"
        " keys. An engine without references has to wait for such copies; the bug waits for none.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.scheduler.device_blocks:DeviceBlocks.take_awaited",
                "return self._touching(blocks) if blocks else []",
                "return []",
            ),
        ),
    ),
    Exhibit(
        id="B05",
        source="vllm#32255",
        title="an aborted request's load lands in somebody else's block",
        story="A load was on its way when its request was aborted. The blocks were freed with the request and"
        " given out again, and the copy landed in another request's cache. Here a load holds a reference to"
        " each of its blocks; the bug holds none.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.scheduler.scheduler:OffloadScheduler.update_state_after_alloc",
                "self._add_to_plan(job)",
                "self.state.planned.append(job)",
            ),
            Edit(
                "kvsm.scheduler.device_blocks:DeviceBlocks.release",
                "if self.pool is not None and not (load and ended.lost):",
                "if self.pool is not None and not load:",
            ),
        ),
    ),
    Exhibit(
        id="B29",
        source="dynamo PR 4171",
        title="the ends of a finished request's stores find nobody",
        story="A request's slot was dropped while three of its offloads were pending. When they completed,"
        " nobody was there to take note, and the device blocks that they held were never given back.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.scheduler.scheduler:OffloadScheduler._note_transfer_end",
                "self.device_blocks.release(ended)",
                """
                if ended.direction is Direction.LOAD or self.state.tracked:
                    self.device_blocks.release(ended)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B35",
        source="sglang PR 28468",
        title="a host slot is evicted while a copy uses it",
        story="The eviction order of the host pool did not know of transfers under way. A slot could be"
        " chosen as a victim while a copy to the device was still reading it.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.ledger.requests:hit_matched",
                """
                if len(busy):
                    ledger.policy.busy(busy)
                """,
            ),
        ),
        stop="EVICT is illegal in",
        without_stop=(
            Edit(
                BLOCK_ROWS,
                'Row((STORED,), EVICT, EVICTED, "its slot is wanted", {"pins": (0, 0)}),',
                'Row(_READABLE, EVICT, EVICTED, "its slot is wanted", {}, {"pins": VOID, "copies": VOID}),',
            ),
        ),
    ),
    Exhibit(
        id="B36",
        source="TensorRT-LLM PR 9056",
        title="two stores go to one host block",
        story="Two blocks were offloaded to the same host block, and the second copy did not wait for the"
        " first. Which bytes it held in the end was chance.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.offloader.storing:_plan_store",
                "packed, blocks = pack(core.ledger.free.first(len(keys))), pack(sources)",
                "packed, blocks = pack(tuple(range(len(keys)))), pack(sources)",
            ),
        ),
        stop="ALLOCATE is illegal in",
        without_stop=(
            Edit(
                BLOCK_ROWS,
                'Row((FREE, EVICTED), ALLOCATE, ALLOCATED, "a store is planned"),',
                'Row(tuple(BlockState), ALLOCATE, ALLOCATED, "a store is planned",'
                ' {}, {"pins": VOID, "copies": VOID}),',
            ),
        ),
    ),
    Exhibit(
        id="B40",
        source="kvcached#364",
        title="what a refused plan took is not given back",
        story="An allocation failed half way. What it had taken by then was not given back, and the pool was"
        " smaller from then on. Here an event is checked as a whole before anything changes; the bug takes"
        " the blocks before it has looked at the leases.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                "kvsm.ledger.loads:load_planned",
                """
                leased = ledger.leases.check(device_blocks, lease_machine.BEGIN_WRITE, seq)
                ledger.blocks.commit(slots, new)
                """,
                """
                ledger.blocks.commit(slots, new)
                leased = ledger.leases.check(device_blocks, lease_machine.BEGIN_WRITE, seq)
                """,
            ),
            Edit(
                "kvsm.ledger.stores:store_planned",
                """
                leased = ledger.leases.check(device_blocks, lease_machine.BEGIN_READ, seq)
                index.enter(ledger, seq, keys, slots)
                ledger.blocks.commit(slots, new)
                """,
                """
                ledger.blocks.commit(slots, new)
                leased = ledger.leases.check(device_blocks, lease_machine.BEGIN_READ, seq)
                index.enter(ledger, seq, keys, slots)
                """,
            ),
        ),
    ),
)
