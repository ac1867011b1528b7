"""Protect device blocks while copies touch them.

If the engine counts references to its blocks, each copy holds a reference to every block that it touches, and
the engine never waits. Otherwise kvsm returns the transfers that the engine must wait for before it writes a
block, and the finished requests whose blocks may be freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from kvsm.core.ledger.canonical import NOBODY, Dropped, declared, filled
from kvsm.core.offloader import Ended, Offloader
from kvsm.core.plan import TransferJob
from kvsm.core.scheduler.protocols import DevicePool
from kvsm.events import LOAD, Direction
from kvsm.ids import listed
from kvsm.states.transfer import TransferState


@declared
class DeviceBlocksState(msgspec.Struct):
    """The state of device blocks if the engine counts no references; otherwise it stays empty."""

    changed_hands: Annotated[
        list[int],
        filled(lambda one, names: sorted({names.blocks.get(block, NOBODY) for block in one.changed_hands})),
    ]
    """Blocks that lost or got an owner since the last step. Their order has no meaning."""
    kept: Annotated[
        dict[str, list[int]],
        Dropped("the engine keeps the same blocks, in the same order, until it is told"),
    ]
    """Finished request -> its blocks, until no copy touches any of them. After a lost copy: forever."""
    lost_loads: Annotated[
        dict[int, int],
        filled(
            lambda one, names: sorted(
                (names.blocks.get(block, NOBODY), names.transfers.get(load, NOBODY))
                for block, load in one.lost_loads.items()
            )
        ),
    ]
    """Device block -> the lost load that may still write it. A block is retired once, so it has one."""


class DeviceBlocks:
    """The engine's device blocks that copies touch.

    pool: counts references; None if the engine counts none.
    """

    def __init__(self, offloader: Offloader, null_block: int) -> None:
        self.pool: DevicePool | None = None
        self.state = DeviceBlocksState([], {}, {})
        self._offloader, self._null_block = offloader, null_block

    def hold(self, job: TransferJob) -> None:
        """Take a reference to each block that this copy touches."""
        if self.pool is not None:
            self.pool.touch(listed(self._offloader.ledger.transfers[job.transfer].device_blocks))

    def release(self, ended: Ended) -> None:
        """Release the references of a copy that ended. A lost load may still write, so it keeps them."""
        load = ended.direction is LOAD
        if self.pool is not None and not (load and ended.lost):
            # Last block first, so that the end of a prefix is evicted before its beginning.
            self.pool.free_blocks(listed(ended.device_blocks)[::-1])
        if self.pool is None and load and ended.lost:
            self.state.lost_loads.update(dict.fromkeys(listed(ended.device_blocks), ended.transfer))

    def rewrite(self, blocks: Sequence[int]) -> None:
        """Note that the engine will write these blocks."""
        self._offloader.rewrite(blocks)
        if self.pool is None:
            self.state.changed_hands += blocks

    def take_back(self, tables: Iterable[Sequence[int]]) -> None:
        """Note that a request lost these blocks. The engine may reassign them in the same step."""
        if self.pool is None:
            self.state.changed_hands += [block for table in tables for block in table]

    def take_awaited(self) -> list[int]:
        """Return the transfers to wait for: they touch blocks that changed owners since the last call."""
        blocks, self.state.changed_hands = self.state.changed_hands, []
        return self._touching(blocks) if blocks else []

    def _touching(self, blocks: Sequence[int]) -> list[int]:
        """Return the transfers that touch any of these blocks, and the lost loads that may still write one.

        Stores of this step's plan are left out: they read blocks that a finished request keeps. Its loads are
        included: a request may be preempted in the step that admitted it. The engine frees the blocks of a
        preempted request before it can hear that the load was lost.
        """
        wanted = {block for block in blocks if block != self._null_block}
        lost = self.state.lost_loads
        return [
            transfer.id
            for transfer in self._offloader.ledger.transfers.values()
            if (transfer.state is not TransferState.PLANNED or transfer.direction is Direction.LOAD)
            and not wanted.isdisjoint(listed(transfer.device_blocks))
        ] + sorted({lost[block] for block in wanted & lost.keys()})

    def keep(self, request: str, tables: Iterable[Sequence[int]]) -> bool:
        """Whether the engine must keep the blocks of a finished request, because a copy touches one."""
        if self.pool is not None:
            return False
        blocks = [block for table in tables for block in table if block != self._null_block]
        if not blocks or not self._offloader.leased(blocks):
            return False
        # An engine may reuse a name before `take_sent` has returned the earlier request.
        self.state.kept.setdefault(request, []).extend(blocks)
        return True

    def take_sent(self) -> tuple[str, ...]:
        """Return the finished requests whose blocks may be freed now, each once."""
        kept = self.state.kept
        if not kept:
            return ()
        sent = tuple([name for name, blocks in kept.items() if not self._offloader.leased(blocks)])
        for name in sent:
            del kept[name]
        return sent

    def has_sent(self) -> bool:
        """Whether `take_sent` would return a request. It never does for blocks that a lost copy touches."""
        return any(not self._offloader.leased(blocks) for blocks in self.state.kept.values())
