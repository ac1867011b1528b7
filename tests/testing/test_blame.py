"""A failure of a machine names a policy that reads a clock, the call that wrote wrong bytes, and the line to
mark."""

from __future__ import annotations

import ast
import inspect
import logging
import random
import time
from datetime import datetime
from random import Random
from typing import Any

import msgspec
import pytest
from places import ROOT
from source_trees import nodes_of

from kvsm.check.worlds.small_workers import TORN
from kvsm.copies import HostCopyEngine
from kvsm.core.policies.lru import LRUPolicy
from kvsm.core.scheduler import LastStep, OffloadScheduler
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.properties import Property
from kvsm.testing import Arrival, Configuration, CopyEngineMachine, OffloadMachine
from kvsm.testing.block_history import Block, BlockHistory
from kvsm.testing.machine_base import PropertyMachine
from kvsm.testing.manager_books import ManagerBooks
from kvsm.testing.prefix_tree_books import TreeBooks
from kvsm.testing.under_test import UnderTest


def line_of(method: Any) -> str:
    return f"{__file__}:{inspect.getsourcelines(method)[1]}"


def opened(machine: OffloadMachine) -> OffloadMachine:
    machine.open(Configuration(last_step=LastStep.KEEP_STEPPING), Arrival(length=9, outputs=4))
    machine.step(None, True, 3)
    return machine


# A policy that cannot be replayed.


class Timed(LRUPolicy):
    def admitted(self, *arguments: Any, **named: Any) -> None:
        self.seen = time.monotonic_ns()
        super().admitted(*arguments, **named)


class Dated(LRUPolicy):
    def choose(self, count: int, protected: Any) -> Any:
        return super().choose(count, protected) if datetime.now().year else None


class Dice(LRUPolicy):
    def admitted(self, *arguments: Any, **named: Any) -> None:
        random.randint(1, 6)
        super().admitted(*arguments, **named)


class TimedFromTheStart(LRUPolicy):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.began = time.time()


class TimedByTheSystem(LRUPolicy):
    def admitted(self, *arguments: Any, **named: Any) -> None:
        self.seen = time.clock_gettime(time.CLOCK_MONOTONIC)
        super().admitted(*arguments, **named)


@pytest.mark.parametrize(
    ("chosen", "does", "after"),
    [
        (TimedByTheSystem, "reads the clock (time.clock_gettime at ", 1),
        (Timed, "reads the clock (time.monotonic_ns at ", 1),
        (Dated, "reads the clock (datetime.now at ", 1),
        (Dice, "draws random numbers without a seed of its own (random.getrandbits at ", 1),
        (TimedFromTheStart, "reads the clock (time.time at ", 2),
    ],
)
def test_a_policy_that_no_replay_repeats_is_named(chosen: type[LRUPolicy], does: str, after: int) -> None:
    """The policy is named even if the clock has not yet changed a choice: it may matter only after an
    hour."""

    class Machine(OffloadMachine):
        policy = chosen

    with pytest.raises(PropertyBroken) as broken:
        opened(Machine()).let_all_end()
    assert broken.value.property is Property.DETERMINISM
    assert f"the policy {does}{__file__}:" in broken.value.message
    own = [one for name, one in vars(chosen).items() if inspect.isfunction(one)]
    assert broken.value.place == f"{__file__}:{inspect.getsourcelines(own[0])[1] + after}"


class LogsAndDraws(LRUPolicy):
    """A logger may read the clock, and a seeded generator draws the same numbers in a replay."""

    drawn = Random(3)

    def admitted(self, *arguments: Any, **named: Any) -> None:
        logging.getLogger(__name__).warning("admitted %s", self.drawn.random())
        super().admitted(*arguments, **named)


def test_a_policy_may_log_and_have_seeded_numbers() -> None:
    class Machine(OffloadMachine):
        policy = LogsAndDraws

    opened(Machine()).let_all_end()


# Wrong bytes.


class LoadsTheNeighbour(OffloadScheduler):
    """Loads read the slot beside the right one."""

    def build_connector_meta(self, output: Any) -> Any:
        plan = super().build_connector_meta(output)
        loads = [
            msgspec.structs.replace(job, host_blocks=tuple((int(one) + 1) % 4 for one in job.host_blocks))
            for job in plan.loads
        ]
        return msgspec.structs.replace(plan, loads=tuple(loads))


class Neighbour(OffloadMachine):
    def make_scheduler(self, offloader: Any, config: Any) -> Any:
        return LoadsTheNeighbour(offloader, config)


