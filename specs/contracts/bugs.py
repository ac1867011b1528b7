"""A seeded bug for every contract. With the bug in its code or table, the contract must be refuted: otherwise
it proves nothing.

A bug in a table changes, removes or adds a row, which is named by its `why`. A bug in a function replaces one
piece of the function's source.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import getsource
from textwrap import dedent
from typing import Any, NamedTuple
from unittest.mock import patch

from contracts import runs, words
from kvsm.core.scheduler.groups import KVCacheGroup
from kvsm.core.scheduler.hits import HitSearch, hit_limit
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.cuda_io import paths
from kvsm.serving.block_tables import peak_blocks
from kvsm.serving.traces import started_blocks
from kvsm.states import BLOCK, LEASE, REQUEST, TRANSFER, Machine, TransferTrigger
from kvsm.states import BlockState as Block
from kvsm.states import LeaseState as Lease
from kvsm.states import RequestState as Request
from kvsm.states import TransferState as Transfer
from kvsm.states.machine import Arc, Counter, Row


class Bug(NamedTuple):
    """A bug with which a contract must be refuted.

    what: the bug, in words.
    target: the dotted name of the replaced object.
    """

    contract: str
    what: str
    target: str
    replacement: object

    def planted(self) -> AbstractContextManager[object]:
        return patch(self.target, self.replacement)


def with_rows(machine: Machine, *rows: Row, counters: tuple[Counter, ...] = ()) -> Machine:
    return Machine(machine.name, machine.states, machine.triggers, counters or machine.counters, rows)


def changed(machine: Machine, why: str, **fields: Any) -> Machine:
    """The machine with other fields in the rows that have this `why`."""
    assert any(row.why == why for row in machine.rows), f"{machine.name} has no row: {why}"
    return with_rows(machine, *[replace(row, **fields) if row.why == why else row for row in machine.rows])


def without(machine: Machine, why: str) -> Machine:
    rows = [row for row in machine.rows if row.why != why]
    assert len(rows) < len(machine.rows), f"{machine.name} has no row: {why}"
    return with_rows(machine, *rows)


def rewritten(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The function with `old` replaced by `new` in its source, where `old` occurs once."""
    text = dedent(getsource(function))
    assert text.count(old) == 1, f"{function.__name__} says {text.count(old)} times: {old}"
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + text.replace(old, new), function.__globals__, made)
    return made[function.__name__]  # type: ignore[no-any-return]


def forgetful(arc: Arc, counts: tuple[int, ...]) -> bool:
    """`Arc.admits` without the upper end of a range."""
    return all(low <= count for count, (low, _) in zip(counts, arc.ranges, strict=True))


