"""A mutant: a wrong version of kvsm's code that somebody could plausibly have written."""

from __future__ import annotations

from museum.exhibit import Bug


class Mutant(Bug, frozen=True, kw_only=True):
    """One wrong version.

    area: the part of kvsm whose code is wrong.
    story: what the code does wrong, and what a user would see.
    shows_when: a legal use that shows it. So the mutant is not equal to the right code.
    """

    area: str
    shows_when: str

    @property
    def origin(self) -> str:
        return f"mutant of {self.area}"
