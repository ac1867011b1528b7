"""Write the page about the proofs for any size: properties, invariants and counters of each protocol."""

from __future__ import annotations

from collections.abc import Iterator

from kvsm.check.protocol.terms import Claim, Declaration
from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.check.scopes.models import MODELS

_HEAD = """\
# What is proved for any size

<!-- Written by `PYTHONPATH=specs python -m protocol.texts` from the declarations in kvsm/check/protocol.
Do not edit. -->

`kvsm check --any-size` proves the protocols by induction, for any number of members of each set. Every
claim and every invariant below holds at first. If all of them hold before an action, each of them holds
after it. So all of them hold in every reachable state. [verification.md](../../docs/verification.md) says
what else is proved, how, and what still stands between this proof and the code.

The properties say what kvsm promises. The invariants say what else is true in every state; without them the
properties would not follow. The terms of both are in `kvsm/check/protocol`.
"""


def proof_text() -> str:
    """The page."""
    sections = [
        "\n".join(_section(model.name, model.says, model.versions()))
        for model in MODELS.values()
        if isinstance(model, DeclaredModel)
    ]
    return "\n\n".join(part.rstrip() for part in (_HEAD, *sections)) + "\n"


def _section(name: str, says: str, versions: dict[str, tuple[Declaration, ...]]) -> Iterator[str]:
    widest = max((sized[0] for sized in versions.values()), key=lambda one: len(one.invariants))
    yield f"## {name}: {says}"
    yield ""
    sets = ", ".join(one.plural for one in widest.index_sets)
    yield f"For any number of {sets}. Versions: {'; '.join(versions)}."
    for title, claims in (("Properties", widest.always), ("Invariants", widest.invariants)):
        yield ""
        yield f"### {title}"
        yield ""
        yield "| name | what holds |"
        yield "| --- | --- |"
        for claim in _once(claims):
            yield f"| {claim.name} | {claim.says} |"
    yield ""
    yield "### Counters"
    yield ""
    yield "| machine | counter | the number of |"
    yield "| --- | --- | --- |"
    for counting in widest.countings:
        yield f"| {counting.cell.variable.name} | {counting.counter} | {counting.says} |"


def _once(claims: tuple[Claim, ...]) -> Iterator[Claim]:
    yield from {(str(claim.name), claim.says): claim for claim in claims}.values()
