"""Find the event after which a break was unavoidable: fork the log at many events, and verify each fork.

A fork repeats the calls of the log's engine on the real core. If the fork's log breaks no property, kvsm's
core avoids the break from that event on: the core that wrote the log decided differently. If the fork breaks
one too, the state was already wrong there, or the engine's calls themselves break the property.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from kvsm.core.log import LogReader
from kvsm.errors import ConfigError
from kvsm.explain.other_future import OtherChoices, fork
from kvsm.explain.story import verify_log
from kvsm.properties import Property

PROBES = 16
"""Number of forks before the bisection, which follows between the last good fork and the next bad one."""


class Probe(msgspec.Struct, frozen=True):
    """A fork at event `at`. broken: the first property that its log breaks; None: none."""

    at: int
    broken: Property | None


class Unavoidable(msgspec.Struct, frozen=True, tag_field="schema", tag="kvsm.unavoidable/1"):
    """What `kvsm fork --unavoidable --json` prints: from which event on a break was unavoidable.

    event: the first event of the log that breaks a property.
    broken: this property.
    probes: the forks, sorted by event.
    """

    event: int
    broken: Property
    probes: list[Probe]

    @property
    def avoided_until(self) -> int | None:
        """The last event at which a fork avoids the break; None: no fork does."""
        return max((probe.at for probe in self.probes if probe.broken is None), default=None)


def unavoidable(
    log: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] | None = None,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
) -> Unavoidable:
    """Find the event after which the break in this log was unavoidable.

    progress: called with the number of forks so far.
    allow_policies, max_slots: as in `kvsm.explain.story.Trust`.

    Raises `ConfigError` if no property is broken.
    """
    verification = verify_log(log, allow_policies=allow_policies, max_slots=max_slots)
    breakage = verification.breakage
    if breakage is None:
        raise ConfigError(f"{log}: no property is broken; fork it at an event (--at)")
    first, last = LogReader(log).head.seq + 1, breakage.event - 1
    if last < first:
        raise ConfigError(f"{log}: its first event is the broken one; there is nothing before it to fork")
    found: dict[int, Property | None] = {}

    def breaks(at: int) -> bool:
        if at not in found:
            with TemporaryDirectory(prefix="kvsm-fork-") as scratch:
                directory = Path(scratch) / "log"
                fork(
                    log,
                    at,
                    OtherChoices(),
                    directory,
                    until=breakage.event,
                    allow_policies=allow_policies,
                    max_slots=max_slots,
                )
                future = verify_log(directory, allow_policies=allow_policies, max_slots=max_slots)
            found[at] = future.violations[0].property if future.violations else None
            if progress is not None:
                progress(len(found))
        return found[at] is not None

    places = sorted({first + (last - first) * number // (PROBES - 1) for number in range(PROBES)})
    good = [at for at in places if not breaks(at)]
    if good and good[-1] < last:
        low, high = good[-1], next(at for at in places if at > good[-1])
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if breaks(middle) else (middle, high)
    probes = [Probe(at, found[at]) for at in sorted(found)]
    return Unavoidable(breakage.event, breakage.violations[0].property, probes)