def test_wrong_bytes_name_the_writer_the_reader_and_the_calls() -> None:
    """The failure covers the device block that was read, and the slot from which a load copied its bytes."""
    machine = Neighbour()
    machine.open(Configuration(), Arrival(length=6, outputs=1))
    machine.let_all_end()
    machine.arrive(Arrival(length=6, outputs=1))
    with pytest.raises(PropertyBroken) as broken:
        machine.let_all_end()
    [first, written, touched, *source] = broken.value.message.splitlines()
    assert first.startswith("request r2 reads token 0 of group 0 in device block ")
    assert " was last written by load " in written
    assert f" of your connector ({line_of(LoadsTheNeighbour.build_connector_meta)})" in written
    assert touched.split(": ", 1)[1].endswith("; r2 computes from token 4 on")
    assert " was last written by " in source[0]
    assert source[1].startswith("  calls that touched slot ")
    assert broken.value.place == line_of(LoadsTheNeighbour.build_connector_meta)


def test_a_slot_with_other_bytes_names_its_store() -> None:
    machine = opened(OffloadMachine())
    machine.engine.carry_out_all()
    machine.hand_on()
    machine.engine.host[0][0] = [TORN]
    with pytest.raises(
        PropertyBroken, match=r"slot 0 was last written by store \d+ from device block \d+ to slot 0, "
    ):
        machine.check()


class SwapsHosts(HostCopyEngine):
    def submit(self, job: Any) -> None:
        super().submit(msgspec.structs.replace(job, host_blocks=tuple(job.host_blocks)[::-1]))


class Swapped(CopyEngineMachine):
    def make_engine(self, device: Any, host: Any) -> Any:
        return SwapsHosts(device, host, threads=1)


def test_wrong_bytes_of_a_copy_engine_name_its_submit() -> None:
    machine = Swapped()
    machine.start(0)
    machine.compute_writes(0, 7)
    machine.submit(Direction.STORE, [(0, 3), (1, 4)], False)
    with pytest.raises(PropertyBroken) as broken, machine.under_test.guard():
        machine.wind_down()
    machine.close()
    lines = broken.value.message.splitlines()
    assert lines[0] == "at the end host block 3 holds [1, 1]; it must hold 7 in every byte"
    assert lines[1].startswith(
        "  host block 3 was last written by store 1 from device block 0 to host block 3, after "
    )
    assert lines[3] == "  device block 0 was last written by compute writes 7"
    assert broken.value.place == line_of(SwapsHosts.submit)


def test_a_load_of_another_block_names_both_stores() -> None:
    """This is the failure of a vLLM manager."""
    books = ManagerBooks(4, False, BlockHistory(UnderTest()))
    books.store_begins([b"a", b"b"], [b"a", b"b"], [], [0, 1])
    books.store_ends([b"a", b"b"], True)
    with pytest.raises(PropertyBroken) as broken:
        books.load_begins([b"a"], [1])
    assert broken.value.message.splitlines() == [
        "b'a' was stored to block 0; its load reads 1",
        "  block 1 was last written by the store of b'b'",
        "  calls that touched block 1: the store of b'b'; the load of b'a'",
        "  block 0 was last written by the store of b'a'",
        "  calls that touched block 0: the store of b'a'",
    ]


def test_a_wrong_word_in_a_tree_names_its_step() -> None:
    books, history = TreeBooks(4, 4), BlockHistory(UnderTest())
    word = books.word((1,))
    history.wrote(Block("device slot", 2), "a step of r1 writes (1,)")
    with pytest.raises(PropertyBroken, match="device slot 2 was last written by a step of r1 writes"):
        books.read("r2", (0,), 2, word, history)


# The line to mark.


class KeepsKeys(OffloadScheduler):
    def reset_cache(self) -> bool:
        return True

    def has_pending_work(self) -> bool:
        return super().has_pending_work()


class Kept(OffloadMachine):
    def make_scheduler(self, offloader: Any, config: Any) -> Any:
        return KeepsKeys(offloader, config)


def test_the_place_is_the_method_that_was_called_last() -> None:
    """Only methods that the user wrote count: not the machine's, and not inherited ones."""
    machine = opened(Kept())
    with pytest.raises(PropertyBroken, match="keys match after a reset") as broken:
        machine.reset(True)
    assert broken.value.place == line_of(KeepsKeys.reset_cache)


# What a machine needs.


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("offload_machine.py", "OffloadMachine"),
        ("copy_engine_machine.py", "CopyEngineMachine"),
        ("manager_machine.py", "ManagerMachine"),
        ("prefix_tree_machine.py", "PrefixTreeMachine"),
    ],
)
def test_the_docstring_names_all_that_a_machine_needs(file: str, name: str) -> None:
    """It names each method to override and each option. The machine for managers is left out: it cannot be
    imported without vLLM."""
    [machine] = [
        node
        for node in nodes_of(ROOT / "kvsm" / "testing" / file)
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    text = ast.get_docstring(machine) or ""
    given = {*vars(PropertyMachine)}
    for node in machine.body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            given_here = node.name
        elif isinstance(node, ast.AnnAssign) and "Bundle" not in ast.unparse(node.annotation):
            given_here = ast.unparse(node.target)
        elif isinstance(node, ast.Assign):
            given_here = ast.unparse(node.targets[0])
        else:
            continue
        assert given_here.startswith("_") or given_here in given or f"`{given_here}" in text, given_here
    assert "Needs: " in text
    assert "`self." in text
