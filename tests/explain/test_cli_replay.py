"""`kvsm replay`, `verify` and `show`: what they print, in words and as JSON, and how they exit."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from log_life import disk
from replay_life import (
    OFTEN,
    Life,
    after_reset,
    full_life,
    gapped,
    key,
    random_life,
    scene,
    story_life,
    written,
)

from kvsm.cli import main
from kvsm.core.ledger.snapshot import digest
from kvsm.properties import Property


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def parsed(result: Result) -> Any:
    return json.loads(result.stdout)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return story_life(tmp_path / "log")


@pytest.fixture
def log(life: Life, tmp_path: Path) -> Path:  # noqa: ARG001
    return tmp_path / "log"


# replay


def test_replay_prints_the_state(life: Life, log: Path) -> None:
    result = kvsm("replay", log)
    assert (result.exit_code, result.stderr) == (0, "")
    assert digest(life.core.ledger) in result.stdout
    assert "2 STORED" in result.stdout
    assert "2: 0 free, 2 idle, 0 held" in result.stdout


def test_replay_json_holds_counts_and_the_digest(life: Life, log: Path) -> None:
    found = parsed(kvsm("replay", log, "--json"))
    state = found["state"]
    assert state["digest"] == digest(life.core.ledger)
    assert (state["seq"], found["events"], found["first"]) == (len(life.events), len(life.events), 1)
    assert (state["free"], state["idle"], state["held"], state["index"]) == (0, 2, 0, 2)
    assert (state["blocks"]["STORED"], state["transfers"], state["requests"]) == (2, {}, {})


def test_replay_stops_at_an_event_or_a_step(log: Path) -> None:
    at = parsed(kvsm("replay", log, "--at", 10, "--json"))["state"]
    assert (at["seq"], at["transfers"], at["requests"]) == (10, {"load SUBMITTED": 1}, {"LOADING": 1})
    assert at["blocks"]["LOADING"] == 1
    step = parsed(kvsm("replay", log, "--step", 0, "--json"))["state"]
    assert (step["step"], step["requests"]) == (0, {})


# verify


def test_verify_of_a_good_log_exits_0(life: Life, log: Path) -> None:
    result = kvsm("verify", log)
    assert result.exit_code == 0
    assert "no violation" in result.stdout
    found = parsed(kvsm("verify", log, "--json"))
    assert found["good"] is True
    assert (found["digest"], found["events"]) == (digest(life.core.ledger), len(life.events))
    assert (found["violations"], found["breakage"], found["damage"]) == ([], None, None)


def test_verify_names_the_first_false_event_and_what_led_there(tmp_path: Path) -> None:
    life = scene()
    log = written(tmp_path / "log", life, [*life.events, *after_reset(life)])
    result = kvsm("verify", log)
    assert result.exit_code == 1
    last = len(life.events) + 2
    assert f"first broken by event {last}, step 0: HitMatched request r3 slot 0" in result.stdout
    assert (
        "no stale data (S14): request r3 matches slot 0, but it holds data from before the reset"
        in result.stdout
    )
    assert Property.NO_STALE_DATA.sentence in result.stdout
    dated = "  +0.000s"
    told = result.stdout.split("what led there:\n")[1].splitlines()
    assert told[-1] == f"{dated} event {last} step 0: HitMatched request r3 slot 0"
    assert told[-2] == f"{dated} event {last - 1} step 0: CacheReset epoch 1"
    found = parsed(kvsm("verify", log, "--json"))
    assert found["good"] is False
    assert [one["property_id"] for one in found["violations"]] == ["S14"]
    assert [one["property"] for one in found["violations"]] == ["no stale data"]
    assert (found["breakage"]["event"], found["breakage"]["kind"]) == (last, "HitMatched")


# show


def test_show_tells_a_line_an_event(log: Path) -> None:
    result = kvsm("show", log, "--request", "r4")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "+0.000s event 18 step 2: request r4 matches nothing (of 1 "
        "block asked, the host serves 0); it misses key "
        "000000010000..0000: evicted at event 14 to make room for store 15 of request r3  [not "
        "there -> RUNNING]",
        "+0.000s event 19 step 2: request r4 is aborted  [RUNNING -> RELEASED]",
    ]


def test_show_takes_a_key_as_it_was_printed(log: Path) -> None:
    """`show --key` understands the abbreviation in which keys are shown."""
    assert (
        kvsm("show", log, "--key", "000000010000..0000").stdout
        == kvsm("show", log, "--key", key(1).hex()).stdout
    )


def test_show_json_is_an_object_a_line(log: Path) -> None:
    lines = [json.loads(line) for line in kvsm("show", log, "--transfer", 15, "--json").stdout.splitlines()]
    assert [(line["kind"], line["before"], line["after"]) for line in lines][1] == (
        "StorePlanned",
        "not planned",
        "PLANNED",
    )
    assert kvsm("show", log, "--block", 0, "--json").exit_code == 0


def test_show_takes_a_window(log: Path) -> None:
    """The lines of these events, as they stand in the whole story."""
    whole = kvsm("show", log, "--block", 0).stdout.splitlines()
    assert kvsm("show", log, "--block", 0, "--since", 8, "--until", 10).stdout.splitlines() == whole[3:6]


def test_show_tells_a_wait_and_what_is_open(tmp_path: Path) -> None:
    """A request that hangs is read off the last lines, with times."""
    ticks = iter(range(10**9, 10**12, 10**8))
    life = Life(tmp_path / "log", workers=1, clock_ns=lambda: next(ticks))
    plan = life.core.prepare_store("r0", [key(1)], [1]).job
    assert plan is not None
    life.core.submit([plan.transfer])
    life.core.match("r1", [key(1)])
    life.core.finish("r0")
    life.core.end_step()
    life.kill()
    result = kvsm("show", tmp_path / "log", "--request", "r1")
    assert result.stdout.splitlines()[1:] == [
        "    waited 0 steps, 0.10 s",
        "+0.400s event 5 step 0: the log ends here, and request r1 has not ended  [DEFERRED]",
    ]


def test_show_lists_requests_that_share_a_clients_name(tmp_path: Path) -> None:
    life = Life(tmp_path / "log")
    for name in ("job-1a", "job-2b", "jobs"):
        life.core.arrive(name)
    life.close()
    result = kvsm("show", tmp_path / "log", "--request", "job")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "2 requests are named job: job-1a, job-2b; give the full id of one" in result.stderr


# Input that cannot be used: one line, exit 2.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay", "{log}", "--at", 10_000), "there is no event 10000; the last one is 20"),
        (("replay", "{log}", "--step", 99), "there is no step 99; the last one is 2"),
        (("replay", "{log}", "--at", 1, "--step", 1), "give an event number or a step, not both"),
        (("replay", "{log}", "--at", 0), "0 is not in the range x>=1"),
        (("replay", "{tmp}/none"), "no such directory"),
        (("verify", "{tmp}/none"), "no such directory"),
        (("show", "{tmp}/none", "--block", 1), "no such directory"),
        (("replay", "{tmp}/file"), "not a directory"),
        (("verify", "{tmp}/empty"), "no log here"),
        (("show", "{log}"), "show takes exactly one of --block, --key, --request and --transfer"),
        (("show", "{log}", "--block", 1, "--request", "r1"), "show takes exactly one of"),
        (("show", "{log}", "--block", 2), "there is no slot 2; the pool has 2"),
        (("show", "{log}", "--request", "nobody"), "there is no request nobody; the log names 4"),
        (("show", "{log}", "--request", "r44"), "there is no request r44; did you mean r4?"),
        (("show", "{log}", "--block", 0, "--since", 19), "nothing in this part of the log concerns slot 0"),
        (
            ("show", "{log}", "--block", 0, "--since", 21),
            "no event is at or after --since; it has events 1 to 20",
        ),
        (("show", "{log}", "--block", 0, "--until", "soon"), "'soon' names no point of a log"),
        (("show", "{log}", "--transfer", 4), "nothing in this log concerns transfer 4"),
        (("show", "{log}", "--key", "ffff"), "nothing in this log concerns key ffff"),
        (("show", "{log}", "--key", "xyz"), "key 'xyz' is not made of hex digits"),
        (("show", "{log}", "--key", ""), "key '' is not made of hex digits"),
    ],
)
def test_unusable_input_is_one_clear_line(
    log: Path, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    """Exit 2, nothing on stdout, and one message that says what is wrong."""
    (tmp_path / "file").write_text("not a log")
    (tmp_path / "empty").mkdir()
    result = kvsm(*(str(one).format(log=log, tmp=tmp_path) for one in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith(("kvsm:", "Error:"))]) == 1


# Incomplete logs.


def test_a_torn_tail_is_told_and_exits_0(tmp_path: Path) -> None:
    random_life(1, 300, tmp_path / "log").kill()
    (path,) = (tmp_path / "log").glob("*.kvsm")
    path.write_bytes(path.read_bytes()[:-3])
    for command in ("replay", "verify"):
        result = kvsm(command, tmp_path / "log", "--json")
        assert result.exit_code == 0
        assert "unfinished end, cut at byte" in result.stderr
        assert parsed(result)["condition"]["torn"]["path"] == str(path)


def test_damage_is_told_with_file_offset_and_event_and_exits_1(tmp_path: Path) -> None:
    random_life(2, 300, tmp_path / "log").close()
    (path,) = (tmp_path / "log").glob("*.kvsm")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for arguments in (("replay",), ("verify",), ("verify", "--json"), ("show", "--request", "r1")):
        result = kvsm(arguments[0], tmp_path / "log", *arguments[1:])
        assert result.exit_code == 1
        assert f"{path}: damaged at byte " in result.stderr + result.stdout
        assert ", event " in result.stderr + result.stdout


def test_a_log_that_does_not_fold_exits_1(tmp_path: Path) -> None:
    """The message points to `kvsm verify`, which names the event."""
    life = scene()
    log = written(tmp_path / "log", life, [*life.events, *after_reset(life)])
    result = kvsm("replay", log)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"event {len(life.events) + 2}: " in result.stderr


def test_missing_events_are_told_and_exit_1(tmp_path: Path) -> None:
    """No command passes over a gap."""
    gapped(tmp_path / "log")
    for arguments in (("replay",), ("verify",), ("show", "--request", "r1")):
        result = kvsm(arguments[0], tmp_path / "log", *arguments[1:])
        assert result.exit_code == 1
        assert "are not in the log: a write failed" in result.stderr


def test_a_log_broken_to_its_end_is_told_and_exits_1(tmp_path: Path) -> None:
    """The disk stayed full. What was written before is good, and the lost events are named."""
    life = Life(tmp_path / "log", writer={"on_failure": "continue"})
    rng = random.Random(3)
    for room in (1 << 20, 0):
        with disk(room):
            life.drive((rng.choice(OFTEN), rng.randrange(30), rng.randrange(30)) for _ in range(200))
            life.flush()
            if not room:
                life.close()
    result = kvsm("verify", tmp_path / "log", "--json")
    found = parsed(result)
    assert (result.exit_code, found["violations"]) == (1, [])
    assert f"broken from event {found['last'] + 1} on" in result.stderr


def test_the_commands_need_no_torch(tmp_path: Path) -> None:
    """Replay works where no engine is installed."""
    full_life(tmp_path / "log")
    script = (
        "import sys; sys.modules['torch'] = None; from kvsm.cli import replay, show; "
        "from kvsm.cli.verify import verify; "
        f"verify.main([{str(tmp_path / 'log')!r}], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no violation" in done.stdout
