"""`kvsm why`: the answer, the evidence, and the command.

test_why_truth.py tests against whole runs whether the causes are right. This file tests their texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from core_life import keys
from explained import explanations, life_of

import kvsm
from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.errors import LogError
from kvsm.events import OffloadConfig
from kvsm.explain.story import tell
from kvsm.explain.tables.row_kinds import Gone
from kvsm.explain.why.causes import _WORDINGS, MOST_EVIDENCE, Explanation
from kvsm.explain.why.questions import explain_block, explain_keys, explain_request, explain_transfer
from kvsm.ids import render_key

BEGAN_NS = 1_763_802_000_000_000_000
"""2025-11-22T09:00:00Z."""


class Story:
    """A core with a log on disk and a clock that the test turns."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.directory, self.ms = directory, 0.0
        config = {"host_blocks": 4, "device_blocks": 32, "workers": 2, "block_tokens": 16} | config
        self.core = Offloader.open(
            OffloadConfig(**config), directory, clock_ns=lambda: BEGAN_NS + int(self.ms * 1e6)
        )

    def at(self, ms: float) -> Offloader:
        """The core at this time."""
        self.ms = ms
        return self.core

    def plan(self, request: str, names: Sequence[bytes], block: int = 0) -> int:
        """Plan to store these keys."""
        self.core.arrive(request)
        job = self.core.prepare_store(request, names, range(block, block + len(names))).job
        assert job is not None
        return job.transfer

    def store(self, request: str, names: Sequence[bytes], block: int = 0) -> int:
        """Store these keys, to the end."""
        transfer = self.plan(request, names, block)
        self.send(transfer)
        return transfer

    def send(self, transfer: int, *errors: str) -> None:
        """Submit a transfer, and let each rank report it. errors: of the ranks, "" for a good copy."""
        self.core.submit([transfer])
        for rank in range(self.core.config.workers):
            error = errors[rank] if rank < len(errors) else ""
            self.core.report(transfer, rank, not error, error)

    def close(self) -> kvsm.OpenedLog:
        """Close the log, and open its tables."""
        self.core.close()
        return kvsm.open(self.directory)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path / "log")


def answer(explanation: Explanation) -> str:
    return " ".join(explanation.answer)


def evidence(explanation: Explanation) -> list[str]:
    return [f"{one.event} {one.text}" for one in explanation.evidence]


def evicted(story: Story) -> None:
    """r1 stores a prompt, r2's store evicts it, and r3 looks for it."""
    core = story.core
    story.store("r1", keys(3))
    core.finish("r1")
    story.ms = 1000
    story.store("r2", keys(4, "other"), 8)
    story.at(3100).pin("r3", [], keys(1)[0], 4, 1, 0)
    story.at(3200).finish("r3")


def test_request_that_missed_what_was_evicted(story: Story) -> None:
    """The answer says what was found, for which request the missed key was evicted, and when."""
    evicted(story)
    with story.close() as log:
        found = explain_request(log, "r3")
    key = f"key {render_key(keys(1)[0])}"
    assert found.answer[0] == (
        "Request r3 found 1 (16 tokens) of the 4 blocks of its prompt on the device and 0 on the host, and "
        f"missed 3 (48 tokens): {key} was evicted at event 9, 2.10 s before, to make room for store 10 of "
        "request r2."
    )
    assert found.answer[1:] == ("It waited for no copy.", "It finished at event 15, 0.10 s after it came.")
    assert evidence(found) == [
        f"3 store 3 of request r1 is planned: {key} goes to slot 0",
        f"6 store 3 of request r1 is complete: {key} can be read",
        f"9 {key} was evicted to make room for store 10 of request r2",
        "10 store 10 of request r2 is planned, 4 slots",
        "11 store 10 of request r2 leaves for the workers",
        "13 rank 1 is the last to report store 10 of request r2, after 0 ns",
        "14 request r3 arrives",
        f"14 request r3 misses {key}",
        "15 request r3 finished",
    ]


def test_a_declined_hit_is_explained_with_its_times(tmp_path: Path) -> None:
    """The blocks are on the host, so only the expected times say why the request computed them."""
    story = Story(tmp_path / "log", load_only_if_faster=True)
    story.store("r1", keys(2))
    story.core.note_times(500, 10_000, 1_000)
    story.core.arrive("r2")
    assert story.core.declines("r2", 2, 32)
    story.core.pin("r2", [], None, 3, 0, 0)
    story.core.admit("r2", 3, 0, 0)
    with story.close() as log:
        found = explain_request(log, "r2")
        told = [line.text for line in tell(LogReader(story.directory), life_of("--request", "r2"))]
    assert found.answer[0] == (
        "Request r2 found 0 of the 3 blocks of its prompt on the device and 0 on the host, and missed 3 (48 "
        "tokens); loading 32 tokens from the host was declined at event 9, because it was expected to take "
        "520 us, and computing them 32 us (load_only_if_faster)."
    )
    assert "9 loading 32 tokens is expected to take 520 us, and computing them 32 us: declined" in (
        evidence(found)
    )
    assert any(
        "loading 2 blocks is expected to take 520 us, and computing their 32 tokens 32 us" in text
        for text in told
    )


