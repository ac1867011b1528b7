"""Device blocks under copies: who holds them, and what the engine must wait for.

If the engine counts references to its blocks, each copy holds one to every block that it touches, and the
engine waits for nothing. If it does not, it is told which copies to wait for before it writes a block, and
when the blocks of a finished request may go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from kvsm.core.ledger.canonical import NOBODY, Dropped, declared, filled
from kvsm.core.offloader import Ended, Offloader
from kvsm.core.plan import TransferJob
from kvsm.core.scheduler.protocols import DevicePool
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.states.transfer import TransferState


@declared
class DeviceBlocksState(msgspec.Struct):
    """What is remembered of device blocks if the engine counts no references; else it stays empty."""

    changed_hands: Annotated[
        list[int],
        filled(lambda one, names: sorted({names.blocks.get(block, NOBODY) for block in one.changed_hands})),
    ]
    """Blocks that lost or found an owner since the last step. The order is not looked at."""
    kept: Annotated[
        dict[str, list[int]],
        Dropped("the engine keeps the same blocks, in the same order, until it is told"),
    ]
    """Finished request -> its blocks, until no copy touches one. After a lost copy that is never."""


class DeviceBlocks:
    """The engine's device blocks, as far as copies touch them.

    pool: counts references; None if the engine counts none.
    """

    def __init__(self, offloader: Offloader, null_block: int) -> None:
        self.pool: DevicePool | None = None
        self.state = DeviceBlocksState([], {})
        self._offloader, self._null_block = offloader, null_block

    def hold(self, job: TransferJob) -> None:
        """The copy holds a reference to each block that it touches."""
        if self.pool is not None:
            self.pool.touch(listed(self._offloader.ledger.transfers[job.transfer].device_blocks))

    def release(self, ended: Ended) -> None:
        """The copy is over: its references go. A lost load may still write, and keeps its references."""
        load = ended.direction is Direction.LOAD
        if self.pool is not None and not (load and ended.lost):
            # The last block first: the end of a prefix is to be evicted before its beginning.
            self.pool.free_blocks(listed(ended.device_blocks)[::-1])

    def rewrite(self, blocks: Sequence[int]) -> None:
        """The engine will write these blocks."""
        self._offloader.rewrite(blocks)
        if self.pool is None:
            self.state.changed_hands += blocks

    def take_back(self, tables: Iterable[Sequence[int]]) -> None:
        """A request lost these blocks. The engine may give them to others in this very step."""
        if self.pool is None:
            self.state.changed_hands += [block for table in tables for block in table]

    def take_awaited(self) -> list[int]:
        """Transfers that the engine must wait for, because they touch blocks that changed hands."""
        blocks, self.state.changed_hands = self.state.changed_hands, []
        return self._touching(blocks) if blocks else []

    def _touching(self, blocks: Sequence[int]) -> list[int]:
        """The transfers that touch one of these blocks.

        A store that leaves with this step's plan is not among them: it reads blocks that a finished request
        keeps. A load is: a request may be preempted in the step that admitted it.
        """
        wanted = {block for block in blocks if block != self._null_block}
        return [
            transfer.id
            for transfer in self._offloader.ledger.transfers.values()
            if (transfer.state is not TransferState.PLANNED or transfer.direction is Direction.LOAD)
            and not wanted.isdisjoint(listed(transfer.device_blocks))
        ]

    def keep(self, request: str, tables: Iterable[Sequence[int]]) -> bool:
        """Whether the engine must keep the blocks of a finished request, because a copy touches one."""
        if self.pool is not None:
            return False
        blocks = [block for table in tables for block in table if block != self._null_block]
        if not blocks or not self._offloader.leased(blocks):
            return False
        # An engine may use a name again before it hears that the earlier request's blocks may go.
        self.state.kept.setdefault(request, []).extend(blocks)
        return True

    def take_sent(self) -> tuple[str, ...]:
        """Finished requests whose blocks may go now, each named once."""
        kept = self.state.kept
        if not kept:
            return ()
        sent = tuple([name for name, blocks in kept.items() if not self._offloader.leased(blocks)])
        for name in sent:
            del kept[name]
        return sent

    def has_sent(self) -> bool:
        """Whether `take_sent` would name a request. Blocks of a lost copy are never named: no one waits."""
        return any(not self._offloader.leased(blocks) for blocks in self.state.kept.values())
