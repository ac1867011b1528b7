"""Wrong versions of the disk tier: the copies between host and disk, its files, its recovery and its era."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the disk tier"
_TIER = "kvsm.tiers.disk_tier:DiskTier"

TIERING = (
    Mutant(
        id="M62",
        area=AREA,
        title="the disk does not hear that host slots were written again",
        story="The disk's core still thinks that a host slot holds what was loaded there before a "
        "reset, so a new block of the same key is never stored on the disk.",
        shows_when="A key comes from the disk into a slot, the cache is reset, and the key is stored in "
        "that slot again.",
        breaks=Property.STORED_ONCE,
        edits=(Edit(f"{_TIER}._store_some", "disk.rewrite(slots)"),),
    ),
    Mutant(
        id="M63",
        area=AREA,
        title="the places of a lost copy are used again",
        story="A copy that a worker never reported gives its places back although they are retired, "
        "and a later copy to the disk raises.",
        shows_when="A copy to the disk is lost, and then as many blocks are stored as there are places.",
        breaks=Property.LEGAL_CALLS,
        edits=(Edit(f"{_TIER}.lose", "self._end(copy._replace(places=()))", "self._end(copy)"),),
    ),
    Mutant(
        id="M64",
        area=AREA,
        title="a reset that cannot be made durable leaves the disk matchable",
        story="The era is written before the disk's core is reset, so if the disk is full the reset "
        "raises and old blocks are served on.",
        shows_when="The file of the era cannot be written during a reset.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_TIER}.reset",
                """
                self.disk.reset(weights)
                self._make_durable()
                """,
                """
                self._make_durable()
                self.disk.reset(weights)
                """,
            ),
        ),
    ),
    Mutant(
        id="M65",
        area=AREA,
        title="a good store does not end the row of failures",
        story="A tier that has failed three times in its life takes one store a pause from then on.",
        shows_when="Three stores fail one after another, then the disk works again.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.tiers.disk.health:HealthWatch.succeeded",
                'self._failures, self._error = 0, ""',
                'self._error = ""',
            ),
        ),
    ),
    Mutant(
        id="M66",
        area=AREA,
        title="two ranks may serve one key from two stores",
        story="Recovery does not compare the generations of the ranks, so one rank serves bytes that "
        "other weights have computed.",
        shows_when="A reset for new weights, the key is stored into the same slot again, and the process "
        "is killed when one of two ranks has written it.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.tiers.disk.recovery:decide",
                """
                everywhere &= one.eras == first.eras
                everywhere &= (one.lives == first.lives) & (one.numbers == first.numbers)
                """,
            ),
        ),
    ),
    Mutant(
        id="M67",
        area=AREA,
        title="a store does not note which flushes had failed when it began",
        story="A store whose writes an earlier flush has lost is called good, because its own flush "
        "succeeds.",
        shows_when="A flush fails while another store is being written; then the power fails.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                "kvsm.tiers.disk.disk_engine:DiskCopyEngine._lost",
                "begun = self._begun.get(transfer.job.transfer, self._failed_flushes)",
                "begun = self._failed_flushes",
            ),
        ),
    ),
    Mutant(
        id="M68",
        area=AREA,
        title="a fetch loads the first keys that were asked for",
        story="If the host has some of the keys already, the others get the bytes of their neighbours.",
        shows_when="The host has the first block of a prompt, and the disk has all of it.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_TIER}._bring",
                "found = [disk.ledger.index[key] for key in record.keys]",
                "found = [disk.ledger.index[key] for key in hit.keys if self.has(key)][: len(record.keys)]",
            ),
        ),
    ),
    Mutant(
        id="M69",
        area=AREA,
        title="an era has the id of the one before",
        story="A reset begins an era with the id of the last one, so what this process had stored is served "
        "again after a restart.",
        shows_when="A process stores a block on disk, resets its cache, and is started again.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.tiers.disk.era:OpenEra.begin",
                "begun = DiskEra(weights, SlotGeneration(self._life, last))",
                "begun = DiskEra(weights, SlotGeneration(self._life, last), self._era.id)",
            ),
        ),
    ),
    Mutant(
        id="M70",
        area=AREA,
        title="ranks go on with lives of their own",
        story="Ranks whose files were opened a different number of times write different generations, "
        "so the next process keeps nothing.",
        shows_when="A process is killed between the opening of its first and its second file; the next one "
        "stores blocks and is started again.",
        breaks=Property.STORED_ONCE,
        edits=(Edit("kvsm.tiers.disk.recovery:take", "file.raise_life(recovered.life)"),),
    ),
    Mutant(
        id="M71",
        area=AREA,
        title="the new weights are not noted in the era",
        story="A reset for new weights writes the old ones into the era, so a process that starts "
        "with the old weights serves what the new ones have computed.",
        shows_when="A reset to other weights, blocks are stored, and the next process starts with the "
        "first weights again.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.tiers.disk.era:OpenEra.begin",
                "weights = self._era.weights if weights is None else weights",
                "weights = self._era.weights",
            ),
        ),
    ),
    Mutant(
        id="M72",
        area=AREA,
        title="what waits for the disk is taken as it is",
        story="It is not asked whether the host still has what waits for the disk: the call raises.",
        shows_when="A block is stored on the host and evicted again before its copy to the disk is planned.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_TIER}._take_waiting",
                """
                if key in index and readable(index[key]):
                    keys.append(key)
                else:
                    self._note_not_stored(1)
                """,
                "keys.append(key)",
            ),
        ),
    ),
    Mutant(
        id="M140",
        area=AREA,
        title="a request waits for a copy to the disk",
        story="A copy to the disk is a load in the host's ledger, so a request waits for its end as for a "
        "load of another request, although the host can read all blocks of the prompt. kvsm once did this.",
        shows_when="A prompt is asked for again while its blocks are written to the disk.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                "kvsm.core.offloader.matching:in_flight",
                "is_load = transfer.direction is LOAD and not ledger.requests[transfer.owners[0][0]].target",
                "is_load = transfer.direction is LOAD",
            ),
        ),
    ),
    Mutant(
        id="M141",
        area=AREA,
        title="a request is kept waiting by blocks that it holds itself",
        story="The blocks that were fetched for a request count against it when it needs more of them, so a "
        "long prompt is served the shorter hit. kvsm once did this.",
        shows_when="The device loses the beginning of a prompt whose rest was fetched, and the whole prompt "
        "needs more than half of the host.",
        breaks=Property.STORED_SO_SERVED,
        edits=(Edit("kvsm.tiers.fetches:Fetches._held", "elif name != but_of:", "else:"),),
    ),
    Mutant(
        id="M142",
        area=AREA,
        title="next victims are written to a small disk forever",
        story="With write-back each next victim that the disk lacks is written to it, and evicts another "
        "one. An idle engine never stops. kvsm once did this.",
        shows_when="Write-back, and a disk that has no room for a quarter of the host.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_TIER}._queue_next_victims",
                "self._queue([key for key in keys if key not in below and key not in self._written])",
                "self._queue([key for key in keys if key not in below])",
            ),
        ),
    ),
    Mutant(
        id="M143",
        area=AREA,
        title="a hit that is partly on the host is not fetched",
        story="The scheduler searches for a hit on the disk alone, so a prompt whose first blocks are on the "
        "host, but not on the disk, is served no block from the disk.",
        shows_when="The disk has evicted the first block of a prompt, and the host has only this one.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler._fetch",
                "end = lookup.longest_hit(limit, lambda key: key in index or below.has(key))",
                "end = lookup.longest_hit(limit, below.has)",
            ),
        ),
    ),
    Mutant(
        id="M144",
        area=AREA,
        title="only the chunks of the first group are fetched",
        story="The number of keys to fetch is computed from the tokens of the hit, as if there were one "
        "group of full attention. The chunks of a window stay on the disk, and the request waits in vain.",
        shows_when="Two groups, and the disk has a prompt that the host has lost.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler._fetch",
                "keys, parents = lookup.needed_keys(end), tuple(lookup.parents(end).items())",
                """
                chunks = (end - tracked.local) // self._chunk_tokens or 1
                keys, parents = lookup.needed_keys(end)[:chunks], ((0, b""),)
                """,
            ),
        ),
    ),
)