def test_key_that_was_evicted(story: Story) -> None:
    """Who stored it, who used it, why it is gone, and who wanted it afterwards."""
    story.store("r1", keys(2))
    story.core.match("r2", keys(2))
    story.core.finish("r2")
    story.ms = 1000
    story.store("r3", keys(4, "other"), 8)
    story.at(3100).match("r4", keys(1))
    story.core.match("r5", keys(1))
    with story.close() as log:
        found = explain_keys(log, keys(1)[0].hex())[0]
    short = render_key(keys(1)[0])
    assert found.answer == (
        f"Key {short} was stored 1 time; the last time by store 3 of request r1, and it was "
        f"evicted at event "
        "10 to make room for store 11 of request r3, 1.00 s after it could be read.",
        "It served 1 lookup, the last one of request r2 at event 7.",
        "Request r4 missed it at event 15, 2.10 s later, and 1 lookup after that.",
    )


def test_wait_for_a_late_rank(story: Story) -> None:
    """On what a request waited, for how long, and which rank was late."""
    transfer = story.plan("r1", keys(2))
    story.core.submit([transfer])
    story.at(20).report(transfer, 0, True)
    assert story.at(100).match("r2", keys(2)).waits_for == transfer
    story.at(700).report(transfer, 1, True)
    story.core.match("r2", keys(2))
    with story.close() as log:
        found = explain_request(log, "r2")
    assert found.answer[1] == (
        f"It waited 0.60 s for store {transfer} of request r1 (rank 1 was late: it took 0.70 s, "
        f"and the others "
        "took 20.0 ms at most)."
    )
    assert "found 2 (32 tokens) of the 2 blocks that it asked for on the host; no key was" in answer(found)


def test_failed_store_is_told_with_the_error_of_its_rank(story: Story) -> None:
    transfer = story.plan("r1", keys(1))
    story.send(transfer, "", "CUDA error: out of memory")
    story.core.match("r2", keys(1))
    with story.close() as log:
        found = explain_request(log, "r2")
        about = explain_transfer(log, transfer)
    failed = "failed at event 6, 0 ns before: rank 1 failed (CUDA error: out of memory)."
    assert f"was not stored, because store {transfer} of request r1 {failed}" in answer(found)
    assert about.answer[0] == (
        f"Store {transfer} of request r1 copied 1 host slot; it failed at event 6, 0 ns after it "
        f"left: rank 1 "
        "failed (CUDA error: out of memory)."
    )


def test_ranks_that_never_reported_are_named_beside_many_failures(tmp_path: Path) -> None:
    """They are no failures, so they are not counted as such."""
    story = Story(tmp_path / "log", workers=7)
    transfer = story.plan("r1", keys(1))
    story.core.submit([transfer])
    for rank in range(6):
        story.core.report(transfer, rank, False, "bad bytes")
    with story.close() as log:
        about = explain_transfer(log, transfer)
    text = " ".join(about.answer)
    assert "rank 3 failed (bad bytes); 2 more failed; rank 6 has not reported" in text
    assert "rank 4" not in text


def test_failed_load_of_another_request(story: Story) -> None:
    story.store("r1", keys(1))
    story.core.match("r2", keys(1))
    job = story.core.prepare_load("r2", [9])
    assert job is not None
    story.send(job.transfer, "bad bytes")
    story.core.match("r3", keys(1))
    with story.close() as log:
        found, failed = explain_request(log, "r3"), explain_request(log, "r2")
    assert f"became void, because load {job.transfer} of request r2 failed" in answer(found)
    assert "rank 0 failed (bad bytes)" in answer(found)
    assert "1 of its 1 load failed" in answer(failed)


def test_request_that_waits_for_a_silent_rank_never_ended(story: Story) -> None:
    transfer = story.plan("r1", keys(2))
    story.core.submit([transfer])
    story.core.report(transfer, 0, True)
    story.core.match("r2", keys(2))
    with story.close() as log:
        found = explain_request(log, "r2")
    assert found.answer[-1] == (
        f"It never ended: it still waits for store {transfer} of request r1, and rank 1 has not reported."
    )


