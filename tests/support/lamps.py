"""A small declaration that is proved at once: lamps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Action,
    Assign,
    Claim,
    Declaration,
    ForAll,
    IndexSet,
    Param,
    Total,
    Truth,
    Variable,
    for_all,
    implies,
)
from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.properties import Property


def lamps(size: int) -> Declaration:
    """Declare lamps of which at most one is on.

    An armed lamp could be lit while another is on, but no lamp is ever armed.
    """
    lamp = IndexSet("lamp", size)
    one, other = Param("one", lamp), Param("other", lamp)
    on = Variable("on", "Whether the lamp is on.", (lamp,), Truth())
    armed = Variable("armed", "Whether the lamp is armed.", (lamp,), Truth())
    lit = on[one].equals(TRUE)
    dark = ForAll(other, on[other].equals(FALSE))
    single = for_all(implies(lit & on[other].equals(TRUE), one.equals(other)))
    return Declaration(
        name="lamps",
        bounds=f"{size} lamps",
        index_sets=(lamp,),
        variables=(on, armed),
        actions=(
            Action("light", "A lamp is lit while all are dark.", (one,), dark, (Assign(on[one], TRUE),)),
            Action("darken", "A lamp goes out.", (one,), lit, (Assign(on[one], FALSE),), drains=True),
            Action(
                "flash",
                "A lamp is lit that is armed, or while all are dark.",
                (one,),
                armed[one].equals(TRUE) | dark,
                (Assign(on[one], TRUE),),
            ),
            Action("disarm", "A lamp is disarmed.", (one,), TRUE, (Assign(armed[one], FALSE),)),
        ),
        forgets=(),
        always=(Claim(Property.CONSERVATION, "At most one lamp is on.", single),),
        sometimes=(),
        rest=ForAll(one, on[one].equals(FALSE)),
        rank=Total(one, on[one]),
        invariants=(Claim("none is armed", "No lamp is armed.", ForAll(one, armed[one].equals(FALSE))),),
    )


def without_invariants(declared: Declaration) -> Declaration:
    return replace(declared, invariants=())


class Lamps(DeclaredModel):
    """A model whose versions a test chooses."""

    name, says = "lamps", "at most one lamp"
    scopes: Mapping[str, object] = {}
    made: Sequence[Declaration] = ()

    def versions(self) -> dict[str, tuple[Declaration, ...]]:
        return {"lamps": tuple(self.made)}
