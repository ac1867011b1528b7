"""Check the same protocol with kvsm, Rumur and TLC, and compare their answers.

    PYTHONPATH=specs python -m protocol.opinions    # a table; exits 1 if they differ, 3 if a tool is missing

For the correct protocol all three must count exactly the same states. For a broken protocol they must find
the same broken property with a trace of the same length, because all of them search breadth first.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import msgspec
from msgspec import structs

from kvsm.check.protocol.explore import explore
from kvsm.check.protocol.offload_protocol import Variant, offload_protocol
from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.check.protocol.terms import Declaration
from kvsm.properties import Property
from protocol.export import in_one_word
from protocol.murphi import murphi_text
from protocol.tla import module_name, tla_configuration, tla_module
from protocol.tools import Opinion, ToolFailed, ask_rumur, ask_tlc, rumur_missing, tlc_missing


class Case(msgspec.Struct, frozen=True):
    """A protocol that the tools check.

    variant: the bug of the protocol; None for the correct one.
    symmetry: count states that differ only in the numbering of keys, blocks, slots and workers as one.
    """

    scope: ProtocolScope | RequestScope
    variant: Variant | None = None
    symmetry: bool = False

    def declared(self) -> Declaration:
        """The declaration of the case.

        A broken protocol is declared without auxiliary invariants, which would break before a property does.
        """
        if isinstance(self.scope, RequestScope):
            return request_protocol(self.scope)
        declared = offload_protocol(self.scope, self.variant)
        return replace(declared, invariants=()) if self.variant else declared

    def __str__(self) -> str:
        name = "requests" if isinstance(self.scope, RequestScope) else "offload"
        merged = "symmetric states merged" if self.symmetry else "every state"
        return f"{self.variant.value if self.variant else name}; {self.scope}; {merged}"


TINY = ProtocolScope(keys=1, device_blocks=1, slots=1, live_transfers=1, copies=1, queued=1)
"""One thing of each kind: enough to find most bugs."""
TWO_COPIES = structs.replace(TINY, live_transfers=2, copies=2)
TWO_BLOCKS = structs.replace(TINY, keys=2, device_blocks=2, slots=2, copies=2)

GOOD = {
    "two workers": Case(structs.replace(TINY, workers=2, several=False)),
    "two loads of one slot": Case(structs.replace(TWO_COPIES, device_blocks=2, losses=False, several=False)),
    "two stores of one device block": Case(structs.replace(TWO_COPIES, slots=2)),
    "transfers of two blocks": Case(structs.replace(TWO_BLOCKS, failures=False, resets=False, losses=False)),
    "crashes": Case(structs.replace(TINY, slots=2, crashes=True)),
    "requests": Case(RequestScope(holds=1, transfers=1)),
}
"""Correct protocols. All three tools must count the same states."""
SYMMETRIC = Case(structs.replace(TWO_BLOCKS, losses=False), symmetry=True)
BROKEN = (
    Case(TINY, Variant.STORE_BEFORE_COMPUTE),
    Case(structs.replace(TINY, keys=2), Variant.LOAD_BEFORE_READER),
    Case(TINY, Variant.LOAD_UNHELD),
    Case(TINY, Variant.RESET_FREES),
)
LARGER = (
    Case(structs.replace(TWO_BLOCKS, several=False)),
    Case(TWO_BLOCKS),
    Case(ProtocolScope(queued=1), symmetry=True),
    Case(ProtocolScope(queued=1, several=False), symmetry=True),
    Case(structs.replace(TWO_BLOCKS, keys=1, workers=2), symmetry=True),
    Case(structs.replace(TWO_BLOCKS, crashes=True), symmetry=True),
    Case(RequestScope(), symmetry=True),
)
"""Cases for the table only: they take minutes, mostly in TLC."""


def of_kvsm(declared: Declaration, *, symmetry: bool = False) -> Opinion:
    """Return kvsm's answer. The auxiliary invariants are checked like properties."""
    found = explore(replace(declared, always=(*declared.always, *declared.invariants)), symmetry=symmetry)
    if found.limit:
        raise ToolFailed(f"kvsm came to no verdict: {found.limit}")
    broken = found.refutation
    breaks = broken.finding.property if broken else ""
    return Opinion(
        tool="kvsm",
        states=found.states,
        seconds=found.seconds,
        broken=breaks.id if isinstance(breaks, Property) else in_one_word(breaks),
        trace=tuple(str(action[0]) for action in broken.path) if broken else (),
        covered=dict.fromkeys(found.reached, 1) | dict.fromkeys(found.unreached, 0),
    )


def of_rumur(declared: Declaration, *, symmetry: bool = False) -> Opinion:
    """Return Rumur's answer."""
    return ask_rumur(murphi_text(declared), symmetry=symmetry)


def of_tlc(declared: Declaration, *, symmetry: bool = False) -> Opinion:
    """Return TLC's answer."""
    configuration = tla_configuration(declared, symmetry=symmetry)
    return ask_tlc(module_name(declared), tla_module(declared), configuration)


def differences(one: Opinion, other: Opinion) -> list[str]:
    """The differences of two answers. If both found a bug, the number of states before it is ignored."""
    if one.verdict != other.verdict:
        return [f"{one.tool}: {one.verdict}, {other.tool}: {other.verdict}"]
    if one.broken:
        return []
    said = []
    if one.states != other.states:
        said.append(f"{one.tool} counts {one.states} states, {other.tool} {other.states}")
    names = sorted(one.covered.keys() & other.covered.keys())
    said += [
        f"only {(one if one.covered[name] else other).tool} has seen that {name}"
        for name in names
        if bool(one.covered[name]) != bool(other.covered[name])
    ]
    return said


def disagreements(case: Case, ours: Opinion, theirs: list[Opinion]) -> list[str]:
    """The differences of the answers to a case.

    kvsm does not merge all symmetric states: then it may count more states than the others, but never fewer.
    """
    first, *others = theirs if case.symmetry else [ours, *theirs]
    said = [line for other in others for line in differences(first, other)]
    if case.symmetry:
        if ours.verdict != first.verdict:
            said.append(f"kvsm: {ours.verdict}, {first.tool}: {first.verdict}")
        elif not ours.broken and ours.states < first.states:
            said.append(f"kvsm counts {ours.states} states, fewer than {first.tool}'s {first.states}")
    return said


def main() -> int:
    """Print the table. Returns the exit code."""
    missing = [how for how in (rumur_missing(), tlc_missing()) if how]
    if missing:
        print("Not installed:", "; ".join(missing))
        return 3
    wrong = []
    for case in (*GOOD.values(), SYMMETRIC, *BROKEN, *LARGER):
        ours, *theirs = opinions = [
            ask(case.declared(), symmetry=case.symmetry) for ask in (of_kvsm, of_rumur, of_tlc)
        ]
        print(case)
        for one in opinions:
            print(f"    {one.tool:6} {one.verdict:28} {one.states:9,} states {one.seconds:7.1f} s")
        wrong += disagreements(case, ours, theirs)
    print("They differ:" if wrong else "All agree.", *wrong, sep="\n    ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
