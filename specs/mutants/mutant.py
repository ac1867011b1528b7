"""A mutant: a wrong version of kvsm's code that a developer could plausibly have written."""

from __future__ import annotations

from museum.exhibit import Bug


class Mutant(Bug, frozen=True, kw_only=True):
    """One wrong version of kvsm's code.

    area: the part of kvsm whose code is wrong.
    story: the mistake, and its effect for a user.
    shows_when: a legal use that shows the effect, as proof that the mutant differs from the right code.
    """

    area: str
    shows_when: str

    @property
    def origin(self) -> str:
        return f"mutant of {self.area}"
