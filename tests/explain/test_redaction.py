"""`kvsm export --redact`: the copy names nothing of the original, and readers tell the same story of it."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import incidents
import msgspec
import pytest
from changed_logs import PlainLog, read_plain, write_plain
from click.testing import CliRunner
from explained import explanations
from hypothesis import example, given
from hypothesis import strategies as st
from log_life import Life as LogLife
from log_life import disk
from msgspec.structs import replace
from places import ROOT
from policies_for_tests import ChoosesByNumpy
from replay_life import Life, random_life, written
from two_tier_life import DISK_CONFIG, HOST_CONFIG, live

import kvsm
from examples import examples, seeds_of_today
from kvsm import events as ev
from kvsm.cli import main
from kvsm.core.ledger import RequestRecord, TransferRecord
from kvsm.core.ledger.snapshot import SavedLedger
from kvsm.core.log import LogEnd, LogReader, Segment
from kvsm.core.log.frames import MARK, MARK_OFFSET
from kvsm.core.log.stop_mark import NAME, stopped_by
from kvsm.core.offloader import Offloader
from kvsm.core.policies import ADMITTING, POLICIES, WITHHELD
from kvsm.errors import ConfigError
from kvsm.events import KINDS, OffloadConfig
from kvsm.explain.redaction.names import NewNames
from kvsm.explain.redaction.redacted_log import RedactedLog, redact_log
from kvsm.explain.redaction.rules import (
    EVENT_FIELDS,
    POLICY_STATES,
    RULES,
    kept_numbers,
    later,
    rules_of,
)
from kvsm.explain.story import verify_log
from kvsm.explain.tables import table_index
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.ids import render_key
from kvsm.states import machines_digest

FOREIGN = "policies_for_tests:ChoosesByNumpy"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(one) for one in arguments])


# Every field has a rule.


def structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs that a type can hold, and those that they can hold."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
        for inner in get_type_hints(hint).values():
            yield from structs_in(inner)
    for inner in getattr(hint, "__args__", ()):
        yield from structs_in(inner)


WRITTEN = {
    *KINDS,
    *(kind for one in (*KINDS, *RULES) for kind in structs_in(one)),
    *(kind for kind in POLICY_STATES.values() if kind is not None),
    TransferRecord,
    RequestRecord,
}
"""Every struct that a log holds."""


@pytest.mark.parametrize("kind", sorted(WRITTEN, key=lambda kind: kind.__name__))
def test_each_field_of_a_log_has_a_rule(kind: type[msgspec.Struct]) -> None:
    """A new field may hold a name. Add its rule to kvsm/explain/redaction/rules.py."""
    assert [*rules_of(kind)] == [*kind.__struct_fields__]


def test_each_rule_is_of_a_field_that_a_log_holds() -> None:
    assert {*EVENT_FIELDS} == {field for kind in KINDS for field in kind.__struct_fields__}
    assert {*RULES} == {kind for kind in WRITTEN if kind not in KINDS}
    assert [kind for kind, rules in RULES.items() if {*rules} != {*kind.__struct_fields__}] == []


def test_bytes_are_kept_only_where_they_are_packed_numbers() -> None:
    """`later` stands for the state of a policy, which `POLICY_STATES` describes."""
    found = {
        f"{kind.__name__}.{field}"
        for kind, rules in RULES.items()
        for field, rule in rules.items()
        if rule in (kept_numbers, later)
    }
    queues = {"ARCState.t1", "ARCState.t2", "S3FIFOState.small", "S3FIFOState.main", "S3FIFOState.uses"}
    saved = {f"SavedLedger.{field}" for field in ("blocks", "leases", "generations", "free", "policy")}
    trees = {"ARCState.tree", "S3FIFOState.tree"}
    assert found == queues | trees | saved


def test_a_field_without_a_rule_is_refused_by_name() -> None:
    class StorePlannedLater(ev.StorePlanned, frozen=True, array_like=True, gc=False, tag=10):
        tenant: str = ""

    class ConfigLater(OffloadConfig, frozen=True, kw_only=True):
        tenant: str = ""

    with pytest.raises(ConfigError, match=r"StorePlannedLater\.tenant has no rule"):
        rules_of(StorePlannedLater)
    with pytest.raises(ConfigError, match=r"ConfigLater\.\w+ has no rule"):
        rules_of(ConfigLater)


def test_text_cannot_be_kept() -> None:
    """The name of a field that is a number elsewhere does not make its text harmless."""

    class SkippedLater(ev.OffloadingEvent, frozen=True, array_like=True, gc=False, tag=11):
        reason: str = ""

    with pytest.raises(ConfigError, match=r"SkippedLater\.reason can hold text"):
        rules_of(SkippedLater)


def test_the_state_of_each_built_in_policy_has_a_rule() -> None:
    """Only the state of `auto` is withheld: it has hashes of keys."""
    assert [*POLICY_STATES, "auto"] == [*POLICIES]


# What a copy contains.


def texts_in(value: Any) -> Iterator[bytes]:
    """Yield each text and byte string in plain values, also in bytes that are msgpack themselves."""
    if isinstance(value, str):
        yield value.encode(errors="surrogatepass")
    elif isinstance(value, bytes):
        yield value
        if len(value) > 8:
            try:
                inner = msgspec.msgpack.decode(value)
            except msgspec.MsgspecError:
                return
            if isinstance(inner, list):
                yield from texts_in(inner)
    elif isinstance(value, dict):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_in(one)


def names_of(log: PlainLog) -> set[bytes]:
    """Return what a log names: requests, hashes, texts of errors, weights, ids of runs and pools."""
    found = set[bytes]()
    for head, frames, tail in log:
        found |= {head[5], head[10]}
        for state in [msgspec.msgpack.decode(head[9])] if head[9] else []:
            saved = dict(zip(SavedLedger.__struct_fields__, state))
            policy = saved["policy"] if saved["config"]["policy"] in ("arc", "s3fifo") else b""
            for field in ("keys", "requests", "transfers", "brought", "stale", "offers", "weights", "kept"):
                found |= set(texts_in(saved[field]))
            found |= {one for one in texts_in(policy) if len(one) == 36}
        for event in (event for frame in frames for event in frame):
            found |= set(texts_in(event[4:]))
        found |= set(texts_in(tail))
    known = {*POLICIES, *OffloadConfig.__struct_fields__, *(reason.value for reason in ev.SkipReason)}
    known |= {reason.value for reason in ev.RejectReason} | {
        "disk",
        "the process was killed",
        machines_digest(),
    }
    hashes = {one[:-4] if len(one) == 36 else one for one in found}
    return {one for one in hashes if one.strip(b"\0") and one.decode(errors="replace") not in known}


def content_of(log: Path) -> bytes:
    """Return the bytes of the files of a log, and of its records after decompression."""
    raw = b"".join(path.read_bytes() for path in sorted(log.iterdir()) if path.is_file())
    records = read_plain(log)
    return raw + msgspec.msgpack.encode(records) + b"".join(set(texts_in(records)))


def named_life(seed: int, log: Path, policy: str) -> Life:
    """A random life whose names are long enough that no accident finds them in other bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay_life.request", lambda number: f"alice-{number % 6}@example.com")
        patch.setattr("replay_life.key", secret_key)
        life = random_life(
            seed, 300, log, policy=policy, store_threshold=1 + seed % 2, writer={"segment_bytes": 5000}
        )
    life.close()
    return life


