"""All consumers of events handle every kind of event. A failure names the file that lacks an entry."""

from __future__ import annotations

import ast
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from core_walks import walked
from hypothesis import given, settings
from places import ROOT
from replay_life import CONFIGS, OPERATIONS, Life, Operations
from source_trees import nodes_of

from examples import examples
from kvsm.check.conformance import offload_steps, request_steps
from kvsm.check.conformance.shadow import UNSPOKEN, EventSteps
from kvsm.check.walks.walk import random_of
from kvsm.check.worlds.core_options import draw_options
from kvsm.core.ledger import Ledger
from kvsm.core.log.fold import Moment
from kvsm.events import (
    REACHES,
    TRIGGERS,
    OffloadConfig,
    OffloadingEvent,
    Reach,
    RejectReason,
    SkipReason,
)
from kvsm.explain.other_future import _CALLS
from kvsm.explain.story import BlockLife, KeyLife, RequestLife, TransferLife, concern
from kvsm.explain.story.render import FIELDS
from kvsm.explain.verify import book
from kvsm.ids import to_list
from kvsm.states import BlockTrigger, LeaseTrigger, RequestTrigger, TransferTrigger

KVSM = ROOT / "kvsm"
KINDS = OffloadingEvent.__subclasses__()


# Tables.


@pytest.mark.parametrize(
    ("place", "table"),
    [
        ("TRIGGERS in kvsm/events.py", TRIGGERS),
        ("REACHES in kvsm/events.py", REACHES),
        ("HANDLERS in kvsm/explain/verify/book.py", book.HANDLERS),
    ],
)
def test_table_has_an_entry_for_every_kind(place: str, table: dict[type[OffloadingEvent], Any]) -> None:
    """What a kind means is decided for each of them, or that it means nothing here."""
    missing = [kind.__name__ for kind in KINDS if kind not in table]
    assert not missing, f"add {', '.join(missing)} to {place}"
    assert len(table) == len(KINDS)


@pytest.mark.parametrize(
    ("place", "table"),
    [
        ("FIELDS in kvsm/explain/story/render.py", FIELDS),
        ("NAMED_BY_FIELDS in kvsm/explain/story/concern.py", concern.NAMED_BY_FIELDS),
    ],
)
def test_table_has_an_entry_for_every_field(place: str, table: dict[str, Any]) -> None:
    """`kvsm show` words an event, and finds the things that it names, by the names of its fields."""
    fields = {field for kind in KINDS for field in kind.__struct_fields__[3:]}
    assert set(table) == fields, f"add or remove {sorted(fields ^ set(table))} in {place}"


@pytest.mark.parametrize(
    ("place", "table", "machines"),
    [
        (
            "STEPS in kvsm/check/conformance/offload_steps.py",
            offload_steps.STEPS,
            (BlockTrigger, TransferTrigger, LeaseTrigger),
        ),
        (
            "REQUEST_STEPS in kvsm/check/conformance/request_steps.py",
            request_steps.REQUEST_STEPS,
            (RequestTrigger,),
        ),
    ],
)
def test_a_kind_that_changes_a_state_is_an_action_of_the_protocol(
    place: str, table: dict[type[OffloadingEvent], EventSteps], machines: tuple[type[Enum], ...]
) -> None:
    """Else conformance refuses each log that has it. A touch changes only the eviction order."""
    for kind in KINDS:
        triggers = [one for one in TRIGGERS[kind] if one is not BlockTrigger.TOUCH]
        if any(isinstance(one, machines) for one in triggers):
            assert table[kind] is not UNSPOKEN, f"add {kind.__name__} to {place}"


def test_fork_has_the_call_that_leads_to_each_kind() -> None:
    missing = [kind.__name__ for kind in KINDS if kind not in _CALLS]
    assert not missing, f"add {', '.join(missing)} to _CALLS in kvsm/explain/other_future.py"


def test_everything_that_an_event_may_reach_can_be_found() -> None:
    assert set(concern.FINDERS) == set(Reach), "add it to FINDERS in kvsm/explain/story/concern.py"


@pytest.mark.parametrize("kind", KINDS)
def test_the_offloader_emits_every_kind(kind: type[OffloadingEvent]) -> None:
    """A kind that nothing emits is a promise that no log can keep."""
    used = names_used_in(*(KVSM / "core" / "offloader").glob("*.py"))
    assert kind.__name__ in used, f"no file of kvsm/core/offloader/ emits {kind.__name__}"


def test_the_native_body_has_a_number_for_each_kind() -> None:
    """With tables of other kinds it does not run, and Python folds all events."""
    tables = (KVSM / "core" / "native" / "tables.h").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"KIND_{kind.__name__}," in tables, "run `PYTHONPATH=.:specs python specs/native_tables.py`"