_BLOCK = "contracts.block.BLOCK"
_BLOCK_BUGS = (
    Bug(
        "block.a_step_keeps_it_sound",
        "pins survive an invalidate",
        _BLOCK,
        changed(BLOCK, "no copy touches it", then={}),
    ),
    Bug(
        "block.a_step_keeps_it_sound",
        "pins are counted beyond their limit",
        _BLOCK,
        with_rows(BLOCK, *BLOCK.rows, counters=(BLOCK.counters[0], Counter("pins", bits=16))),
    ),
    Bug(
        "block.a_copy_ends_only_by_its_end",
        "a reset frees a slot that a copy touches",
        _BLOCK,
        changed(
            BLOCK, "a copy still touches it", target=Block.EVICTED, then={"pins": "void", "copies": "void"}
        ),
    ),
    Bug(
        "block.only_what_nobody_holds_is_reused",
        "a pinned block is evicted",
        _BLOCK,
        changed(BLOCK, "its slot is wanted", when={}),
    ),
    Bug(
        "block.only_what_nobody_holds_is_reused",
        "a quarantined slot is allocated",
        _BLOCK,
        changed(BLOCK, "a store is planned", sources=(Block.FREE, Block.EVICTED, Block.QUARANTINED)),
    ),
    Bug(
        "block.only_a_good_store_makes_it_readable",
        "a cancelled plan is published",
        _BLOCK,
        changed(BLOCK, "the plan never left the scheduler", target=Block.STORED),
    ),
    Bug(
        "block.a_bad_end_makes_nothing_readable",
        "a failed store is published",
        _BLOCK,
        changed(BLOCK, "some worker failed", target=Block.STORED),
    ),
    Bug(
        "block.every_live_copy_can_end",
        "of several loads of a quarantined block none but the last can end",
        _BLOCK,
        without(BLOCK, "other copies go on"),
    ),
    Bug(
        "block.pins_and_readers_are_counted",
        "a load keeps the pin that it used",
        _BLOCK,
        changed(BLOCK, "the pin becomes a reader", then={"copies": 1}),
    ),
    Bug(
        "block.invalidate_is_total",
        "a retired block cannot be voided",
        _BLOCK,
        changed(BLOCK, "nothing readable to void", sources=(Block.FREE, Block.EVICTED, Block.QUARANTINED)),
    ),
    Bug(
        "block.retired_is_for_ever",
        "a retired slot is allocated",
        _BLOCK,
        changed(BLOCK, "a store is planned", sources=(Block.FREE, Block.EVICTED, Block.RETIRED)),
    ),
    Bug(
        "block.a_restart_leaves_what_can_be_read",
        "a restart publishes what was being stored",
        _BLOCK,
        changed(BLOCK, "its store may have written a part", target=Block.STORED),
    ),
)

_TRANSFER = "contracts.transfer.TRANSFER"
_TRANSFER_BUGS = (
    Bug(
        "transfer.a_step_keeps_it_sound",
        "the last failure is not counted",
        _TRANSFER,
        changed(TRANSFER, "the last, and it failed", then={"pending": -1}),
    ),
    Bug(
        "transfer.it_ends_at_the_last_report",
        "the last report does not end it",
        _TRANSFER,
        changed(TRANSFER, "the last, and none failed", target=Transfer.SUBMITTED),
    ),
    Bug(
        "transfer.it_ends_at_the_last_report",
        "the first report ends it",
        _TRANSFER,
        changed(TRANSFER, "others to come", target=Transfer.COMPLETED),
    ),
    Bug(
        "transfer.one_failure_fails_it",
        "the last worker decides for all",
        _TRANSFER,
        changed(TRANSFER, "the last, but one failed before", target=Transfer.COMPLETED),
    ),
    Bug(
        "transfer.what_ended_stays_ended",
        "a late report is taken",
        _TRANSFER,
        with_rows(
            TRANSFER,
            *TRANSFER.rows,
            Row((Transfer.COMPLETED,), TransferTrigger.REPORT_GOOD, None, "once more"),
        ),
    ),
    Bug(
        "transfer.a_copy_under_way_does_not_just_stop",
        "a submitted copy is cancelled",
        _TRANSFER,
        changed(
            TRANSFER, "the plan never left the scheduler", sources=(Transfer.PLANNED, Transfer.SUBMITTED)
        ),
    ),
)

_LEASE = "contracts.lease.LEASE"
_LEASE_BUGS = (
    Bug(
        "lease.a_step_keeps_it_sound",
        "the last reader stays counted",
        _LEASE,
        changed(LEASE, "the last store ended", then={}),
    ),
    Bug(
        "lease.a_writer_is_alone",
        "a load begins while a store reads",
        _LEASE,
        changed(LEASE, "a load is planned", sources=(Lease.NONE, Lease.READING), when={"readers": (0, 9)}),
    ),
    Bug(
        "lease.a_hold_ends_once",
        "the first reader's end frees the block",
        _LEASE,
        changed(LEASE, "other stores still read it", target=Lease.NONE),
    ),
    Bug("lease.every_hold_can_end", "a load never ends", _LEASE, without(LEASE, "the load ended")),
    Bug(
        "lease.retired_is_for_ever",
        "a retired block is written",
        _LEASE,
        changed(LEASE, "a load is planned", sources=(Lease.NONE, Lease.RETIRED)),
    ),
)

