"""The result of comparing a log with a declared protocol."""

from __future__ import annotations

from enum import Enum

import msgspec

from kvsm.system.printable import printable


class ProtocolVerdict(str, Enum):
    """Whether a log is a run of the protocol."""

    __str__ = str.__str__

    CONFORMS = "conforms"
    """Each event is an instance of the protocol's actions."""
    DIFFERS = "differs"
    """Some event is not."""
    UNDETERMINED = "undetermined"
    """The log could not be followed to its end. Each event before that point conforms."""


class ProtocolMismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first event at which the ledger and the protocol differ.

    protocol: the name of the declaration.
    event, step, kind, text: the event.
    action: the action that the event should be an instance of; empty if no action explains the change.
    variable: the field of the protocol's state. Empty if the demand reads none.
    cell: the field with its indices: `block of slot 3`.
    expected: the value that the protocol demands or assigns.
    found: its value: in the protocol's state before the action for a demand, otherwise in the ledger.
    """

    protocol: str
    event: int
    step: int
    kind: str
    text: str
    action: str
    variable: str
    cell: str
    expected: str
    found: str

    def told(self) -> list[str]:
        """The mismatch as lines for people, made printable."""
        what = f"action {self.action}" if self.action else "no action of the protocol changes this"
        lines = [
            f"differs from the {self.protocol} at event {self.event}, step {self.step}: {self.text}",
            f"  {what}",
            f"  field     {self.cell}",
            f"  expected  {self.expected}",
            f"  found     {self.found}",
        ]
        return [printable(line) for line in lines]


class ProtocolVerification(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify_protocol` found. A state is taken on trust where the log begins or continues after a gap.

    protocol: the name of the declaration.
    verdict: "conforms", "differs" or "undetermined".
    events: events that were followed.
    actions: how often each action was taken.
    mismatch: the first event that is no instance of the protocol's actions, or None.
    stopped: why the log was not followed to its end; None if it was.
    trusted: numbers of the events before which the state was taken on trust from the head of a segment.
    """

    protocol: str
    verdict: ProtocolVerdict
    events: int
    actions: dict[str, int]
    mismatch: ProtocolMismatch | None
    stopped: str | None
    trusted: tuple[int, ...]
    seconds: float

    def summary(self) -> str:
        """The verdict in a line, for people."""
        if self.verdict is ProtocolVerdict.UNDETERMINED:
            return f"undetermined: {printable(str(self.stopped))}"
        if self.verdict is ProtocolVerdict.DIFFERS and self.mismatch is not None:
            return f"differs from the {self.protocol} at event {self.mismatch.event}"
        rate = self.events / self.seconds if self.seconds else 0
        steps = sum(self.actions.values())
        before = ", ".join(f"{event:,}" for event in self.trusted)
        trusted = f"; the state before event {before} was taken on trust" if before else ""
        return (
            f"each event is an instance of the {self.protocol}'s actions ({steps:,} steps; "
            f"{self.seconds:.3f} s, {rate:,.0f} events/s){trusted}"
        )
