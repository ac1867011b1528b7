"""`kvsm verify`: check every property that a log can show, at every event. It needs no torch.

If the log of the other tier lies beside the log, both are verified, and their records of the copies between
the tiers are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from kvsm.check.conformance.verdict import ProtocolVerdict, ProtocolVerification
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.jobs_options import chosen_executor, local_jobs_option
from kvsm.cli.log_answers import end_lines, print_rows
from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.cli.progress import counting
from kvsm.cli.toned import in_green, in_red, in_yellow
from kvsm.core.ledger.invariants import PROPERTIES
from kvsm.errors import LogError
from kvsm.explain.other_tier import is_named_disk, log_of
from kvsm.explain.story import Verification, verify_log
from kvsm.explain.verify.auditor import default_jobs
from kvsm.explain.verify.logged_copies import LogAgreement, LoggedCopies, VerifiedLog, compare_logs
from kvsm.properties import Property
from kvsm.tiers.disk_tier import DISK, HOST


class OtherTierVerification(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvsm verify` finds in the log of the other tier.

    tier: `host` or `disk`.
    good, finished, protocols: as in `VerifyAnswer`, but for this log; null if there is no verification.
    verification: the result for this log; null if there is no such log, or it cannot be read.
    why_not: the reason if `verification` is null.
    agreement: whether both logs agree on the copies between the tiers; null if one cannot be read.
    """

    tier: str
    is_good: bool | None = msgspec.field(name="good", default=None)
    is_finished: bool | None = msgspec.field(name="finished", default=None)
    verification: Verification | None = None
    protocols: tuple[ProtocolVerification, ...] = ()
    why_not: str | None = None
    agreement: LogAgreement | None = None


class VerifyAnswer(Verification, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.verify/1"):
    """What `kvsm verify --json` prints: whether a log keeps every property that it can show.

    good: no property is broken, and no event is missing except in a torn tail.
    first, last: numbers of the events that were verified.
    events: number of events verified.
    entries: number of blocks named in these events.
    digest: the digest of the state after the last event that could be folded.
    violations: the properties that the first wrong event breaks; empty if none does.
    breakage: that event in detail.
    damage: where and why the log cannot be read further.
    condition: what else is wrong with the log.
    restarts: what each restart kept of the process before it, a line each.
    unfinished: what is open at the end; null if the log could not be folded to its end.
    finished: nothing is open at the end, and the engine closed its log without an error.
    seconds: wall time.
    protocols: with `--protocol`, whether each event is an instance of an action, for each declared protocol.
    other_tier: the result for the log of the other tier; null: there is no other tier, or `--alone`.
    """

    is_good: bool = msgspec.field(name="good")
    is_finished: bool = msgspec.field(name="finished")
    protocols: tuple[ProtocolVerification, ...] = ()
    other_tier: OtherTierVerification | None = None


class _Checked(NamedTuple):
    """The result for one log."""

    found: Verification
    copies: LoggedCopies
    protocols: tuple[ProtocolVerification, ...]

    @property
    def finished(self) -> bool:
        return self.found.unfinished is not None and self.found.unfinished.finished

    def passes(self, strict: bool) -> bool:
        verdicts = [one.verdict for one in self.protocols]
        return self.found.good and ProtocolVerdict.DIFFERS not in verdicts and (self.finished or not strict)


class _Other(NamedTuple):
    """The result for the log of the other tier.

    why_not: why its log is not verified; None if it is.
    is_there: whether a log of the tier lies beside the log that the user named.
    """

    tier: str
    checked: _Checked | None = None
    agreement: LogAgreement | None = None
    why_not: str | None = None
    is_there: bool = False

    def answer(self) -> OtherTierVerification:
        one = self.checked
        return OtherTierVerification(
            tier=self.tier,
            is_good=None if one is None else one.found.good,
            is_finished=None if one is None else one.finished,
            verification=None if one is None else one.found,
            protocols=() if one is None else one.protocols,
            why_not=self.why_not,
            agreement=self.agreement,
        )


@click.command(cls=Command)
@log_argument()
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 also if anything is unfinished: a request, copy, wait or plan without an end, a device "
    "block still held, or an engine that did not close LOG (it still runs, was killed, or met an error).",
)
@click.option(
    "--protocol",
    "with_protocol",
    is_flag=True,
    help="Also compare LOG with the protocols of `kvsm check protocol` and `kvsm check requests`: each event "
    "must be an instance of their declared actions.",
)
@click.option("--alone", is_flag=True, help="Verify LOG, and not the log of the other tier beside it.")
@local_jobs_option(
    "Processes that verify segments of LOG side by side. The answer is the same for any N.  [default: one "
    "per CPU, fewer for a log of few segments, a small one or very large pools]"
)
@trust_options
@json_option
def verify(
    log: Path,
    strict: bool,
    with_protocol: bool,
    alone: bool,
    jobs: int | None,
    as_json: bool,
    **trust: Any,
) -> None:
    """Check every property that LOG can show, at every event.

    Prints the first event that breaks a property, and the last ten events of the same slots, transfers or
    requests. Then lists what is open where LOG ends: requests, copies by rank, waits, plans, device blocks.

    Host pool and disk have a log each. If the other log lies beside LOG, it is verified too, and both must
    agree on each copy between the tiers.

    Exits with 1 if a property is broken, if an event differs from the protocol, if a log is damaged or lacks
    events, or if the logs of two tiers disagree on a copy.
    """
    checked = _check(log, with_protocol, jobs, trust)
    other = None if alone else _check_other(log, checked, with_protocol, jobs, trust)
    if as_json:
        answer = VerifyAnswer(
            **msgspec.structs.asdict(checked.found),
            is_good=checked.found.good,
            is_finished=checked.finished,
            protocols=checked.protocols,
            other_tier=None if other is None else other.answer(),
        )
        say_json(answer)
    else:
        _print_log(checked, None if other is None else checked.copies.tier)
        if other is not None:
            _print_other(other)
    _leave(checked, other, strict)


