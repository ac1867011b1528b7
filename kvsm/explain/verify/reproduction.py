"""Turn a broken property into a test: a part of the log that shows it, and a pytest file that replays it.

The part begins with a snapshot of the state and ends with the event that breaks the property. A snapshot
lacks some facts that a witness of the whole log has (why a block failed, which pins were voided). So a part
is used only if the same event breaks the same properties in it. A few parts are tried, the shortest first;
the last is the log from its beginning, or from its last gap, to the event.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import LogReader, LogWriter, WholeState
from kvsm.errors import ConfigError, LogError
from kvsm.explain.story import Breakage, Verification, rebuild, verify_log

DISTANCES = (50, 1_000, 20_000)
"""How many events before the broken one a part begins. The first part that fails in the same way is used."""


class Reproduction(NamedTuple):
    """The test that was written.

    test: the pytest file.
    log: the directory of the part of the log, beside the file.
    first, last: first and last event of the part. `last` breaks the properties.
    breakage: the properties that it breaks.
    """

    test: Path
    log: Path
    first: int
    last: int
    breakage: Breakage


def write_reproduction(
    log: Path,
    at: int | None,
    test: Path | None,
    *,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
) -> Reproduction:
    """Write a test that shows the first broken property of a log.

    at: the last event to search for it; None: the last event of the log.
    test: the file to write; None: `test_repro_N.py` in the working directory, N being the broken event.
    allow_policies, max_slots: as in `Trust`; the test reads its log with the same values.

    Raises `LogError` if no property is broken up to `at`, and `ConfigError` if the file exists already or
    cannot be written. After an error there is no file.
    """
    whole = verify_log(log, allow_policies=allow_policies, max_slots=max_slots)
    breakage = _breakage(whole, at)
    test = Path(f"test_repro_{breakage.event}.py") if test is None else test
    _refuse_name(test)
    target = test.with_name(f"{test.stem}_log")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{test.stem}.", dir=test.parent) as scratch:
            for number, first in enumerate(_beginnings(whole, breakage.event)):
                part = Path(scratch) / str(number)
                _cut(log, part, first, breakage.event, allow_policies, max_slots)
                found = verify_log(part, allow_policies=allow_policies, max_slots=max_slots).breakage
                if found is not None and _same(found, breakage):
                    part.rename(target)
                    break
            else:
                raise LogError(f"{log}: a part of it does not fail as the whole does; keep the log itself")
        text = _test_text(breakage, target.name, first, allow_policies, max_slots)
        _write_new(test, text, target)
    except OSError as error:
        raise ConfigError(f"{test}: the test cannot be written: {error.strerror or error}") from error
    return Reproduction(test, target, first, breakage.event, breakage)


def _breakage(found: Verification, at: int | None) -> Breakage:
    """The breakage that the test must show. Raises `LogError` if no test can show it."""
    breakage = found.breakage
    if breakage is None:
        where = "in the part that can be read" if found.damage else f"up to its last event, {found.last}"
        raise LogError(f"{found.log}: no property is broken {where}, so there is no failure to reproduce")
    if breakage.kind == "SegmentHead":
        raise LogError(
            f"{found.log}: what is broken is {breakage.text}, not an event; no part of the log shows it, "
            "so keep the log itself"
        )
    if at is not None and at < breakage.event:
        raise LogError(
            f"{found.log}: no property is broken up to event {at}; the first broken one is at event "
            f"{breakage.event}"
        )
    return breakage


def _refuse_name(test: Path) -> None:
    """Raise `ConfigError` unless pytest collects a file of this name, and its paths are free."""
    if not (test.name.startswith("test_") and test.suffix == ".py" and test.stem.isidentifier()):
        raise ConfigError(f"{test}: pytest does not find this name; give one like test_incident.py")
    if not test.parent.is_dir():
        raise ConfigError(f"{test}: there is no directory {test.parent}")
    for path in (test, test.with_name(f"{test.stem}_log")):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path}: is there already; remove it, or give another name with --output")


def _write_new(test: Path, text: str, log: Path) -> None:
    """Write a file that does not exist yet. If that fails, delete the log beside it."""
    try:
        with open(test, "x", encoding="ascii") as file:
            file.write(text)
    except OSError:
        shutil.rmtree(log)
        raise


def _beginnings(whole: Verification, broken: int) -> Iterator[int]:
    """Yield the first events of the parts to try, the shortest part first. All are after the last gap."""
    oldest = max([whole.first, *(last + 1 for _, last in whole.condition.gaps if last < broken)])
    for distance in DISTANCES:
        if broken - distance > oldest:
            yield broken - distance
    yield oldest


def _cut(
    log: Path, part: Path, first: int, last: int, allow_policies: Collection[str], max_slots: int | None
) -> None:
    """Write the events `first` to `last` of a log as a log of one segment."""
    head = next(LogReader(log).segments(first)).head
    state = head.snapshot
    if first > head.seq + 1:
        before = rebuild(log, seq=first - 1, allow_policies=allow_policies, max_slots=max_slots)
        state = snapshot(before.ledger)
    with LogWriter(
        part,
        config=head.config,
        snapshot=lambda: WholeState(state),
        durability="none",
        segment_bytes=1 << 40,
        compress=True,
        first=first,
        checked=True,
    ) as writer:
        for segment in LogReader(log).segments(first):
            for event in segment.events():
                if event.seq > last:
                    return
                if event.seq >= first:
                    writer.append(event)


def _same(left: Breakage, right: Breakage) -> bool:
    return (left.event, left.text, _properties(left)) == (right.event, right.text, _properties(right))


def _properties(breakage: Breakage) -> set[str]:
    return {violation.property.id for violation in breakage.violations}


def _test_text(
    breakage: Breakage, log_name: str, first: int, allow_policies: Collection[str], max_slots: int | None
) -> str:
    """The text of the pytest file.

    It contains nothing from the log except numbers and names of properties. The policies are those that the
    user allowed.
    """
    properties = ", ".join(sorted({str(violation.property) for violation in breakage.violations}))
    trust = f", allow_policies={tuple(allow_policies)!a}" if allow_policies else ""
    trust += f", max_slots={max_slots}" if max_slots is not None else ""
    state = "the start of a log" if first == 1 else f"the state before event {first}"
    return f'''"""Event {breakage.event} breaks a property: {properties}. Written by `kvsm repro`.

{log_name}/ beside this file is the log from {state} to event {breakage.event}. Every command that reads a
log takes it: `kvsm verify {log_name}`, `kvsm show {log_name} --block 0`.
"""

from pathlib import Path

from kvsm.explain.story import verify_log

LOG = Path(__file__).with_name({log_name!a})


def test_no_event_breaks_a_property() -> None:
    """Replay the log, and check every property at every event."""
    found = verify_log(LOG{trust})
    assert found.breakage is None, "\\n".join(found.breakage.told())
    assert found.damage is None, found.damage
    assert found.last == {breakage.event}
'''
