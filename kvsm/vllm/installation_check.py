"""Check whether the installed vLLM works with kvsm.

First the interface is checked: whether vLLM has the names that kvsm imports, and whether kvsm's methods fit
vLLM's calls. Then a tiny model serves the same prompts without kvsm, with `KvsmConnector`, and with
`KVSM_OFFLOAD=1` if vLLM finds kvsm's plugin. The device pool holds a third of the prompts, so without offload
a repeated prompt is never a hit. The tokens must be equal, blocks must be loaded, and each event log must
verify.

This does not show that your model, options and load work. kvsm's tests cover more, for the tested versions.
Equal tokens also do not exclude that blocks of one request were swapped, because cached keys carry their
positions; the connector's checksums exclude it.
"""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from kvsm.core.log import LogReader
from kvsm.errors import KvsmError
from kvsm.explain.metrics import Metrics
from kvsm.explain.story import verify_log
from kvsm.vllm.interface import changes
from kvsm.vllm.interface_table import INTERFACES
from kvsm.vllm.new_weights import SET_WEIGHTS_VERSION
from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA, VOCABULARY
from kvsm.vllm.trial import Trial, TrialFailed, TrialOutcome, connector_config, run_trial
from kvsm.vllm.versions import TESTED, installed
from kvsm.vllm.vllm_plugin import SWITCH, why_not_loaded

LATER = frozenset(
    method.name for interface in INTERFACES.values() for method in interface.methods if method.since
)
"""Methods that vLLM calls only in versions newer than the oldest tested one."""

CALLED = (
    ("kvsm.vllm.connector", "KvsmConnector"),
    ("kvsm.vllm.recording_spec", "RecordingSpec"),
    ("kvsm.vllm.host_copy_worker", "HostCopyWorker"),
)
"""The classes that vLLM calls: (module, class)."""

CONNECTOR = "KvsmConnector"
"""The name of the engine whose `kv_transfer_config` names the connector."""

SHORT_START = f"{SWITCH}=1"
"""The name of the engine that is started with this variable and `--kv-offloading-size`."""

_CONVERSATIONS, _PROMPT_TOKENS, _ROUNDS = 12, 200, 2
_DEVICE_BLOCKS = 32
_HOST_BYTES = 1 << 26


class EngineCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one engine.

    wrong: one line for each problem.
    other_tokens: requests whose tokens differ from those without kvsm.
    log: the directory of the event log, if it was kept.
    """

    name: str
    wrong: tuple[str, ...] = ()
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    other_tokens: int = 0
    blocks_stored: int = 0
    blocks_loaded: int = 0
    log: str | None = None
    log_events: int = 0
    log_verifies: bool = False
    digest: str | None = None


class InstallationCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check of the installed vLLM.

    version: of vLLM.
    platform: the device type that the engines run on.
    interface: names and arguments that kvsm needs and vLLM does not have.
    news: names that vLLM has and kvsm does not know; they need not be a problem.
    engines: the first one has no kvsm.
    no_short_start: why `KVSM_OFFLOAD=1` has no effect here; empty if it has. Other ways may work.
    """

    version: str
    tested: bool
    platform: str
    ranks: int
    interface: tuple[str, ...]
    engines: tuple[EngineCheck, ...]
    news: tuple[str, ...] = ()
    no_short_start: str = ""

    @property
    def wrong(self) -> list[str]:
        """One line for each problem; none if kvsm works here."""
        of_engines = (f"{engine.name}: {line}" for engine in self.engines for line in engine.wrong)
        return [*self.interface, *of_engines]


