"""Logs of incidents with random kinds, strengths and background loads.

    made = generate(7, tmp_path / "log")
    made.causes  # (("rank fails",),): for each incident, the names of troubles that tell its cause

A third of the logs are healthy, a third have one incident, a third have two. A seed gives the same log again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

from generated_incidents.backgrounds import BACKGROUNDS, ODD, ODDITIES, Background
from generated_incidents.hidden_kinds import HIDDEN
from generated_incidents.kinds import Kind, together
from generated_incidents.scenes import Played, play
from generated_incidents.visible_kinds import VISIBLE

KINDS: dict[str, Kind] = {**VISIBLE, **HIDDEN}


class Made(NamedTuple):
    """A generated log. kinds: its incidents; none: it is healthy."""

    played: Played
    background: str
    kinds: tuple[Kind, ...]

    @property
    def directory(self) -> Path:
        """The directory of the log."""
        return self.played.directory

    @property
    def causes(self) -> tuple[tuple[str, ...], ...]:
        """For each incident, the names of troubles that tell its cause."""
        return tuple([one.causes for one in self.kinds])


def generate(seed: int, directory: Path) -> Made:
    """Draw a background and up to two kinds, and make the log in this new directory."""
    return make(seed, directory, *draw(seed))


def draw(seed: int) -> list[Kind]:
    """Draw no, one or two kinds that go together."""
    random = Random(f"incidents {seed}")
    number, drawn = random.randrange(3), list[Kind]()
    while len(drawn) < number:
        one = random.choice(list(KINDS.values()))
        if together((one, *drawn)) and loads(one, *drawn):
            drawn.append(one)
    return drawn


def make(seed: int, directory: Path, *kinds: Kind, background: str | None = None) -> Made:
    """Make a log with these kinds, over a background that they need. background: None: a random one."""
    random = Random(f"scene {seed}")
    load = BACKGROUNDS[background] if background else random.choice(loads(*kinds))
    scene = load.make(random)
    for change in ODDITIES:
        if random.random() < ODD:
            change(scene)
    for one in kinds:
        one.disturb(scene)
    return Made(play(scene, directory, seed), load.name, kinds)


def loads(*kinds: Kind) -> list[Background]:
    """Return the backgrounds that have what these kinds need."""
    needs = frozenset().union(*[one.needs for one in kinds])
    return [one for one in BACKGROUNDS.values() if needs <= one.features]