def secret_key(number: int) -> bytes:
    return number.to_bytes(4, "big") + b"what the client asked us to do"[:28].ljust(28, b".") + bytes(4)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_byte_of_a_copy_names_what_the_log_names(tmp_path: Path, policy: str) -> None:
    for seed in range(3):
        log, copy = tmp_path / f"{seed}", tmp_path / f"{seed}-copy"
        named_life(seed, log, policy)
        redact_log(log, copy, NewNames())
        names, content = names_of(read_plain(log)), content_of(copy)
        assert any(b"alice" in name for name in names)
        assert any(b"what the client asked" in name for name in names)
        assert len(names) > 10
        assert [name for name in names if name in content] == []


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_the_keys_that_a_policy_remembers_are_renamed(tmp_path: Path, policy: str) -> None:
    """They stand in the snapshots of later segments only. Readers restore them, and find them again."""
    log = tmp_path / "log"
    life = Life(log, policy=policy, host_blocks=4, workers=1, writer={"segment_bytes": 2000})
    for number in range(80):
        job = life.core.prepare_store(f"r{number}", [secret_key(number % 9)], [number % 20]).job
        if job is not None:  # The key is not stored yet.
            life.ended(job)
        life.core.finish(f"r{number}")
    life.close()
    copy, names, _ = copied(log)
    remembered = [remembered_in(segment.head.snapshot) for segment in LogReader(log).segments()]
    renamed = [remembered_in(segment.head.snapshot) for segment in LogReader(copy).segments()]
    assert any(remembered)
    assert renamed == [[names.key(key) for key in keys] for keys in remembered]
    assert b"what the client" not in content_of(copy)
    assert verify_log(copy).good


