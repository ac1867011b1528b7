"""Assert properties of a ledger or its events. A failure says what is wrong, where, and what property broke.

    assert_sound(core.ledger)               # at any moment
    assert_at_rest(core.ledger)             # when all requests have finished and all copies have ended
    assert_replays(recorder, core.ledger)   # the events fold to the ledger's state
    assert_verifies(recorder)               # each property, at each event

All of them raise `kvsm.errors.PropertyBroken`, whose `property` is the broken one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import Violation, check_ledger, check_rest
from kvsm.core.ledger.snapshot import SavedLedger, restore, snapshot
from kvsm.core.policies import make_policy
from kvsm.core.policies.policy_copies import PolicyCopy
from kvsm.errors import IllegalTransition, InvalidEvent, PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.explain.story import Auditor, render
from kvsm.properties import Property
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.testing.recording import config_of, fold

MOST_TOLD = 8
"""Most differences, violations or earlier events that a failure lists."""


def assert_sound(ledger: Ledger) -> None:
    """Assert all properties that a ledger's state can break (`check_ledger`), and the contract of its policy.

    Takes about 100 us for a small ledger.
    """
    _refuse(check_ledger(ledger), f"after event {ledger.seq}")
    _check_policy(ledger)


def assert_at_rest(ledger: Ledger) -> None:
    """Assert that nothing is held, in flight or awaited (S4, S9)."""
    assert_sound(ledger)
    _refuse(check_rest(ledger), f"after event {ledger.seq}")


def assert_replays(events: Sequence[OffloadingEvent], ledger: Ledger) -> None:
    """Assert that the events fold to the ledger's state, and that the ledger's snapshot restores it (S10)."""
    try:
        replayed = fold(events)
    except (IllegalTransition, InvalidEvent) as refusal:
        raise PropertyBroken(Property.EVENTS_ARE_STATE, f"the log does not fold: {refusal}") from refusal
    for other, what in ((replayed, "the log"), (restore(snapshot(ledger)), "a snapshot of the ledger")):
        if differs := differences(other, ledger):
            listed = "; ".join(differs[:MOST_TOLD])
            raise PropertyBroken(
                Property.EVENTS_ARE_STATE, f"{what} gives another state than the live one: {listed}"
            )


def assert_verifies(events: Sequence[OffloadingEvent]) -> None:
    """Assert that no event breaks a property, with the checks that `kvsm verify` makes on a log.

    A failure names the first event that breaks a property, and the events before it.
    """
    auditor = Auditor(Ledger(config_of(events)))
    for place, event in enumerate(events):
        broken = auditor.apply(event) or auditor.check()
        if broken:
            before = events[max(0, place + 1 - MOST_TOLD) : place + 1]
            led_there = "".join(f"\n  event {one.seq}: {render(one)}" for one in before)
            _refuse(broken, f"by event {event.seq}", f"\nwhat led there:{led_there}")


def _refuse(broken: Sequence[Violation], where: str, addition: str = "") -> None:
    __tracebackhide__ = True
    if broken:
        first, *others = broken
        more = "".join(f"\n  also {one.property}: {one.message}" for one in others[: MOST_TOLD - 1])
        raise PropertyBroken(
            first.property, f"{where}: {first.message}\n  because: {first.property.sentence}{more}{addition}"
        )


def _check_policy(ledger: Ledger) -> None:
    """Check that `choose` returns the requested number of idle blocks and changes nothing; check `freeze`.

    `freeze` must copy the state of its moment, as `snapshot` does.
    """
    policy, where = ledger.policy, f"after event {ledger.seq}, policy {ledger.config.policy}"
    saved, many = policy.snapshot(), len(policy)
    # Freeze a twin: a segment of the log may be opening with a copy of the policy itself.
    twin = make_policy(ledger.config.policy, ledger.config.host_blocks)
    twin.restore(saved)
    if _copied(twin.freeze()) != twin.snapshot():
        raise PropertyBroken(Property.EVENTS_ARE_STATE, f"{where}: `freeze` is not `snapshot` of its moment")
    idle = {slot for slot in range(ledger.config.host_blocks) if slot in policy}
    for count in sorted({1, 2, 3, many, many + 1}):
        choice = policy.choose(count, frozenset())
        victims = [] if choice is None else [int(slot) for slot in choice.victims]
        asked = f"{where} was asked for {count} of its {many} idle blocks, slots {sorted(idle)}"
        if not set(victims) <= idle:
            raise PropertyBroken(
                Property.NO_REUSE_IN_FLIGHT, f"{asked}, and chose slots {victims}: not all of them are idle"
            )
        if len(set(victims)) != (count if count <= many else 0):
            chosen = "none" if choice is None else f"slots {victims}"
            raise PropertyBroken(
                Property.CONSERVATION, f"{asked}, and chose {chosen}; all or nothing, and each slot once"
            )
        if policy.snapshot() != saved:
            raise PropertyBroken(Property.EVENTS_ARE_STATE, f"{asked}, and changed: `choose` is pure")


def _copied(copy: PolicyCopy) -> bytes:
    while not copy.go_on(1 << 16):
        pass
    return b"".join(copy.pieces())


def differences(other: Ledger, live: Ledger) -> list[str]:
    """Describe the differences between two ledgers, each with the live value last; empty if equal."""
    found = []
    for name, value, own in zip(SavedLedger.__struct_fields__, _fields(other), _fields(live)):
        if value == own:
            continue
        if name in _WORDS:
            found += _differing_words(name, other, live)
        elif isinstance(value, int):
            found.append(f"{name} {value}, live {own}")
        elif isinstance(value, list):
            found.append(f"{name} {_only_in(value, own)}, live {_only_in(own, value)}")
        else:
            found.append(f"the state of the {name}")
    return found


_WORDS = {"blocks": ("slot", BLOCK_WORDS), "leases": ("device block", LEASE_WORDS)}


def _fields(ledger: Ledger) -> list[Any]:
    fields: list[Any] = msgspec.msgpack.decode(snapshot(ledger))
    return fields


def _differing_words(name: str, other: Ledger, live: Ledger) -> list[str]:
    noun, codec = _WORDS[name]
    words, own_words = getattr(other, name).words, getattr(live, name).words
    return [
        f"{noun} {number} {codec.describe(word)}, live {codec.describe(own)}"
        for number, (word, own) in enumerate(zip(words, own_words))
        if word != own
    ]


def _only_in(some: list[Any], others: list[Any]) -> list[Any]:
    return [entry for entry in some if entry not in others]