@pytest.mark.parametrize("reason", [*SkipReason, *RejectReason])
def test_every_reason_is_given_by_some_code(reason: Enum) -> None:
    used = names_used_in(*(path for path in KVSM.rglob("*.py") if path.name != "events.py"))
    assert reason.name in used, f"no code gives the reason {reason!r}"


@cache
def names_used_in(*paths: Path) -> set[str]:
    """The names that follow a dot in the code of these files."""
    return {node.attr for path in paths for node in nodes_of(path) if isinstance(node, ast.Attribute)}


# What is told of an event.

SAMPLES: dict[str, Any] = {
    "request": "r",
    "lease": "r",
    "owners": (("r", 1),),
    "offers": (("r", (1,), (2,)),),
    "slots": (1,),
    "moved": (1,),
    "device_blocks": (2,),
    "transfer": 3,
    "transfers": (3,),
    "keys": (b"key",),
    "missed": b"key",
}
"""A value for each field that names a thing."""
CONFIG = OffloadConfig(host_blocks=4, device_blocks=4)
LIVES = {
    "slots": BlockLife(1),
    "requests": RequestLife("r"),
    "transfers": TransferLife(3),
    "keys": KeyLife(b"key".hex()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_event_is_told_in_the_life_of_each_thing_that_its_fields_name(kind: type[OffloadingEvent]) -> None:
    """`kvsm show` leaves no event out, of whatever kind it is."""
    fields = kind.__struct_fields__[3:]
    event = kind(1, 0, 0, *((SAMPLES | {"config": CONFIG}).get(field, 0) for field in fields))
    empty = Ledger(CONFIG)
    found = concern.concern(empty, event)
    for field in set(fields) & set(SAMPLES):
        meaning = concern.NAMED_BY_FIELDS[field]
        assert meaning is not None, f"{field} names nothing in kvsm/explain/story/concern.py"
        assert getattr(found, meaning[0])
        if meaning[0] in LIVES:
            assert LIVES[meaning[0]].met_by(Moment(empty, event, None), found) is not None


# What an event concerns.

State = dict[str, dict[Any, object]]
"""Sort of thing -> thing -> all that the ledger knows of it."""


def state_of(ledger: Ledger) -> State:
    held = {slot: key for key, slot in ledger.index.items()}
    brought, stale = ledger.provenance.brought, ledger.provenance.stale
    return {
        "slots": {
            slot: (word, ledger.generation[slot], held.get(slot))
            for slot, word in enumerate(ledger.blocks.words)
        },
        "device_blocks": {
            block: (word, brought.get(block), stale.get(block))
            for block, word in enumerate(ledger.leases.words)
        },
        "transfers": {
            id: (one.word, one.since, one.reported, one.flush) for id, one in ledger.transfers.items()
        },
        "requests": {
            name: (one.word, to_list(one.pins), one.awaits, one.patience, one.load, one.settled, one.offered)
            for name, one in ledger.requests.items()
        },
    }


def changed(before: State, after: State) -> dict[str, set[Any]]:
    """The things of each sort that are new, gone, or no longer as they were."""
    return {
        sort: {
            thing
            for thing in before[sort].keys() | after[sort].keys()
            if before[sort].get(thing) != after[sort].get(thing)
        }
        for sort in before
    }


def assert_concern_names_every_change(config: OffloadConfig, events: list[OffloadingEvent]) -> None:
    ledger = Ledger(config)
    before = state_of(ledger)
    for event in events:
        found = concern.concern(ledger, event)
        ledger.apply(event)
        after = state_of(ledger)
        for sort, things in changed(before, after).items():
            left_out = things - set(getattr(found, sort))
            assert not left_out, f"{event} changes {sort} {left_out}, and concern() does not say so"
        before = after


@settings(deadline=None, max_examples=examples(100))
@given(OPERATIONS, CONFIGS)
def test_what_an_event_changes_it_concerns(operations: Operations, config: dict[str, Any]) -> None:
    """Else `kvsm show` leaves the event out of a life that it changed."""
    life = Life(**config).drive(operations).drain()
    assert_concern_names_every_change(life.config, life.events)


@pytest.mark.parametrize("run", range(12))
def test_what_an_event_changes_it_concerns_in_the_world_of_the_core(run: int) -> None:
    """The same over random walks of the core's world, which meets every kind of event."""
    world, _ = walked(draw_options(random_of(3, run)), run, 600)
    assert_concern_names_every_change(world.events[0].config, world.events)