def remembered_in(snapshot: bytes) -> list[bytes]:
    """Return the keys in the state of the policy of a snapshot."""
    if not snapshot:
        return []
    state = msgspec.msgpack.decode(snapshot, type=SavedLedger)
    return [key for part in msgspec.msgpack.decode(state.policy) if isinstance(part, list) for key in part]


def opened_with_names(directory: Path) -> Path:
    """Write a log in which each field that holds text has one."""
    pools = KeptPools(PoolIdentity.of({"model": "/models/secret-llama"}), (b"pool of tenant 7", bytes(16)))
    life = Life(host_blocks=4)
    life.events.clear()
    head = life.core.ledger.seq, 0, 1
    events = [
        ev.LogOpened(
            *head, life.config, "", kept=pools, weights="lora-of-bob", cold=("no pool at /srv/bob",)
        ),
        ev.RequestArrived(*head, "alice"),
        ev.RequestArrived(*head, "fetch-7-for-alice", "tier-of-bob"),
        ev.StorePlanned(
            *head, (("alice", 1),), (b"salted prompt of alice, for ever....",), (0,), (0,), "engine host-9"
        ),
        ev.TransfersSubmitted(*head, (4,)),
        ev.WorkerReported(*head, 4, 0, False, "OSError: [Errno 28] No space left on device: '/srv/bob'"),
        ev.WorkerReported(*head, 4, 1, False, "bob.Error: /srv/bob"),
        ev.RequestFinished(*head, "alice", True, "given to host-9"),
        ev.CacheReset(*head, 1, "lora-of-carol"),
        ev.Restarted(*head, 2, life.config, "", "MemoryError: for alice"),
    ]
    return written(directory, life, events)


def test_every_field_that_holds_text_is_renamed(tmp_path: Path) -> None:
    log = opened_with_names(tmp_path / "log")
    names = NewNames()
    redact_log(log, tmp_path / "copy", names)
    content = content_of(tmp_path / "copy")
    for secret in (b"alice", b"bob", b"carol", b"host-9", b"salted", b"llama", b"tenant", b"lora", b"srv"):
        assert secret in content_of(log)
        assert secret not in content
    assert {"request", "key", "tier", "engine", "text", "weights", "fact", "id"} <= set(names.renamed)


def test_an_error_keeps_its_class_and_its_number(tmp_path: Path) -> None:
    """That tells a full disk from a lost device. All else may be a path or a name."""
    redact_log(opened_with_names(tmp_path / "log"), tmp_path / "copy", NewNames())
    found = [one for one in LogReader(tmp_path / "copy").events() if isinstance(one, ev.WorkerReported)]
    assert re.fullmatch(r"OSError: \[Errno 28\] text-[0-9a-f]{16}", found[0].error)
    assert re.fullmatch(r"text-[0-9a-f]{16}", found[1].error)


def test_equal_names_stay_equal_and_groups_share_their_hash() -> None:
    names = NewNames()
    hash, other = bytes(range(32)), bytes(range(1, 33))
    full, sliding = names.key(hash + bytes(4)), names.key(hash + b"\0\0\0\1")
    assert full == names.key(hash + bytes(4)) != names.key(other + bytes(4))
    assert (full[:-4], full[-4:], sliding[-4:]) == (sliding[:-4], bytes(4), b"\0\0\0\1")
    assert len(full) == 36
    assert names.request("fetch-41-for-r7", fetches=[41]) == f"fetch-41-for-{names.request('r7')}"
    assert b"of alice" not in names.key(b"a key of alice")


def test_a_crafted_name_of_many_parts_is_renamed() -> None:
    names, parts = NewNames(), "fetch-7-for-hand-over-a-of-" * 3000
    new = names.request(f"{parts}alice")
    assert re.match("fetch-[0-9]{20}-for-hand-over-", new)
    assert len(new) > len(parts)
    assert "alice" not in new


LONG_NUMBERS = st.integers(10**11, 10**18 - 1).map(str)
CHOSEN_NAMES = st.lists(
    st.one_of(
        st.sampled_from(["fetch-", "hold-", "disk-store-", "hand-over-", "-for-", "-of-", "r"]),
        st.tuples(st.sampled_from(["fetch", "hold"]), LONG_NUMBERS).map(lambda one: "-".join(one) + "-for-"),
        st.tuples(LONG_NUMBERS).map(lambda one: f"hand-over-{one[0][:8]}-of-"),
        st.tuples(LONG_NUMBERS).map(lambda one: f"disk-store-{one[0]}"),
        LONG_NUMBERS,
    ),
    max_size=5,
).map("".join)


