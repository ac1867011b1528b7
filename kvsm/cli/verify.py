"""`kvsm verify`: check every property that a log can show, at every event. It needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.checker.conformance.verdict import ProtocolVerdict, ProtocolVerification
from kvsm.cli.counting import counting
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.log_answers import end_lines, leave, print_rows
from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.output import Command, complain, in_green, in_red, in_yellow, say, say_json
from kvsm.invariants import PROPERTIES
from kvsm.replay import Verification, verify_log


class VerifyAnswer(Verification, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.verify/1"):
    """What `kvsm verify --json` prints: whether a log keeps every property that it can show.

    good: no property is broken, and no event is missing except in a torn tail.
    first, last: numbers of the events that were verified.
    events: events verified.
    entries: blocks named in these events.
    digest: the digest of the state after the last event that folds.
    violations: what the first wrong event breaks; empty if none does.
    breakage: that event in detail.
    damage: where and why the log cannot be read further.
    condition: what else is wrong with the log.
    restarts: what each restart kept of the process before it, a line each.
    unfinished: what is open at the end; null if the log could not be folded to its end.
    finished: nothing is open at the end, and the engine closed its log without an error.
    seconds: wall time.
    protocols: with `--protocol`, for each declared protocol whether each event is an instance of its actions.
    """

    is_good: bool = msgspec.field(name="good")
    is_finished: bool = msgspec.field(name="finished")
    protocols: tuple[ProtocolVerification, ...] = ()


@click.command(cls=Command)
@log_argument()
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 also if business is unfinished: a request, copy, wait or plan without an end, a device "
    "block still held, or an engine that did not close LOG (it still runs, was killed, or met an error).",
)
@click.option(
    "--protocol",
    "with_protocol",
    is_flag=True,
    help="Also compare LOG with the protocols of `kvsm check protocol` and `kvsm check requests`: each event "
    "must be an instance of their declared actions.",
)
@trust_options
@json_option
def verify(log: Path, strict: bool, with_protocol: bool, as_json: bool, **trust: Any) -> None:
    """Check every property that LOG can show, at every event.

    Names the first event that breaks one, and the last ten events of the same slots, transfers or requests.
    Then tells what is open where LOG ends: requests, copies by rank, waits, plans, device blocks.

    Exits with 1 if a property is broken, if an event differs from the protocol, or if the log is damaged or
    lacks events.
    """
    with counting("verified", "events") as progress:
        verification = verify_log(log, progress=progress, **trust)
    protocols = _compare_with_protocols(log, trust) if with_protocol else ()
    finished = verification.unfinished is not None and verification.unfinished.finished
    if as_json:
        facts = msgspec.structs.asdict(verification)
        say_json(VerifyAnswer(**facts, is_good=verification.good, is_finished=finished, protocols=protocols))
    else:
        _print_verification(verification, protocols)
    verdicts = [one.verdict for one in protocols]
    conforms = ProtocolVerdict.DIFFERS not in verdicts
    leave(verification.condition, good=verification.good and conforms and (finished or not strict))
    if ProtocolVerdict.UNDETERMINED in verdicts:
        raise SystemExit(ExitCode.UNDETERMINED)


def _compare_with_protocols(log: Path, trust: dict[str, Any]) -> tuple[ProtocolVerification, ...]:
    from kvsm.checker.conformance.verifier import PROTOCOLS, verify_protocol

    found = []
    for number, one in enumerate(PROTOCOLS, 1):
        with counting("compared", f"events with protocol {number} of {len(PROTOCOLS)}") as progress:
            found.append(verify_protocol(log, conformance=one, progress=progress, **trust))
    return tuple(found)


def _print_verification(found: Verification, protocols: tuple[ProtocolVerification, ...]) -> None:
    rate = found.events / found.seconds if found.seconds else 0
    print_rows(
        ("log", found.log),
        ("events", f"{found.events:,} ({found.first:,} to {found.last:,}), {found.entries:,} entries"),
        *(("restart", line) for line in found.restarts),
        ("time", f"{found.seconds:.3f} s, {rate:,.0f} events/s"),
        ("properties", ", ".join(map(str, PROPERTIES))),
        ("digest", found.digest),
        ("verdict", _verdict(found)),
        *(("protocol", _in_colour(one)) for one in protocols),
    )
    if found.breakage is not None:
        say("", *found.breakage.told())
    for protocol in protocols:
        if protocol.mismatch is not None:
            say("", *protocol.mismatch.told())
    if found.unfinished is not None:
        say("", "at the end:", *end_lines(found.unfinished))
    if found.damage is not None:
        complain(found.damage)


def _in_colour(protocol: ProtocolVerification) -> str:
    colours = {
        ProtocolVerdict.CONFORMS: in_green,
        ProtocolVerdict.DIFFERS: in_red,
        ProtocolVerdict.UNDETERMINED: in_yellow,
    }
    return colours[protocol.verdict](protocol.summary())


def _verdict(found: Verification) -> str:
    if found.violations:
        return in_red(f"broken: {', '.join(sorted({str(one.property) for one in found.violations}))}")
    whole = found.damage is None and found.condition.complete
    verdict = "no violation" if whole else "no violation in what is left of an incomplete log"
    if found.unfinished is not None and not found.unfinished.finished:
        return in_yellow(f"{verdict}; not finished (see the end)")
    return in_green(verdict) if whole else in_yellow(verdict)
