"""`kvsm conform`: test a connector, a manager, a tier, a tree or a copy engine in random walks, and print one
page."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from random import SystemRandom
from time import gmtime, monotonic, sleep, strftime
from typing import Any

import click
import msgspec

from kvsm.cli.conform_page import page_of
from kvsm.cli.conform_result import (
    BROKEN,
    HELD,
    NOT_APPLICABLE,
    NOT_EXERCISED,
    CheckedCase,
    ConformAnswer,
    ConformDefect,
    PropertyVerdict,
)
from kvsm.cli.conform_targets import BUILT_IN
from kvsm.cli.conform_worker import (
    STALL_S,
    DefectFound,
    Message,
    Ready,
    RunBegan,
    RunEnded,
    StepsMade,
    TargetRefused,
    WalkEnded,
    WorkOrder,
    shape_of,
)
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.fuzz_targets import ConnectorConfig
from kvsm.cli.output import Command, complain, say_json, say_rows, say_text
from kvsm.cli.signals import EndRequest, ends_between_steps
from kvsm.errors import ConfigError
from kvsm.properties import Property

_SILENT_S = 8 * STALL_S
"""End a worker that makes no step for this time (s)."""

_IMPORT_S = 900
"""The same limit while a worker imports the target (s): importing vLLM takes minutes on a busy machine."""

_START = "import sys; del sys.path[0]; from kvsm.cli.conform_worker import main; main()"
"""Code that starts a worker. It does not search the current directory, where a file may be named like a
package."""

_MOST_CRASHES = 5
"""End the walk after the worker has ended or hung this many times."""

_GRACE_S = 2.0
"""How long a worker may take to end after its last message (s)."""


class _Seconds(click.FloatRange):
    """A time, 0 or longer. Not "inf" and not "nan": JSON has neither."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the number. Fails if it is none."""
        seconds = super().convert(value, parameter, context)
        if not isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", parameter, context)
        return seconds


@click.command(cls=Command)
@click.argument("target", required=False)
@click.option("--list", "lists", is_flag=True, help="List the built-in targets.")
@click.option(
    "--config",
    default="{}",
    type=ConnectorConfig(),
    metavar="JSON",
    help="A connector's kv_connector_extra_config.",
)
@click.option("--seconds", type=_Seconds(), default=60.0, metavar="S", help="Walk for this time (60).")
@click.option(
    "--reduce-seconds",
    type=_Seconds(),
    default=20.0,
    metavar="S",
    help="Reduce each different defect for at most this time, on top of --seconds (20).",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=lambda: SystemRandom().getrandbits(32),
    metavar="S",
    help="Seed of all runs. Default: a random one.",
)
@click.option(
    "--log",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="New or empty directory for the defects, each with a test for pytest. Default: they are not saved.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PAGE.md",
    help="Also write the page to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON in place of the page.")