@given(CHOSEN_NAMES)
@example("fetch-4111111111111111-for-r7")
@example("disk-store-4111111111111111")
@example("fetch-7-for-disk-store-4111111111111111")
@example("hand-over-12345678-of-hold-4111111111111111-for-r7")
def test_no_number_that_a_client_chose_is_kept(name: str) -> None:
    """A client may call its request as kvsm calls its own copies, with an account number in the name."""
    new = NewNames(bytes(32)).request(name, fetches=[7])
    assert [one for one in re.findall("[0-9]{8,}", name) if one in new] == []


ACCOUNT = "411111111111"


def test_numbers_of_clients_are_not_in_a_copy(tmp_path: Path) -> None:
    """They are not in its events and not in its snapshots, though the same log has copies of kvsm's own."""
    log = tmp_path / "log"
    life = Life(log, writer={"segment_bytes": 2000})
    chosen = [f"disk-store-{ACCOUNT}1", f"fetch-{ACCOUNT}2-for-x", f"hold-{ACCOUNT}3-for-x"]
    for name in [*chosen, f"hand-over-{ACCOUNT[:8]}-of-disk-store-{ACCOUNT}4"]:
        life.core.arrive(name)
    for number in range(400):
        life.core.arrive(f"disk-store-{number}", "disk")
        life.core.finish(f"disk-store-{number}")
    life.core.arrive("disk-store-999", "disk")
    life.close()
    assert len(segments_of(log)) > 1
    copy, names, _ = copied(log)
    assert ACCOUNT[:8].encode() in content_of(log)
    assert ACCOUNT[:8].encode() not in content_of(copy)
    arrived = {one.request for one in LogReader(copy).events() if isinstance(one, ev.RequestArrived)}
    assert {f"disk-store-{number}" for number in [*range(400), 999]} < arrived
    check_same_story(log, copy, names, explained=False)


def test_a_name_of_kvsm_that_a_client_takes_later_is_renamed(tmp_path: Path) -> None:
    life = Life(host_blocks=4)
    life.events.clear()
    head = life.core.ledger.seq, 0, 1
    events = [
        ev.LogOpened(*head, life.config, ""),
        ev.RequestArrived(*head, "disk-store-41", "disk"),
        ev.RequestFinished(*head, "disk-store-41"),
        ev.RequestArrived(*head, "disk-store-41"),
    ]
    copy, _, _ = copied(written(tmp_path / "log", life, events))
    first, last = (one.request for one in LogReader(copy).events() if isinstance(one, ev.RequestArrived))
    assert first == "disk-store-41"
    assert re.fullmatch("r[0-9a-f]{16}", last)


def test_no_copy_can_be_compared_with_another(tmp_path: Path) -> None:
    """The secret is random and is thrown away: whoever guesses a name cannot check the guess."""
    random_life(1, 60, tmp_path / "log").close()
    copies = [tmp_path / "one", tmp_path / "two"]
    for copy in copies:
        assert run("export", tmp_path / "log", "--redact", copy).exit_code == 0
    one, two = (names_of(read_plain(copy)) for copy in copies)
    assert one
    assert not one & two


# Readers tell the same story.


class NotedNames(NewNames):
    """New names that note each old name, as commands print it, with the new one."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, str] = {}

    def request(self, name: str, **known: Any) -> str:
        return self._note(name, super().request(name, **known))

    def error(self, text: str) -> str:
        return self._note(text, super().error(text))

    def reason(self, line: str) -> str:
        return self._note(line, super().reason(line))

    def weights(self, version: str) -> str:
        return self._note(version, super().weights(version))

    def key(self, key: bytes) -> bytes:
        new = super().key(key)
        self._note(key.hex(), new.hex())
        self._note(render_key(key), render_key(new))
        return new

    def _note(self, old: str, new: str) -> str:
        if old:
            self.noted[old] = new
        return new

    def renames(self) -> Callable[[str], str]:
        """Return the function that replaces all old names in a text."""
        longest = sorted(self.noted, key=len, reverse=True)
        pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest))})(?![\w-])")
        return lambda text: pattern.sub(lambda found: self.noted[found[0]], text) if longest else text


def figures(value: Any) -> Any:
    """Return an answer without what depends on the time of the command, and without the ledger's digest."""
    if isinstance(value, dict):
        passing = {"seconds", "silent_ns", "digest"}
        return {name: figures(one) for name, one in value.items() if name not in passing}
    return [figures(one) for one in value] if isinstance(value, list) else value