def check_installation(
    ranks: int = 1, logs: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> InstallationCheck:
    """Check the installation.

    ranks: tensor-parallel ranks of each engine.
    logs: the directory in which event logs are kept; None keeps none.
    tell: called with a line of progress.
    Raises `ConfigError` without vLLM, and `TrialFailed` if vLLM does not serve even without kvsm.
    """
    version = installed()
    tell(f"checking the interface of vLLM {version}")
    missing, news, platform = _look()
    with TemporaryDirectory(prefix="kvsm-check-") as scratch:
        parent = Path(scratch) if logs is None else logs
        tell("serving without kvsm")
        plain = run_trial(_trial(ranks, None))
        engines = [_served("without kvsm", plain)]
        no_short_start = why_not_loaded()
        for name in (CONNECTOR, *(() if no_short_start else (SHORT_START,))):
            tell(f"serving with {name}")
            engines.append(_serve(name, ranks, plain, parent / name, kept=logs is not None))
    return InstallationCheck(
        version=version,
        tested=version.split("+")[0] in TESTED,
        platform=platform,
        ranks=ranks,
        interface=tuple(missing),
        engines=tuple(engines),
        news=tuple(news),
        no_short_start=no_short_start,
    )


# The interface.


def _look() -> tuple[list[str], list[str], str]:
    """Check the interface. Returns (what is missing, what is new, the platform of vLLM)."""
    try:
        from vllm.platforms import current_platform
    except Exception as error:  # The user must see the reason, whatever it is.
        raise KvsmError(f"vLLM cannot be imported: {type(error).__name__}: {error}") from error
    missing = missing_names(Path(__file__).parent)
    if not missing:
        missing = [line for module, name in CALLED for line in misfits(getattr(import_module(module), name))]
    return missing, [] if missing else changes(), str(current_platform.device_type)


def missing_names(package: Path) -> list[str]:
    """Return a line for each name that a file of this directory imports from vLLM and that does not exist."""
    missing = []
    for path in sorted(package.glob("*.py")):
        for module, name in _imported(ast.parse(path.read_text())):
            if not _exists(module, name):
                missing.append(f"vLLM has no {module}.{name}, which {path.stem} needs")
    return missing


def _exists(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or bool(import_module(f"{module}.{name}"))
    except ImportError:
        return False


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)


def misfits(ours: type) -> list[str]:
    """Return why vLLM cannot call this class of kvsm: missing methods, unknown methods, other arguments."""
    title = ours.__name__
    theirs = [base for base in ours.__mro__ if base.__module__.split(".")[0] == "vllm"]
    found = [f"{title} lacks {name}, which vLLM needs" for name in sorted(_abstract(ours))]
    for name, method in vars(ours).items():
        if name.startswith("_") or not (callable(method) or isinstance(method, classmethod | property)):
            continue
        base = next((base for base in theirs if name in vars(base)), None)
        if base is None:
            if name not in LATER and name != SET_WEIGHTS_VERSION:
                found.append(f"vLLM does not call {title}.{name}, which kvsm needs")
        elif not isinstance(method, property):
            found += _arguments(title, name, getattr(ours, name), getattr(base, name))
    return found


def _abstract(ours: type) -> frozenset[str]:
    return getattr(ours, "__abstractmethods__", frozenset())


def _arguments(title: str, name: str, ours: Any, theirs: Any) -> list[str]:
    taken, given = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return []
    needed = [one.name for one in taken.values() if one.default is one.empty]
    # vLLM passes arguments by position and by name, so its arguments must come first and in its order.
    if list(taken)[: len(given)] == list(given) and len(needed) <= len(given):
        return []
    return [f"{title}.{name} takes ({', '.join(taken)}); vLLM gives ({', '.join(given)})"]


# Engines.


def prompts() -> list[list[int]]:
    """Return prompts without common prefixes. Together they need three times the blocks of the device."""
    drawn = random.Random(0)
    return [[drawn.randrange(3, VOCABULARY) for _ in range(_PROMPT_TOKENS)] for _ in range(_CONVERSATIONS)]


def _trial(ranks: int, kv_transfer: dict[str, Any] | None) -> Trial:
    engine = {
        "num_gpu_blocks_override": _DEVICE_BLOCKS,
        "max_num_seqs": 4,
        "tensor_parallel_size": ranks,
    }
    # Each rank needs its own attention head.
    model = {**LLAMA, "num_attention_heads": max(ranks, LLAMA["num_attention_heads"])}
    return Trial(rounds=[prompts()] * _ROUNDS, kv_transfer=kv_transfer, engine=engine, model=model)


def _short_start(trial: Trial) -> Trial:
    """Return the trial as if the user started vLLM with `KVSM_OFFLOAD=1` and `--kv-offloading-size`."""
    size = {"kv_offloading_size": _HOST_BYTES / (1 << 30)}
    return msgspec.structs.replace(trial, engine=trial.engine | size, environment={SWITCH: "1"})


def _serve(name: str, ranks: int, plain: TrialOutcome, logs: Path, kept: bool) -> EngineCheck:
    options: dict[str, Any] = {"event_log": str(logs), "verify_copies": True}
    if name == SHORT_START:
        trial = _short_start(_trial(ranks, {"kv_connector_extra_config": options}))
    else:
        trial = _trial(ranks, connector_config(cpu_bytes_to_use=_HOST_BYTES, **options))
    try:
        outcome = run_trial(trial)
    except TrialFailed as failure:
        return EngineCheck(name=name, wrong=(str(failure),))
    return judged(_read_log(_served(name, outcome), logs, kept), plain, outcome)


def _served(name: str, outcome: TrialOutcome) -> EngineCheck:
    return EngineCheck(
        name=name,
        requests=len(outcome.tokens),
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=sum(outcome.cached_tokens),
    )


def _read_log(served: EngineCheck, logs: Path, kept: bool) -> EngineCheck:
    """Add the findings of the engine's event log to its result."""
    directories = sorted(logs.iterdir()) if logs.exists() else []
    if not directories:
        return msgspec.structs.replace(served, wrong=(f"no event log in {logs}",))
    directory = directories[-1]
    found = verify_log(directory)
    wrong = [f"the event log breaks {one.property}: {one.message}" for one in found.violations]
    if found.damage is not None or not found.condition.complete:
        wrong.append(f"the event log is incomplete: {found.damage or found.condition.notes()}")
    counted = Metrics.of(LogReader(directory)).values()
    for direction, outcomes in counted["transfers_ended"].items():
        if outcomes["failed"]:
            wrong.append(f"failed {direction}s: {outcomes['failed']:,}")
    return msgspec.structs.replace(
        served,
        wrong=tuple(wrong),
        blocks_stored=counted["blocks_stored"],
        blocks_loaded=counted["blocks_loaded"],
        log=str(directory) if kept else None,
        log_events=found.events,
        log_verifies=found.good,
        digest=found.digest,
    )


def judged(served: EngineCheck, plain: TrialOutcome, outcome: TrialOutcome) -> EngineCheck:
    """Add the comparison with the engine without kvsm to an engine's result."""
    others = sum(ours != theirs for ours, theirs in zip_longest(outcome.tokens, plain.tokens))
    wrong = list(served.wrong)
    if others:
        wrong.append(f"{others} of {len(plain.tokens)} requests got other tokens than without kvsm")
    # Only whole blocks are loaded, and a prompt's last token is computed. A few stores may end too late.
    again = (_ROUNDS - 1) * _CONVERSATIONS * ((_PROMPT_TOKENS - 1) // BLOCK_TOKENS)
    if served.blocks_loaded < again * 3 // 4:
        wrong.append(
            f"{served.blocks_loaded:,} blocks were loaded ({served.blocks_stored:,} were stored), but the "
            f"prompts repeat {again:,}"
        )
    if served.cached_tokens <= sum(plain.cached_tokens):
        wrong.append(
            f"{served.cached_tokens:,} prompt tokens came from a cache; without kvsm it is "
            f"{sum(plain.cached_tokens):,}"
        )
    return msgspec.structs.replace(served, other_tokens=others, wrong=tuple(wrong))