def test_requests_that_wait_for_each_other_are_told_as_a_chain(story: Story) -> None:
    """Each waits for a load of the other request that was planned and never submitted."""
    core = story.core
    story.store("r1", keys(2))
    loads = []
    for number, name in enumerate(("a", "b")):
        core.match(name, keys(2)[number : number + 1])
        job = core.prepare_load(name, [20 + number])
        assert job is not None
        loads.append(job.transfer)
    for name, load in zip("ab", reversed(loads)):
        core.preempt(name)
        core.defer(name, load)
    with story.close() as log:
        found = explain_request(log, "a")
    unsent = "which was planned and never left for the workers"
    assert found.answer[-1] == (
        f"It never ended: it still waits for load {loads[1]} of request b, {unsent}; it belongs to "
        f"request b, which "
        f"waits for load {loads[0]} of request a, {unsent}; it belongs to request a, and so they wait "
        f"for each other"
        "; it was preempted 1 time."
    )


def test_request_that_the_engine_never_finished(story: Story) -> None:
    story.core.match("r1", keys(1))
    with story.close() as log:
        found = explain_request(log, "r1")
    assert found.answer[-1] == (
        "It never ended: it is RUNNING where the log ends, and waits for no copy. As for the "
        "engine, it closed "
        "the log."
    )


def test_name_that_is_used_again_means_its_last_life(story: Story) -> None:
    evicted(story)
    story.core.match("r3", keys(4, "other"))
    with story.close() as log:
        found = explain_request(log, "r3")
    assert found.about == "request r3 (the last of 2 requests of this name)"
    assert "4 (64 tokens) of the 4 blocks" in found.answer[0]


def test_nothing_is_looked_for_while_a_reset_drains(story: Story) -> None:
    """The log has no missed key then, and a request that found nothing must not look as if all was there."""
    transfer = story.plan("r1", keys(1))
    story.core.submit([transfer])
    story.core.reset()
    story.core.pin("r2", [], None, 4, 0, 0)
    with story.close() as log:
        found = explain_request(log, "r2")
    assert "nothing was looked for, because the reset at event 5 was still draining" in answer(found)


def test_readable_key_that_was_answered_as_missing_is_told(story: Story) -> None:
    """A recorder of another manager may see this: it is a bug there, and no reason to fail here."""
    story.store("r1", keys(1))
    story.core.pin("r2", [], keys(1)[0], 1, 0, 0)
    with story.close() as log:
        found = explain_request(log, "r2")
    assert "was answered as missing, although it could be read" in answer(found)


def test_offer_that_was_skipped_since_is_told(story: Story) -> None:
    """The eviction alone does not say why the block is not there again."""
    evicted(story)
    story.core.match("r4", keys(4, "other"))
    assert story.core.prepare_store("r5", keys(1), [20]).job is None
    story.core.match("r6", keys(1))
    with story.close() as log:
        found = explain_request(log, "r6")
    assert "it was offered again and skipped at event 17" in answer(found)
    assert ": pool full; offered by request r5." in answer(found)


def test_slot_tells_its_blocks_in_turn(story: Story) -> None:
    evicted(story)
    with story.close() as log:
        found, never = explain_block(log, 0), explain_block(log, 3)
        with pytest.raises(LogError, match="there is no slot 4; the pool has slots 0 to 3"):
            explain_block(log, 4)
    key = keys(4, "other")
    assert found.answer[0] == "Slot 0 held 2 blocks in turn; 2 of them served no lookup."
    assert "It holds key" in found.answer[1]
    assert key[0].hex()[:12] in answer(never)


def test_transfer_names_who_waited_and_what_became_of_its_blocks(story: Story) -> None:
    evicted(story)
    with story.close() as log:
        found = explain_transfer(log, 10)
    assert found.answer == (
        "Store 10 of request r2 copied 4 host slots and had 3 blocks evicted for it; it "
        "completed at event 13, "
        "0 ns after it left.",
        "No other request waited for it.",
        "Of its 4 blocks, 4 are still on the host, and 0 went without serving a lookup; together they served "
        "0 lookups.",
    )


def test_long_evidence_is_cut_in_the_middle(story: Story) -> None:
    for _ in range(2 * MOST_EVIDENCE):
        story.core.match("r1", keys(1))
        story.core.preempt("r1")
    with story.close() as log:
        found = explain_request(log, "r1")
    assert len(found.evidence) == MOST_EVIDENCE
    assert found.left_out > 0
    assert found.evidence[-1].event > 2 * MOST_EVIDENCE


def test_every_reason_has_words() -> None:
    assert set(_WORDINGS) == set(Gone)