def answer(command: str, log: Path) -> tuple[int, list[str]]:
    told = run(command, log, "--json")
    assert told.exit_code in (0, 1), told.output
    return told.exit_code, json.dumps(figures(json.loads(told.stdout)), indent=1).split("\n")


def why(log: Path) -> Iterator[str]:
    """Yield every explanation of a log."""
    with kvsm.open(log) as opened:
        yield from map(str, explanations(opened))


def words(texts: Iterable[str]) -> list[list[str]]:
    """Return the words of each text, sorted: names in a list stand in the order of their letters."""
    return sorted(sorted(re.findall(r"[\w.-]+", text)) for text in texts)


def check_same_story(log: Path, copy: Path, names: NotedNames, *, explained: bool = True) -> None:
    """`verify`, `report` and `why` tell the same of a log and of its copy, but for the names."""
    renamed = names.renames()
    for command in ("verify", "report"):
        code, told = answer(command, log)
        assert answer(command, copy) == (code, [renamed(line.replace(str(log), str(copy))) for line in told])
    if explained:
        assert words(why(copy)) == words(map(renamed, why(log)))


def copied(log: Path) -> tuple[Path, NotedNames, RedactedLog]:
    names, copy = NotedNames(), log.with_name(f"{log.name}-copy")
    return copy, names, redact_log(log, copy, names)


@pytest.mark.parametrize("policy", ADMITTING)
def test_a_copy_of_a_random_life_tells_the_same_story(tmp_path: Path, policy: str) -> None:
    """Lives with restarts, resets and lost copies, in several segments."""
    first = ADMITTING.index(policy)
    for seed in range(first, first + examples(2, least=1)):
        log = tmp_path / f"{seed}"
        options = {"store_threshold": 1 + seed % 2, "writer": {"segment_bytes": 5000}}
        random_life(seed, 300, log, policy=policy, **options).close()
        copy, names, found = copied(log)
        assert found.damage is None
        assert len(segments_of(copy)) == len(segments_of(log)) > 1
        check_same_story(log, copy, names)


