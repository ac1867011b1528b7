"""What the readers of a log tell of a session's hint and of its lease."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from core_life import keys, store

import kvsm
from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.events import HintAnswered, HintOutcome, HintReason, OffloadConfig
from kvsm.explain.metrics import Metrics

LEASE = "lease-4f1d2a3b-of-cmpl-42"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log in which a session holds two blocks, is refused once, and still holds two others at the end."""
    config = OffloadConfig(host_blocks=8, device_blocks=8, block_tokens=16)
    with Offloader.open(config, tmp_path / "log") as core:
        store(core, "cmpl-42", keys(4))
        core.pin(LEASE, [0, 1], None, 0, 0, 0)
        clipped, reason = HintOutcome.CLIPPED, HintReason.SHARE
        core.answer_hint(
            "cmpl-42", "mia's agent", LEASE, clipped, asked=4, leased=2, ttl_ms=60_000, why=reason
        )
        core.answer_hint("cmpl-42", "mia's agent", LEASE, HintOutcome.EXPIRED, asked=4, leased=2)
        core.finish(LEASE)
        core.answer_hint("cmpl-43", "", "", HintOutcome.REFUSED, why=HintReason.NOT_UNDERSTOOD)
        core.pin("lease-5-of-cmpl-44", [2, 3], None, 0, 0, 0)
        core.answer_hint("cmpl-44", "other", "lease-5-of-cmpl-44", HintOutcome.ACCEPTED, asked=2, leased=2)
    return tmp_path / "log"


def told(*command: str) -> str:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_the_story_of_a_request_has_the_answer_to_its_hint(log: Path) -> None:
    story = told("show", str(log), "--request", "cmpl-42")
    answer = "the hint of request cmpl-42 for session mia's agent is clipped: one session may hold no more; "
    assert f"{answer}{LEASE} keeps 2 of 4 blocks" in story
    assert f"the lease {LEASE} of session mia's agent ends with 2 blocks: expired" in story


def test_the_story_of_a_lease_begins_with_the_hint_and_ends_with_its_end(log: Path) -> None:
    story = told("show", str(log), "--request", LEASE)
    assert "it holds these blocks for another engine or a session" in story
    assert "ends with 2 blocks: expired" in story


def test_why_says_for_whom_a_lease_held_blocks(log: Path) -> None:
    assert "It held 2 slots on the host for session mia's agent" in told("why", str(log), LEASE)


def test_a_lease_is_no_hand_over_and_no_part_of_a_prompt(log: Path) -> None:
    values = Metrics.of(LogReader(log)).values()
    assert {name: count for name, count in values["hints"].items() if count} == {
        "accepted": 1,
        "clipped": 1,
        "refused": 1,
        "expired": 1,
    }
    assert not any(values["hand_overs"].values())
    assert sum(values["blocks_asked"].values()) == 0
    figures = json.loads(CliRunner().invoke(main, ["report", str(log), "--json"]).stdout)
    assert figures["hand_overs"] == {"taken": 0, "not_needed": 0, "given_up": 0, "held": 0}
    with kvsm.open(log) as opened:
        rows = opened.sql("SELECT request, session, held FROM requests WHERE session IS NOT NULL").fetchall()
    assert sorted(rows) == [(LEASE, "mia's agent", 2), ("lease-5-of-cmpl-44", "other", 2)]


def test_a_redacted_log_has_no_session_and_tells_the_same(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    told("export", str(log), "--redact", str(copy))
    assert not any(b"mia" in path.read_bytes() for path in copy.rglob("*") if path.is_file())
    events = [one for segment in LogReader(copy).segments() for one in segment.events()]
    answers = [one for one in events if isinstance(one, HintAnswered)]
    assert [str(one.outcome) for one in answers] == ["clipped", "expired", "refused", "accepted"]
    assert len({one.session for one in answers}) == 3
    assert answers[2].session == answers[2].lease == ""
    assert answers[0].lease.startswith("lease-")
    assert f"-of-{answers[0].request}" in answers[0].lease
    told("verify", str(copy))