def _check(log: Path, with_protocol: bool, jobs: int | None, trust: dict[str, Any]) -> _Checked:
    copies = LoggedCopies(is_named_disk(log))
    with (
        chosen_executor(None, jobs or default_jobs(log)) as executor,
        counting("verified", "events") as progress,
    ):
        found = verify_log(log, progress=progress, hearer=copies, executor=executor, **trust)
    return _Checked(found, copies, _compare_with_protocols(log, trust) if with_protocol else ())


def _check_other(
    log: Path, checked: _Checked, with_protocol: bool, jobs: int | None, trust: dict[str, Any]
) -> _Other | None:
    """Verify the log of the other tier, and compare both logs; None if there is no other tier."""
    tier = HOST if checked.copies.tier == DISK else DISK
    other = log_of(tier, log)
    if other.log is None:
        exchanges = tier == HOST or checked.copies.first
        return _Other(tier, why_not=f"no log of the {tier} lies beside {log}") if exchanges else None
    try:
        found = _check(other.log, with_protocol, jobs, trust)
    except LogError as error:
        return _Other(tier, why_not=str(error), is_there=True)
    if found.copies.tier != tier:
        return None
    logs = {one.copies.tier: VerifiedLog(one.found, one.copies) for one in (checked, found)}
    return _Other(tier, found, compare_logs(logs[HOST], logs[DISK], other.one_process), is_there=True)


def _leave(checked: _Checked, other: _Other | None, strict: bool) -> None:
    """Print on standard error what is wrong with the logs, and exit with the code of the worst finding."""
    logs = [checked] if other is None or other.checked is None else [checked, other.checked]
    for one in logs:
        for note in one.found.condition.notes():
            complain(note if other is None else f"log of the {one.copies.tier}: {note}")
    differ = other is not None and other.agreement is not None and other.agreement.difference is not None
    if differ or not all(one.passes(strict) for one in logs):
        raise SystemExit(ExitCode.BROKEN)
    if other is not None and other.is_there and other.checked is None:
        raise SystemExit(ExitCode.UNUSABLE)
    if any(two.verdict is ProtocolVerdict.UNDETERMINED for one in logs for two in one.protocols):
        raise SystemExit(ExitCode.UNDETERMINED)


def _compare_with_protocols(log: Path, trust: dict[str, Any]) -> tuple[ProtocolVerification, ...]:
    from kvsm.check.conformance.verifier import PROTOCOLS, verify_protocol

    found = []
    for number, one in enumerate(PROTOCOLS, 1):
        with counting("compared", f"events with protocol {number} of {len(PROTOCOLS)}") as progress:
            found.append(verify_protocol(log, conformance=one, progress=progress, **trust))
    return tuple(found)


def _print_log(checked: _Checked, tier: str | None) -> None:
    """Print the result for one log. tier: the tier of the log; None if only one log was verified."""
    found, protocols = checked.found, checked.protocols
    rate = found.events / found.seconds if found.seconds else 0
    print_rows(
        *(() if tier is None else (("tier", tier),)),
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


def _print_other(other: _Other) -> None:
    say("")
    if other.checked is None or other.agreement is None:
        print_rows(("tier", other.tier), ("verdict", in_yellow(f"not verified: {other.why_not}")))
        return
    _print_log(other.checked, other.tier)
    say("", "both tiers:")
    print_rows(*_agreement_rows(other.agreement))


def _agreement_rows(agreement: LogAgreement) -> Iterator[tuple[str, str]]:
    difference, steps = agreement.difference, f"{agreement.steps:,} steps of copies between the tiers"
    if difference is not None:
        yield "verdict", in_red(f"broken: {Property.CONSERVATION}; the logs differ after {steps}")
        yield from (("difference", line) for line in difference.told())
    elif agreement.steps:
        yield "verdict", in_green(f"both logs agree on {steps}")
    else:
        yield "verdict", in_yellow("no step of a copy between the tiers was compared")
    yield from (("left out", in_yellow(line)) for line in agreement.not_compared)


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