_REQUEST = "contracts.request.REQUEST"
_REQUEST_BUGS = (
    Bug(
        "request.a_step_keeps_it_sound",
        "the load of a finished request stays counted",
        _REQUEST,
        changed(REQUEST, "its load ended", then={}),
    ),
    Bug(
        "request.it_can_always_leave",
        "a deferred request cannot be aborted",
        _REQUEST,
        changed(REQUEST, "nothing of it is left", sources=(Request.NEW, Request.RUNNING, Request.MATCHED)),
    ),
    Bug(
        "request.a_load_finds_its_request",
        "a load cannot end while its request waits for another copy",
        _REQUEST,
        changed(
            REQUEST, "it was preempted meanwhile", sources=(Request.NEW, Request.RUNNING, Request.PREEMPTED)
        ),
    ),
    Bug(
        "request.it_is_forgotten_only_without_a_load",
        "an aborted request is forgotten, its load is not",
        _REQUEST,
        changed(REQUEST, "its load is in flight", target=Request.RELEASED),
    ),
    Bug(
        "request.a_load_needs_a_match",
        "a load begins without pins",
        _REQUEST,
        changed(REQUEST, "its pins become readers", sources=(Request.MATCHED, Request.NEW)),
    ),
    Bug(
        "request.released_is_the_end",
        "a released request misses",
        _REQUEST,
        changed(REQUEST, "nothing on the host for it", sources=(Request.NEW, Request.RELEASED)),
    ),
)

_TABLE_BUGS = tuple(
    Bug(
        f"tables.{name}_compiled",
        "an arc forgets where its range ends",
        "kvsm.states.machine.Arc.admits",
        forgetful,
    )
    for name in ("block", "transfer", "lease", "request")
)

_BATCH_BUGS = (
    Bug(
        "words.unpacking_gives_back_what_was_packed",
        "the first counter has too little room",
        "contracts.words.packed",
        rewritten(words.packed, "first_size * second", "(first_size - 1) * second"),
    ),
    Bug(
        "runs.two_are_merged_iff_consecutive",
        "only the host side is looked at",
        "contracts.runs.joins",
        rewritten(runs.joins, "pair[0] == device + count and ", ""),
    ),
    Bug(
        "runs.a_run_copies_its_pairs",
        "only the device side is looked at",
        "contracts.runs.joins",
        rewritten(runs.joins, " and pair[1] == host + count", ""),
    ),
    Bug(
        "runs.runs_cannot_be_merged_further",
        "a run ends after two blocks",
        "contracts.runs.merged",
        rewritten(runs.merged, "if runs and ", "if runs and runs[-1][2] < 2 and "),
    ),
    Bug(
        "runs.a_run_of_any_length_takes_its_next",
        "a gap is passed over",
        "contracts.runs.joins",
        rewritten(runs.joins, "pair[1] == host + count", "pair[1] >= host + count"),
    ),
    Bug(
        "paths.an_amount_has_one_cell",
        "what is larger than the table falls out of it",
        "contracts.paths._place",
        rewritten(paths._place, "min(amount.bit_length(), len(cells))", "amount.bit_length()"),
    ),
    Bug(
        "paths.more_is_never_looked_up_lower",
        "cells are taken in turn",
        "contracts.paths._place",
        rewritten(paths._place, "min(amount.bit_length(), len(cells))", "amount.bit_length() % len(cells)"),
    ),
    Bug(
        "paths.a_row_ends_with_the_measured_bytes",
        "a row lacks its last cell",
        "contracts.paths._powers",
        rewritten(paths._powers, ".bit_length()", ".bit_length() - 1"),
    ),
    Bug(
        "paths.only_high_rectangles_go_pitched",
        "rectangles that are a row too low pass",
        "kvsm.cuda_io.paths.RECTANGLE_ROWS",
        paths.RECTANGLE_ROWS - 1,
    ),
)