def test_show_tells_each_line_of_the_evidence(story: Story) -> None:
    """Every answer can be checked: `kvsm show` prints the event in the life that the evidence names."""
    evicted(story)
    transfer = story.plan("r5", keys(1, "third"), 20)
    story.core.submit([transfer])
    story.core.match("r6", keys(1, "third"))
    story.send(story.plan("r7", keys(1, "fourth"), 21), "bad")
    story.core.match("r8", keys(1, "fourth"))
    story.core.reset()
    story.core.match("r9", keys(1, "other"))
    with story.close() as log:
        lines = {(line.show, line.event) for one in explanations(log) for line in one.evidence}
    assert len(lines) > 40
    for thing in {show for show, _ in lines}:
        told = {line.event for line in tell(LogReader(story.directory), life_of(*thing))}
        assert {event for show, event in lines if show == thing} <= told, thing


# The command.


def why(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["why", *[str(one) for one in arguments]])


@pytest.fixture
def log(story: Story) -> Path:
    evicted(story)
    story.core.match("chat-1-0a1b2c3d", keys(1))
    story.core.match("chat-2-aaaaaaaa", keys(1))
    story.core.match("chat-2-bbbbbbbb", keys(5, "other")[4:])
    story.core.close()
    return story.directory


def test_command_gives_the_answer_first(log: Path) -> None:
    """Then come the events with step and UTC time, and commands that show more."""
    result = why(log, "r3")
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert lines[0] == "request r3"
    assert lines[1].startswith("  Request r3 found 1 (16 tokens)")
    assert "  event 9  step 0  2025-11-22T09:00:01.000Z +1.000s  key" in result.stdout
    assert f"kvsm show {log} --request r3" in result.stdout


def test_json_has_a_schema_and_the_evidence(log: Path) -> None:
    found = json.loads(why(log, "--transfer", 10, "--json").stdout)
    assert next(iter(found)) == "schema"
    assert found["schema"] == "kvsm.why/1"
    (one,) = found["explanations"]
    assert one["about"] == "transfer 10"
    assert {line["event"] for line in one["evidence"]} >= {9, 10, 11, 13}
    assert one["evidence"][0]["show"] == ["--transfer", "10"]


def test_request_is_found_by_the_name_of_its_client(log: Path) -> None:
    assert why(log, "chat-1").stdout.startswith("request chat-1-0a1b2c3d\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chat-2"], "2 requests are named chat-2: chat-2-aaaaaaaa, chat-2-bbbbbbbb"),
        (["r33"], "there is no request r33; did you mean r3"),
        (["--transfer", "12"], "there is no transfer 12; the nearest are 10 and 3"),
        (["--key", "ffff"], "no key ffff was stored or looked for"),
        (["--key", "xyz"], "key 'xyz' is not made of hex digits"),
        (["--key", "6f"], "more than 4 keys are like 6f"),
        (["--block", "99"], "there is no slot 99; the pool has slots 0 to 3"),
        ([], "why takes exactly one of REQUEST, --key, --transfer and --block"),
        (["r3", "--block", "1"], "why takes exactly one of REQUEST, --key, --transfer and --block"),
        (["r3", "--until", "9"], "request r3 is not in this part of the log"),
        (["r3", "--since", "+1h"], "no event is at or after --since"),
    ],
)
def test_unusable_question_is_one_clear_line(log: Path, arguments: list[str], said: str) -> None:
    result = why(log, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_directory_without_a_log_is_one_clear_line(tmp_path: Path) -> None:
    result = why(tmp_path, "r1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no log here" in result.stderr


def test_keys_of_several_groups_are_all_explained(story: Story) -> None:
    """The groups of a hybrid model share the beginning of a key."""
    story.store("r1", [keys(1, "p", group)[0] for group in range(2)])
    story.core.close()
    result = why(story.directory, "--key", keys(1)[0].hex()[:10])
    assert result.stdout.count("was stored 1 time") == 2


def test_what_a_log_names_is_shown_harmless(story: Story) -> None:
    """A request's id is data: it moves no cursor and forges no line."""
    name = "r\x1b[2Jx\nkvsm: forged"
    story.core.match(name, keys(1))
    story.core.close()
    result = why(story.directory, name)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "\nkvsm: forged" not in result.stdout


def test_damage_ends_the_answer_and_exits_with_1(log: Path) -> None:
    (segment,) = log.glob("*.kvsm")
    content = bytearray(segment.read_bytes())
    content[-200] ^= 0xFF
    segment.write_bytes(content)
    result = why(log, "r1")
    assert result.exit_code == 1
    assert "damage" in result.stderr or "checksum" in result.stderr