def conform(
    target: str | None,
    lists: bool,
    config: dict[str, Any],
    directory: Path | None,
    output: Path | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Test a connector, manager or tier; print what held.

    TARGET can also be a prefix tree or a copy engine. It is a built-in name (--list), or module:Class: a
    state machine of kvsm.testing, a world, or a connector of vLLM. Hypothesis, or vLLM's real scheduler with
    a stub of a model, makes the calls in random order.

    The result is one page that lists each property of kvsm. A property held only if a case arose in which a
    check could have failed; the page counts these cases. Otherwise the property was not exercised, or does
    not apply, and the page says why. For a broken property, the page has the reduced steps. The walk
    continues after a failure, and two failures with the same property and message count as one defect. A call
    that hangs or ends the process breaks a property, too.

    \b
    Examples:
      kvsm conform --list
      kvsm conform vllm:OffloadingConnector --seconds 120 -o offloading.md
      kvsm conform vllm:fs
      kvsm conform my_package.my_module:MyConnector --config '{"my_option": 1}'
      kvsm conform my_tests:MyTierMachine --seed 7

    \b
    Exit codes: 0 no property was broken; 1 one was; 2 unusable input, or a package is missing; 130 (Ctrl-C)
    or 143 (SIGTERM) if interrupted before a property was broken.
    """
    if lists:
        say_rows((name, one.says) for name, one in BUILT_IN.items())
        return
    if target is None:
        raise click.UsageError("Name a target, or give --list.")
    if output is not None:
        _require_writable(output)
    if directory is not None:
        _require_empty(directory)
    where = "" if directory is None else str(directory)
    order = WorkOrder(target=target, config=config, directory=where, **limits)
    complain(f"walks {target} for {order.seconds:g} s, seed {order.seed}")
    with ends_between_steps() as ending:
        answer = ConformWalk(order, ending).walk()
    page = page_of(answer)
    if as_json:
        say_json(answer)
    else:
        say_text(page)
    if output is not None:
        _write(output, page)
    if answer.defects:
        raise SystemExit(ExitCode.BROKEN)
    if answer.interrupted:
        raise SystemExit(ending.code or ExitCode.INTERRUPTED)


def _require_writable(output: Path) -> None:
    """Raise `ConfigError` if a page cannot be written there: before the walk, whose result would be lost."""
    place = output if output.exists() else output.parent
    if not os.access(place, os.W_OK):
        raise _unwritable(output, os.strerror(errno.EACCES if place.exists() else errno.ENOENT))


def _require_empty(directory: Path) -> None:
    """Raise `ConfigError` if no defects can be saved there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; name a directory that can be written") from error
    if not is_empty:
        raise ConfigError(f"{directory}: not empty; name a new directory, or an empty one")


def _write(output: Path, page: str) -> None:
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise _unwritable(output, str(error.strerror)) from error


def _unwritable(output: Path, why: str) -> ConfigError:
    return ConfigError(f"{output}: {why}; name a file that can be written")


class ConformWalk:
    """Walks a target in worker processes, one after the other, until the time is over."""

    def __init__(self, order: WorkOrder, ending: EndRequest) -> None:
        self._order, self._ending = order, ending
        self._ready: Ready | None = None
        self._runs = self._operations = 0
        self._seconds = 0.0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._defects: dict[str, DefectFound] = {}
        """Shape of the failure before its reduction -> the defect, as far as it is reduced."""
        self._times: Counter[str] = Counter()
        self._crashes = 0
        self._run = order.first_run
        self._is_done = False

    def walk(self) -> ConformAnswer:
        """Walk until the time is over. Raises `ConfigError` if the target cannot be walked."""
        first = True
        while first or not (self._is_done or self._ending.is_made() or self._crashes >= _MOST_CRASHES):
            first = False
            with _worker(self._remaining()) as worker:
                self._listen(worker)
        return self._answer()

    def _remaining(self) -> WorkOrder:
        left = max(0.0, self._order.seconds - self._seconds)
        known = tuple(self._defects)
        return msgspec.structs.replace(self._order, seconds=left, first_run=self._run, known=known)

    def _listen(self, worker: _Worker) -> None:
        for message in worker.messages(_SILENT_S, self._ending):
            if isinstance(message, TargetRefused):
                raise ConfigError(message.why)
            if isinstance(message, Ready):
                self._ready = self._ready or message
            elif isinstance(message, RunBegan):
                self._run = message.run
            elif isinstance(message, RunEnded):
                self._add(message)
            elif isinstance(message, DefectFound):
                self._note(message)
            elif not isinstance(message, StepsMade):
                self._is_done = True
        if not (self._is_done or self._ending.is_made()):
            self._crashed(worker)

    def _add(self, message: RunEnded) -> None:
        self._runs += 1
        self._operations += message.operations
        self._seconds += message.seconds
        self._run += 1
        for id, case, times in message.counts:
            self._counts[id, case] += times

    def _note(self, message: DefectFound) -> None:
        if message.reduced:
            self._defects[message.shape] = message
            return
        self._defects.setdefault(message.shape, message)
        self._times[message.shape] += 1

    def _crashed(self, worker: _Worker) -> None:
        """Record that the worker ended or hung in a run, and skip this run."""
        if self._ready is None:
            how = f"{worker.how_it_ended()} while it was imported{worker.last_words()}"
            raise ConfigError(f"{self._order.target}: {how}")
        self._crashes += 1
        variants = self._ready.variants
        variant = variants[self._run % len(variants)]
        broken = Property.PROGRESS if worker.is_silent else Property.LEGAL_CALLS
        message = f"{worker.how_it_ended()} in run {self._run}{worker.last_words()}"
        shape = shape_of(broken.id, message, "")
        defect = DefectFound(broken.id, message, "", shape, variant, self._run, "", "not reduced")
        self._defects.setdefault(shape, defect)
        self._times[shape] += 1
        self._run += 1
        self._is_done = self._seconds >= self._order.seconds

    # The result.

    def _answer(self) -> ConformAnswer:
        ready = self._ready or Ready({}, (), {})
        defects = [self._defect(one) for one in self._merged()]
        return ConformAnswer(
            target=self._order.target,
            says=BUILT_IN[self._order.target].says if self._order.target in BUILT_IN else "",
            config=self._order.config,
            date=strftime("%Y-%m-%d", gmtime()),
            versions=ready.versions,
            seed=self._order.seed,
            runs=self._runs,
            operations=self._operations,
            limit=self._order.seconds,
            seconds=round(self._seconds, 1),
            interrupted=self._ending.is_made() or self._crashes >= _MOST_CRASHES,
            properties=tuple(
                self._verdict(one, {defect.property_id for defect in defects}, ready) for one in Property
            ),
            defects=tuple(defects),
        )

    def _merged(self) -> list[DefectFound]:
        """Return the different defects. Two defects with the same shape after their reduction are one."""
        merged: dict[str, DefectFound] = {}
        for one in self._defects.values():
            shape = shape_of(one.property_id, one.message, one.place)
            if (first := merged.setdefault(shape, one)) is not one:
                self._times[first.shape] += self._times[one.shape]
        return list(merged.values())

    def _defect(self, found: DefectFound) -> ConformDefect:
        return ConformDefect(
            property_id=found.property_id,
            message=found.message,
            place=found.place,
            times=self._times[found.shape],
            run=found.run,
            variant=found.variant,
            reduced=found.reduced or "not reduced",
            steps=tuple(found.steps.split("\n")) if found.steps else (),
            directory=found.directory,
        )

    def _verdict(self, one: Property, broken: set[str], ready: Ready) -> PropertyVerdict:
        cases = tuple(
            CheckedCase(case, times) for (id, case), times in sorted(self._counts.items()) if id == one.id
        )
        why = ready.not_applicable.get(one.id, "")
        if one.id in broken:
            return PropertyVerdict(one.id, BROKEN, cases)
        if cases:
            return PropertyVerdict(one.id, HELD, cases)
        return PropertyVerdict(one.id, NOT_APPLICABLE if why else NOT_EXERCISED, (), why)


class _Worker:
    """A running `conform_worker` process.

    is_silent: whether it was ended because it sent nothing for too long.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: int, errors: Any) -> None:
        self._process, self._pipe, self._errors = process, pipe, errors
        self.is_silent, self._limit_s = False, float(_IMPORT_S)

    def messages(self, silent_s: float, ending: EndRequest) -> Iterator[Message]:
        """Yield the worker's messages until it ends, sends nothing for `silent_s`, or the command must
        end."""
        decoder, rest, heard = msgspec.json.Decoder(Message), b"", monotonic()
        while not ending.is_made():
            if not select.select([self._pipe], [], [], 0.2)[0]:
                if self._has_ended():  # Processes that the target has started may hold the pipe open.
                    return
                self.is_silent = monotonic() - heard > self._limit_s
                if self.is_silent:
                    return
                continue
            data = os.read(self._pipe, 1 << 16)
            if not data:
                return
            heard, self._limit_s = monotonic(), silent_s
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = decoder.decode(line)
                yield message
                if isinstance(message, WalkEnded):
                    return

    def how_it_ended(self) -> str:
        """Describe the end of the process."""
        if self.is_silent:
            return f"the process made no step for {self._limit_s:g} s"
        self.end()
        code = self._process.returncode
        if code < 0:
            return f"the process ended with signal {_name_of(-code)}"
        return f"the process ended with exit code {code}"

    def last_words(self) -> str:
        """Return the innermost line of the Python stack that a crash printed, or the last line of output."""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if "most recent call first" in text:
            return f", at {next(line for line in lines if line.startswith('File '))}"
        return f": {lines[-1]}" if lines else ""

    def end(self) -> None:
        """End the process, if it still runs, and those that it has started in its group. Idempotent."""
        if self._process.returncode is not None:
            return
        until = monotonic() + (0.0 if self.is_silent else _GRACE_S)
        while not self._has_ended() and monotonic() < until:
            sleep(0.01)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _has_ended(self) -> bool:
        """Whether the process has ended. It is not waited for, so its group keeps its number."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _name_of(number: int) -> str:
    """Return the name of a signal. Most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


@contextmanager
def _worker(order: WorkOrder) -> Iterator[_Worker]:
    """Start a worker for this order, in a process group of its own. It is ended when the block ends."""
    here, there = os.pipe()
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    command = [sys.executable, "-c", _START, str(there), msgspec.json.encode(order).decode()]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            pass_fds=[there],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        os.close(there)
        worker = _Worker(process, here, errors)
        try:
            yield worker
        finally:
            worker.end()
            os.close(here)