def test_a_live_log_is_copied_up_to_some_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer closes the log right after its last event was read. So the copy has no end yet."""
    life, read_all = LogLife(tmp_path / "log"), Segment.batches
    life.append(2)

    def closed_then(segment: Segment) -> Iterator[list[ev.OffloadingEvent]]:
        yield from read_all(segment)
        life.writer.close()

    with monkeypatch.context() as patched:
        patched.setattr(Segment, "batches", closed_then)
        redact_log(tmp_path / "log", tmp_path / "copy", NewNames())
    reader = LogReader(tmp_path / "copy")
    assert (len(list(reader.events())), reader.end) == (2, LogEnd.OPEN)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ADMITTING)
def test_copies_of_many_random_lives_verify(tmp_path: Path, policy: str) -> None:
    for seed in seeds_of_today(6):
        log = tmp_path / f"{seed}"
        chosen = random.Random(seed)
        options = {"blocks_per_chunk": chosen.choice((1, 2)), "store_threshold": chosen.choice((1, 2))}
        writer = {"segment_bytes": chosen.choice((2000, 5000, 1 << 20)), "compress": chosen.random() < 0.5}
        life = random_life(seed, chosen.randrange(50, 500), log, policy=policy, writer=writer, **options)
        life.close() if chosen.random() < 0.5 else life.kill()
        copy, names, _ = copied(log)
        renamed = names.renames()
        code, told = answer("verify", log)
        assert answer("verify", copy) == (code, [renamed(line.replace(str(log), str(copy))) for line in told])


@pytest.mark.parametrize("name", ["gap", "lives", "served"])
def test_a_copy_of_a_log_of_the_first_release_tells_the_same_story(tmp_path: Path, name: str) -> None:
    """Whoever keeps old logs can still give them away."""
    log = tmp_path / name
    shutil.copytree(ROOT / "tests" / "data" / "log-0.1.0" / name, log, ignore=shutil.ignore_patterns("disk"))
    copy, names, found = copied(log)
    assert found.damage is None
    check_same_story(log, copy, names, explained=False)


TOLD = (
    "property_broken",
    "engine_killed",
    "processes_killed",
    "rank_fails",
    "disk_full",
    "engine_stopped",
    "other_block_size",
    "healthy_hybrid",
)


@pytest.mark.parametrize(
    "incident", ["healthy_small", *(pytest.param(one, marks=pytest.mark.slow) for one in TOLD)]
)
def test_a_copy_of_an_incident_tells_the_same_story(tmp_path: Path, incident: str) -> None:
    """A broken property stays broken, a gap stays a gap, and each trouble keeps its figures."""
    log = {**incidents.INCIDENTS, **incidents.HEALTHY}[incident](tmp_path / "log")
    copy, names, found = copied(log)
    assert found.damage is None
    check_same_story(log, copy, names, explained=False)


def segments_of(log: Path) -> list[Path]:
    return sorted(log.glob("*.kvsm"))


def test_a_damaged_log_is_copied_up_to_the_damage(tmp_path: Path) -> None:
    log = tmp_path / "log"
    random_life(3, 300, log, writer={"segment_bytes": 5000}).close()
    events = len([*LogReader(log).events()])
    path = segments_of(log)[1]
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)
    result = run("export", log, "--redact", tmp_path / "copy")
    assert result.exit_code == 1
    assert "damaged at byte" in result.stderr
    assert 0 < len([*LogReader(tmp_path / "copy").events()]) < events
    assert verify_log(tmp_path / "copy").good


def test_a_torn_end_stays_torn(tmp_path: Path) -> None:
    """Its bytes are replaced by as many zeros: they may hold a part of a name."""
    log = tmp_path / "log"
    random_life(3, 100, log).kill()
    last = segments_of(log)[-1]
    last.write_bytes(last.read_bytes() + b"half a frame about alice@example.com")
    copy, _, found = copied(log)
    before, after = LogReader(log), LogReader(copy)
    assert found.events == len([*before.events()]) == len([*after.events()])
    assert before.torn is not None
    assert after.torn is not None
    assert (after.torn.seq, after.torn.bytes_cut) == (before.torn.seq, before.torn.bytes_cut) != (1, 0)
    assert b"alice" not in segments_of(copy)[-1].read_bytes()


@pytest.mark.parametrize("size", [3, 40])
def test_a_segment_that_was_never_begun_stays_so(tmp_path: Path, size: int) -> None:
    """The file ends in its preamble, or in its head."""
    log = tmp_path / "log"
    random_life(3, 300, log, writer={"segment_bytes": 5000}).kill()
    last = segments_of(log)[-1]
    last.write_bytes(last.read_bytes()[:size])
    for path in segments_of(log)[:-1]:  # As after a kill, no mark names the last segment.
        data = path.read_bytes()
        path.write_bytes(data[:MARK_OFFSET] + bytes(MARK.size) + data[MARK_OFFSET + MARK.size :])
    copy, _, _ = copied(log)
    before, after = LogReader(log), LogReader(copy)
    assert len([*before.events()]) == len([*after.events()]) > 100
    assert before.torn is not None
    assert after.torn is not None
    assert Path(after.torn.path).name == last.name
    assert (after.torn.offset, after.torn.bytes_cut) == (before.torn.offset, before.torn.bytes_cut)


def test_missing_segments_stay_missing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    random_life(3, 400, log, writer={"segment_bytes": 3000}).close()
    first, *_, last = segments_of(log)
    first.unlink()
    last.unlink()
    copy, _, _ = copied(log)
    before, after = LogReader(log), LogReader(copy)
    assert len([*before.events()]) == len([*after.events()])
    assert after.missing == before.missing is not None
    assert after.missing_from == before.missing_from is not None
    assert after.end is before.end is LogEnd.MISSING


def test_a_gap_stays_a_gap(tmp_path: Path) -> None:
    """The disk was full for a while. The copy lacks the same events, and its readers say so."""
    log = tmp_path / "log"
    with disk(1 << 20) as limited:
        life = Life(log, writer={"on_failure": "continue", "segment_bytes": 1 << 20})
        for free in (1 << 20, 10, 1 << 20):
            limited.free = free
            for number in range(600):
                life.core.arrive(f"{free}-{number}")
                life.core.finish(f"{free}-{number}")
        life.close()
    copy, names, _ = copied(log)
    check_same_story(log, copy, names, explained=False)
    before, after = LogReader(log), LogReader(copy)
    for reader in (before, after):
        for segment in reader.segments():
            assert [*segment.events()]
    assert after.gaps == before.gaps != []
    assert after.broken_from == before.broken_from is not None


def test_the_signal_that_ended_the_process_is_copied(tmp_path: Path) -> None:
    log = tmp_path / "log"
    random_life(3, 60, log).kill()
    (log / NAME).write_bytes(bytes([15, 0]) + b"alice")
    copy, _, _ = copied(log)
    assert stopped_by(copy) == stopped_by(log) == "SIGTERM"
    assert (copy / NAME).read_bytes() == bytes([15])


def test_a_snapshot_that_cannot_be_read_stays_unreadable(tmp_path: Path) -> None:
    log = tmp_path / "log"
    random_life(3, 300, log, writer={"segment_bytes": 5000}).close()
    records = read_plain(log)
    records[1].head[9] = b"no snapshot, but alice"
    changed = write_plain(tmp_path / "changed", records)
    copy, _, found = copied(changed)
    assert found.events == sum(len(frame) for one in records for frame in one.frames)
    assert b"alice" not in content_of(copy)
    broken, still = verify_log(changed).breakage, verify_log(copy).breakage
    assert broken is not None
    assert still is not None
    assert (still.kind, still.event, still.text) == (broken.kind, broken.event, broken.text)
    assert still.kind == "SegmentHead"


def test_a_policy_of_another_package_is_withheld(tmp_path: Path) -> None:
    """The copy says nothing of it, needs no code to be read, and has the same events. Its own code never
    runs here: the copy is made without the trust that a fold of the log would need."""
    log = tmp_path / "log"
    random_life(5, 400, log, policy=FOREIGN, writer={"segment_bytes": 4000}).close()
    assert len(segments_of(log)) > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChoosesByNumpy, "__init__", refuse)
        result = run("export", log, "--redact", tmp_path / "copy", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["logs"][0]["policy_withheld"]
        found = verify_log(tmp_path / "copy")
    assert found.good
    assert found.breakage is None
    whole = verify_log(log, allow_policies=[FOREIGN])
    assert (found.last, found.entries) == (whole.last, whole.entries)
    assert FOREIGN.encode() not in content_of(tmp_path / "copy")
    assert LogReader(tmp_path / "copy").head.config.policy == WITHHELD


def refuse(*_: object) -> None:
    raise AssertionError("the code of a policy that the log names has run")


@pytest.mark.parametrize("seed", range(4))
def test_a_policy_of_another_package_is_withheld_from_its_restart_on(tmp_path: Path, seed: int) -> None:
    """A restart changed the policy, and the next one changed it back. From the first foreign policy on, none
    is named: the order of the blocks that it leaves is not known."""
    life = random_life(seed, 120, policy="s3fifo")
    for policy in (FOREIGN, "arc"):
        config = replace(life.core.config, policy=policy)
        life.core = Offloader.restarted(life.core.ledger, config, life, clock_ns=lambda: 9)
        life.drive([("store", one, one + 1) for one in range(8)])
    log = written(tmp_path / "log", life, life.events)
    copy, _, found = copied(log)
    assert found.withheld
    policies = [one.config.policy for one in LogReader(copy).events() if isinstance(one, ev.Restarted)]
    assert policies[-2:] == [WITHHELD, WITHHELD]
    assert LogReader(copy).head.config.policy == "s3fifo"
    assert verify_log(copy).good


@pytest.mark.parametrize(
    ("host", "disk", "copy"),
    [
        ("log", "log/disk", "copy"),
        ("20261121T171408Z-engine0-7", "20261121T171408Z-engine0-disk-7", "copy"),
        ("engine0", "20261121T171408Z-engine0-disk-7", "copy/engine0"),
    ],
)
def test_the_log_of_the_disk_tier_is_copied_with_the_same_names(
    tmp_path: Path, host: str, disk: str, copy: str
) -> None:
    """`verify` joins the logs of the two tiers by names and numbers, and `why` asks the other one."""
    keys = [f"key {number}".encode() for number in range(6)]
    logs = tmp_path / host, tmp_path / disk
    with Offloader.open(HOST_CONFIG, logs[0]) as above, Offloader.open(DISK_CONFIG, logs[1]) as below:
        live(above, below, keys)
    result = run("export", logs[0], "--redact", tmp_path / "copy", "--json")
    assert result.exit_code == 0, result.output
    places = [one["directory"] for one in json.loads(result.stdout)["logs"]]
    assert places == [str(tmp_path / copy), str(tmp_path / copy / "disk")]
    for log, place, other in zip(logs, places, ("disk", "host")):
        code, told = answer("verify", log)
        assert f'"tier": "{other}"' in str(told)
        there = [line.replace(str(logs[1]), places[1]).replace(str(logs[0]), places[0]) for line in told]
        assert answer("verify", Path(place)) == (code, there)


def test_a_copy_from_the_disk_that_the_host_log_lacks_has_no_number(tmp_path: Path) -> None:
    """The host's log lost its end. `verify` still joins the copies before it."""
    keys = [f"key {number}".encode() for number in range(6)]
    whole, log = tmp_path / "whole", tmp_path / "log"
    with Offloader.open(HOST_CONFIG, whole) as host, Offloader.open(DISK_CONFIG, log / "disk") as disk:
        live(host, disk, keys)
    planned = [one.seq for one in LogReader(whole).events() if getattr(one, "source", "") == "disk"]
    (cut,) = read_plain(whole)
    events = [[event] for frame in cut.frames for event in frame if event[1] < planned[0]]
    write_plain(log, [cut._replace(frames=events, tail=[])])
    assert run("export", log, "--redact", tmp_path / "copy").exit_code == 0
    below = [one for one in LogReader(tmp_path / "copy/disk").events() if isinstance(one, ev.RequestArrived)]
    assert [bool(re.match("fetch-[0-9]{20}-for-r", one.request)) for one in below] == [True]
    (code, told), (copied_code, copied_told) = (answer("verify", one) for one in (log, tmp_path / "copy"))
    number = f", store {planned[0]} of the host's log,"
    assert any(number in line for line in told)
    there = [line.replace(number, "").replace(f"{log}", f"{tmp_path / 'copy'}") for line in told]
    assert (copied_code, copied_told) == (code, there)


