"""Holds on memory: bugs in references, slots and their release."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import BLOCK_ROWS, Edit, Exhibit

HOLDING = (
    Exhibit(
        id="B04",
        source="vllm#29870",
        title="a preempted request's blocks are rewritten under their store",
        story="A request was preempted while stores of its blocks were queued. The blocks were given to"
        " another request, which computed into them, and the copy saved the new bytes under the old"
        " keys. An engine without references has to wait for such copies; with the bug it does not.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.core.scheduler.device_blocks:DeviceBlocks.take_awaited",
                "return self._touching(blocks) if blocks else []",
                "return []",
            ),
        ),
    ),
    Exhibit(
        id="B05",
        source="vllm#32255",
        title="an aborted request's load lands in another request's block",
        story="A request was aborted during its load. Its blocks were freed and given to another request, and"
        " the copy landed in that request's cache. In kvsm a load holds a reference to each of its"
        " blocks; with the bug it holds none.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler.update_state_after_alloc",
                "self._add_to_plan(job)",
                "self.state.planned.append(job)",
            ),
            Edit(
                "kvsm.core.scheduler.device_blocks:DeviceBlocks.release",
                "if self.pool is not None and not (load and ended.lost):",
                "if self.pool is not None and not load:",
            ),
        ),
    ),
    Exhibit(
        id="B29",
        source="dynamo PR 4171",
        title="nothing handles the ends of a finished request's stores",
        story="A request's slot was dropped while three of its offloads were pending. Nothing handled their"
        " completions, and the device blocks that they held were never released.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler._note_transfer_end",
                "self.device_blocks.release(ended)",
                """
                if ended.direction is LOAD or self.state.tracked:
                    self.device_blocks.release(ended)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B35",
        source="sglang PR 28468",
        title="a host slot is evicted while a copy uses it",
        story="The eviction order of the host pool ignored running transfers. A slot could become a victim"
        " while a copy to the device still read it.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.core.ledger.order:leave",
                """
                if len(used):
                    ledger.policy.busy(used)
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
        " first. The host block held either one's bytes, by chance.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.core.offloader.storing:_store",
                "slots = pack(core.ledger.free.first(room))",
                "slots = pack(tuple(range(room)))",
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
        title="a refused plan keeps what it took",
        story="An allocation failed half way. The blocks that it had taken were not returned, and the pool"
        " was smaller from then on. In kvsm an event is checked as a whole before anything changes; the"
        " bug takes the blocks before it checks the leases.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                "kvsm.core.ledger.loads:load_planned",
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
                "kvsm.core.ledger.stores:store_planned",
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
