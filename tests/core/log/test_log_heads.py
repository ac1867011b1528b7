"""What a log claims in a head, or at a restart: no reader runs code that it names, or takes the memory that
it asks for."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from changed_logs import PlainLog, read_plain, write_plain
from click.testing import CliRunner, Result
from replay_life import Life, key, random_life, story_life

from kvsm.check.walks.failures import SavedFailure, load
from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.core.log.trust import SMALL_POOL
from kvsm.core.policies import POLICIES
from kvsm.errors import ConfigError, LogDamaged, LogError
from kvsm.events import Restarted
from kvsm.explain.metrics import Metrics
from kvsm.explain.story import BlockLife, rebuild, tell, verify_log
from kvsm.properties import Property

EVIL = "import pathlib; pathlib.Path('ran').write_text('code of the log ran')\nclass P: pass\n"
FOREIGN = (
    "os:_exit",
    "sys:exit",
    "builtins:exit",
    "evil:P",
    "builtins:print",
    "kvsm.core.policies.lru:LRUPolicy",
)

READERS: dict[str, Callable[..., object]] = {
    "rebuild": lambda log, **trust: rebuild(log, **trust),
    "rebuild to an event": lambda log, **trust: rebuild(log, seq=3, **trust),
    "rebuild to a step": lambda log, **trust: rebuild(log, step=0, **trust),
    "verify_log": lambda log, **trust: verify_log(log, **trust),
    "tell": lambda log, **trust: list(tell(log, BlockLife(0), **trust)),
    "Metrics.of": lambda log, **trust: Metrics.of(LogReader(log), **trust),
}


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> PlainLog:
    log = tmp_path_factory.mktemp("life") / "log"
    story_life(log)
    return read_plain(log)


def claiming(directory: Path, life: PlainLog, **claims: Any) -> Path:
    """The log of a life whose head, and whose first event, claim something else."""
    log = [type(one)(*json_copy(one)) for one in life]
    log[0].head[2].update(claims)
    log[0].frames[0][0][4].update(claims)
    return write_plain(directory, log)


def restarting(directory: Path, life: PlainLog, **claims: Any) -> Path:
    """The log of a life that another process goes on with. Its first event claims something else."""
    log = [type(one)(*json_copy(one)) for one in life]
    _, last, step, wall_ns, *_ = log[-1].frames[-1][-1]
    config, machines = {**json_copy(life[0].head[2]), **claims}, life[0].frames[0][0][5]
    log[-1].frames.append([[RESTARTED, last + 1, step, wall_ns, 2, config, machines, ""]])
    log[-1].tail.clear()
    return write_plain(directory, log)


RESTARTED = Restarted.__struct_config__.tag
FOLDING = (
    ("replay", "LOG"),
    ("verify", "LOG"),
    ("verify", "LOG", "--protocol"),
    ("show", "LOG", "--block", "0"),
    ("why", "LOG", "r0"),
    ("report", "LOG"),
    ("query", "LOG", "SELECT 1"),
    ("export", "LOG", "--parquet", "OUT/tables"),
    ("top", "LOG", "--once"),
    ("timeline", "LOG", "--output", "OUT/page.html"),
    ("whatif", "LOG"),
    ("fork", "LOG", "--at", "3", "--output", "OUT/fork"),
)
"""Commands that fold a log."""


def json_copy(value: Any) -> Any:
    """A deep copy of plain values."""
    if isinstance(value, dict):
        return {name: json_copy(one) for name, one in value.items()}
    return [json_copy(one) for one in value] if isinstance(value, list | tuple) else value


# Code.


def test_no_command_runs_code_that_a_log_names(tmp_path: Path, life: PlainLog) -> None:
    """Each reading command, in a real process beside a module `evil`: exit code 2 and one line. One process
    runs all of them, so a policy that ends the process would end the list early."""
    (tmp_path / "evil.py").write_text(EVIL)
    logs = [claiming(tmp_path / f"log{number}", life, policy=one) for number, one in enumerate(FOREIGN)]
    saved(tmp_path / "failure", policy="evil:P")
    commands = [
        *[["replay", str(log)] for log in logs],
        *[["replay", str(log), "--at", "3"] for log in logs],
        *[["verify", str(log)] for log in logs],
        *[["verify", str(log), "--json"] for log in logs],
        *[["show", str(log), "--block", "0"] for log in logs],
        ["fuzz", "--replay", str(tmp_path / "failure")],
    ]
    script = (
        "import json, sys\nfrom kvsm.cli import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    try: main(command)\n"
        "    except SystemExit as left: print('left with', int(left.code))\n"
        "print('all done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["left with 2"] * len(commands) + ["all done"], done.stderr
    assert len(done.stderr.splitlines()) == len(commands)
    assert all("--allow-policy" in line for line in done.stderr.splitlines())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", FOLDING, ids=lambda one: one[0])
def test_no_command_runs_code_that_a_restart_names(
    tmp_path: Path, life: PlainLog, command: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process may have another policy, and an event says which."""
    (tmp_path / "evil.py").write_text("class P: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    log = restarting(tmp_path / "log", life, policy="evil:P")
    refused = kvsm(*[one.replace("LOG", str(log)).replace("OUT", str(tmp_path)) for one in command])
    assert "evil" not in sys.modules
    assert "which is not one of" in refused.stderr
    assert refused.exit_code == 2


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_takes_other_policies_only_if_they_are_allowed(
    tmp_path: Path, life: PlainLog, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of another package works if it is named, and another name does not allow it."""
    (tmp_path / "my_policies.py").write_text(
        f"from kvsm.core.policies.lru import LRUPolicy\nclass Mine{len(reader)}(LRUPolicy): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    mine = f"my_policies:Mine{len(reader)}"
    log = claiming(tmp_path / "log", life, policy=mine)
    for allowed in ((), ("my_policies:Other",), POLICIES):
        with pytest.raises(LogError, match="which is not one of"):
            READERS[reader](log, allow_policies=allowed)
    READERS[reader](log, allow_policies=("my_policies:Other", mine))


def test_an_allowed_policy_is_named_on_the_command_line(
    tmp_path: Path, life: PlainLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--allow-policy can be repeated, and each command has it."""
    (tmp_path / "named.py").write_text(
        "from kvsm.core.policies.lru import LRUPolicy\nclass P(LRUPolicy): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    log = claiming(tmp_path / "log", life, policy="named:P")
    for command in (("replay", log), ("verify", log), ("show", log, "--block", 0)):
        assert kvsm(*command, "--allow-policy", "a:B", "--allow-policy", "named:P").exit_code == 0
        assert kvsm(*command, "--allow-policy", "a:B").exit_code == 2


@pytest.mark.parametrize("how", ["raise SystemExit(0)", "raise RuntimeError('no')", "return 1 / 0"])
@pytest.mark.parametrize("where", ["__init__", "admitted", "snapshot"])
def test_verify_gives_no_verdict_that_an_allowed_policy_made(
    tmp_path: Path, life: PlainLog, monkeypatch: pytest.MonkeyPatch, how: str, where: str
) -> None:
    """An allowed policy that fails, or calls sys.exit(0), ends no command with 0, and leaves no traceback."""
    name = f"failing_{where.strip('_')}_{abs(hash(how))}"
    (tmp_path / f"{name}.py").write_text(
        f"from kvsm.core.policies.lru import LRUPolicy\n"
        f"class P(LRUPolicy):\n    def {where}(self, *given):\n        {how}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    log = claiming(tmp_path / "log", life, policy=f"{name}:P")
    for command in (("replay", log), ("verify", log), ("show", log, "--block", 0)):
        result = kvsm(*command, "--allow-policy", f"{name}:P")
        if command[0] == "show" and where == "snapshot":
            continue  # It takes none.
        assert result.exit_code in (1, 2), (command, result.output)
        assert isinstance(result.exception, SystemExit)
        assert result.stderr.count("\n") <= 1


def saved(directory: Path, **options: Any) -> Path:
    """A saved failure whose world has these options."""
    directory.mkdir(parents=True, exist_ok=True)
    failure = {"target": "core", "options": options, "actions": [], "property_id": "S1", "message": "m"}
    failure |= {"seed": 0, "run": 0, "found": 0, "reruns": 0}
    (directory / "actions.json").write_text(json.dumps(failure))
    return directory


def test_a_saved_failure_names_built_in_policies_only(tmp_path: Path) -> None:
    """`kvsm fuzz --replay` runs no code that the file names, unless it is allowed."""
    directory = saved(tmp_path / "it", policy="kvsm.core.policies.lru:LRUPolicy")
    with pytest.raises(ConfigError, match="--allow-policy"):
        load(directory)
    found = load(directory, {"policy": ["kvsm.core.policies.lru:LRUPolicy"]})
    assert isinstance(found, SavedFailure)
    assert found.property is Property.CONSERVATION
    assert kvsm("fuzz", "--replay", directory).exit_code == 2
    allowed = kvsm("fuzz", "--replay", directory, "--allow-policy", "kvsm.core.policies.lru:LRUPolicy")
    assert allowed.exit_code == 0
    assert kvsm("fuzz", "--replay", saved(tmp_path / "arc", policy="arc")).exit_code == 0


# Memory.


def test_a_small_log_gets_little_memory(tmp_path: Path, life: PlainLog) -> None:
    """A few hundred bytes that claim 2**24 slots, or device blocks, are refused at once with a clear line."""
    for claims in ({"host_blocks": 1 << 24}, {"device_blocks": 1 << 31}, {"host_blocks": SMALL_POOL + 1}):
        log = claiming(tmp_path / str(claims), life, **claims)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        for reader in READERS.values():
            with pytest.raises(LogError, match="if you trust it, read it with --max-slots"):
                reader(log)
        assert time.process_time() - began < 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_restart_gets_little_memory(tmp_path: Path, life: PlainLog) -> None:
    """A device of 2**31 blocks took 8 GiB."""
    log = restarting(tmp_path / "log", life, device_blocks=1 << 31)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("rebuild", "verify_log", "tell", "Metrics.of"):
        with pytest.raises(LogError, match="if you trust it, read it with --max-slots"):
            READERS[name](log)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_log_may_claim_as_many_slots_as_it_has_bytes(tmp_path: Path, life: PlainLog) -> None:
    """A large engine writes more bytes than it has slots before long. Holes in a file are no bytes."""
    log = claiming(tmp_path / "log", life, host_blocks=SMALL_POOL + 1)
    (path,) = log.iterdir()
    holes = log / f"{10**6:020d}.kvsm"
    with holes.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(LogError, match="--max-slots"):
        rebuild(log, seq=1)
    holes.write_bytes(bytes(SMALL_POOL))
    assert rebuild(log, seq=1).ledger.config.host_blocks == SMALL_POOL + 1
    assert path.exists()


def test_max_slots_raises_the_limit_and_lowers_it(tmp_path: Path, life: PlainLog) -> None:
    log = claiming(tmp_path / "log", life, host_blocks=100, device_blocks=50)
    for command in (("replay", log), ("verify", log), ("show", log, "--block", 0)):
        assert kvsm(*command, "--max-slots", 100).exit_code == 0
        refused = kvsm(*command, "--max-slots", 99)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "it claims 100 host slots and 50 device blocks" in refused.stderr
        assert "--max-slots 100" in refused.stderr


def test_an_empty_pool_costs_little() -> None:
    """A ledger of a million slots takes a fraction of a second: its lists grow with what is in them."""
    began = time.process_time()
    life = Life(host_blocks=1 << 20, device_blocks=1 << 20)
    assert time.process_time() - began < 1
    life.stored("r", [key(1)], [0])
    assert len(life.core.ledger.free) == (1 << 20) - 1


@pytest.mark.parametrize("oldest", [0, 1])
def test_a_head_without_its_snapshot_is_damage(tmp_path: Path, oldest: int) -> None:
    """A later segment must have one, and the first must have none of another event."""
    life = Life(tmp_path / "log", {"segment_bytes": 700})
    for _ in range(20):
        life.stored("r", [key(1), key(2)], [0, 1])
        life.core.reset()
    life.close()
    log = read_plain(tmp_path / "log")
    assert len(log) > 2
    log[1].head[9] = b"" if oldest else log[2].head[9]
    wrong = write_plain(tmp_path / "wrong", log[oldest:])
    found = verify_log(wrong)
    assert found.damage or found.violations
    for name in ("rebuild", "tell", "Metrics.of"):
        with pytest.raises(LogDamaged, match="the snapshot in its head"):
            READERS[name](wrong)


def test_a_log_of_an_older_kvsm_with_several_segments_reads(tmp_path: Path) -> None:
    """Its snapshots lack a field of the configuration that was added since."""
    life = random_life(3, 400, tmp_path / "log", writer={"segment_bytes": 4000})
    life.close()
    older = read_plain(tmp_path / "log")
    assert len(older) > 2
    for head, frames, _ in older:
        del head[2]["block_tokens"]
        if head[9]:
            state = msgspec.msgpack.decode(head[9])
            del state[0]["block_tokens"]
            head[9] = msgspec.msgpack.encode(state)
        else:
            del frames[0][0][4]["block_tokens"]
    write_plain(tmp_path / "older", older)
    assert rebuild(tmp_path / "older").ledger.seq == life.core.ledger.seq
    assert verify_log(tmp_path / "older").good