def test_a_copy_stays_as_it_is_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is to be sent to others. A large log gets an index at its first query, a copy of it does not."""
    monkeypatch.setattr(table_index, "SMALL_LOG", 0)
    log = tmp_path / "log"
    random_life(3, 300, log, writer={"segment_bytes": 5000}).close()
    copy, names, _ = copied(log)
    before = files_of(copy)
    for arguments in (["query", "SELECT 1"], ["report"], ["verify"], ["why", names.noted["r0"]]):
        command, *question = arguments
        told = run(command, copy, *question)
        assert told.exit_code in (0, 1), told.output
        assert files_of(copy) == before
        assert ("delete its file REDACTED to keep an index" in " ".join(told.stderr.split())) == (
            command != "verify"
        )
    (copy / "REDACTED").unlink()
    assert run("query", copy, "SELECT 1").exit_code == 0
    assert (copy / table_index.INDEX_NAME).exists()


def files_of(directory: Path) -> list[tuple[str, int, bytes]]:
    """Return the name, the time of the last change and the content of all files."""
    found = [(path.name, path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()]
    return [("", directory.stat().st_mtime_ns, b""), *sorted(found)]


def test_a_copy_needs_one_log_and_a_new_directory(tmp_path: Path) -> None:
    """Otherwise one line says what to do, and nothing is written."""
    log, out = tmp_path / "log", tmp_path / "out"
    random_life(1, 40, log).close()
    for options, message in (
        ((), "give one of --parquet OUT and --redact OUT"),
        (("--redact", out, "--parquet", out), "give one of --parquet OUT and --redact OUT"),
        ((log, "--redact", out), "--redact copies one LOG"),
        (("--redact", out, "--table", "lookups"), "takes neither --table nor --allow-policy"),
        (("--redact", out, "--allow-policy", FOREIGN), "takes neither --table nor --allow-policy"),
        (("--redact", out, "--max-slots", 5), "it claims 10 host slots"),
        (("--redact", log), "holds a log already"),
    ):
        refused = run("export", log, *options)
        assert refused.exit_code == 2, options
        assert message in " ".join(refused.stderr.replace("\u2502", " ").split())
    assert not out.exists() or not list(out.iterdir())
    assert verify_log(log).good


def test_a_copy_is_not_written_into_the_log(tmp_path: Path) -> None:
    """Readers would take it for the log of the disk tier."""
    log = tmp_path / "log"
    random_life(1, 40, log).close()
    refused = run("export", log, "--redact", log / "disk")
    assert refused.exit_code == 2
    assert "name a directory elsewhere" in refused.stderr
    assert not (log / "disk").exists()


def test_a_copy_that_stops_says_what_it_left(tmp_path: Path) -> None:
    """A later segment claims more slots than this machine trusts."""
    log, out = tmp_path / "log", tmp_path / "out"
    random_life(3, 300, log, writer={"segment_bytes": 5000}).close()
    records = read_plain(log)
    records[1].head[2]["host_blocks"] *= 1000
    result = run("export", write_plain(tmp_path / "changed", records), "--redact", out, "--max-slots", 500)
    assert result.exit_code == 2
    assert "host slots" in result.stderr
    assert f"{out} has a part of the copy: remove it" in " ".join(result.stderr.split())
    assert segments_of(out)