_FIRST_NEEDED = "kvsm.core.scheduler.groups.KVCacheGroup.first_needed_token"
_TOKEN_BUGS = (
    Bug(
        "tokens.started_blocks_hold_all_tokens",
        "one block more, also where the last is full",
        "contracts.tokens.started_blocks",
        rewritten(started_blocks, "-(-tokens // block_tokens)", "tokens // block_tokens + 1"),
    ),
    Bug(
        "tokens.a_window_is_what_its_layers_see",
        "a window reaches one token too far",
        _FIRST_NEEDED,
        rewritten(KVCacheGroup.first_needed_token, "self.window - 1", "self.window"),
    ),
    Bug(
        "tokens.a_window_never_moves_back",
        "a window that is not full begins at its end",
        _FIRST_NEEDED,
        rewritten(
            KVCacheGroup.first_needed_token, "max(0, end - reach)", "end - reach if end > reach else end"
        ),
    ),
    Bug(
        "tokens.a_request_fits_its_peak",
        "a window is thought to begin where a block begins",
        "contracts.tokens.peak_blocks",
        rewritten(peak_blocks, "group.block_tokens) + 1)", "group.block_tokens))"),
    ),
    Bug(
        "tokens.one_token_is_left",
        "a match covers the whole prompt",
        "contracts.tokens.hit_limit",
        rewritten(hit_limit, "num_tokens - 1", "num_tokens"),
    ),
    Bug(
        "tokens.only_what_is_certain_is_confirmed",
        "the step under way counts as computed",
        "kvsm.core.scheduler.tracked.TrackedRequest.confirmed_tokens",
        rewritten(TrackedRequest.confirmed_tokens, " - request.num_output_placeholders", ""),
    ),
    Bug(
        "tokens.only_full_confirmed_chunks_are_stored",
        "a block is stored that a drafter may still rewrite",
        "kvsm.core.scheduler.tracked.TrackedRequest.full_chunks",
        rewritten(TrackedRequest.full_chunks, "chunks -= 1", "pass"),
    ),
    Bug(
        "tokens.no_full_chunk_is_forgotten",
        "the next offer comes a chunk late",
        "kvsm.core.scheduler.tracked.TrackedRequest.full_chunks",
        rewritten(TrackedRequest.full_chunks, "confirmed // tokens + 1", "confirmed // tokens + 2"),
    ),
    Bug(
        "tokens.only_the_prompt_is_stored_if_asked",
        "the cap of the request is forgotten",
        "kvsm.core.scheduler.tracked.TrackedRequest.store_limit",
        rewritten(
            TrackedRequest.store_limit,
            "min(self.max_store_tokens, self.request.num_prompt_tokens)",
            "self.request.num_prompt_tokens",
        ),
    ),
    Bug(
        "matching.a_hit_is_the_longest_that_is_served",
        "a match ends one token late",
        "kvsm.core.scheduler.hits.HitSearch.longest_hit",
        rewritten(HitSearch.longest_hit, "self._align(limit)", "self._align(limit + 1)"),
    ),
    *(
        Bug(
            f"matching.{contract}",
            "the first chunk of a window is not looked for",
            "kvsm.core.scheduler.hits.HitSearch._served",
            rewritten(HitSearch._served, "if found == len(wanted):", "if found >= len(wanted) - 1:"),
        )
        for contract in ("a_hit_is_the_longest_that_is_served", "also_with_states")
    ),
)

BUGS = (
    *_BLOCK_BUGS,
    *_TRANSFER_BUGS,
    *_LEASE_BUGS,
    *_REQUEST_BUGS,
    *_TABLE_BUGS,
    *_BATCH_BUGS,
    *_TOKEN_BUGS,
)
