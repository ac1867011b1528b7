"""Does the vLLM that is installed here work with kvsm?

First what can be read: are the names there that kvsm imports, and do its methods fit those that vLLM calls.
Then what can be run: a tiny model serves the same prompts without kvsm, by `KvsmConnector` and by `KvsmSpec`.
The device pool holds a third of them, so without offload nothing is found again. The tokens must be the same,
blocks must be loaded, and each event log must verify.

What it does not show: that your model, your options and your load work. The tests of kvsm are broader, for
the versions that are named as tested. Nor do tokens tell if blocks of one request were exchanged, for keys
carry their positions with them; the connector's checksums do.
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

from kvsm.errors import KvsmError
from kvsm.log import LogReader
from kvsm.metrics import Metrics
from kvsm.replay import verify_log
from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA, VOCABULARY
from kvsm.vllm.trial import Trial, TrialFailed, TrialOutcome, connector_config, run_trial, spec_config
from kvsm.vllm.versions import TESTED, installed

CONTESTANTS = ("KvsmConnector", "KvsmSpec")

LATER = frozenset({"on_reset_flushed"})
"""Methods that newer versions call than the oldest that was tested."""

_CALLED = (
    ("kvsm.vllm.connector", "KvsmConnector"),
    ("kvsm.vllm.spec", "KvsmSpec"),
    ("kvsm.vllm.spec_manager", "KvsmManager"),
    ("kvsm.vllm.spec_worker", "KvsmOffloadingWorker"),
)
"""What vLLM calls: (module, class)."""

_CONVERSATIONS, _PROMPT_TOKENS, _ROUNDS = 12, 200, 2
_DEVICE_BLOCKS = 32
_HOST_BYTES = 1 << 26


class EngineCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did. wrong: a line for each thing that is not as it must be. other_tokens: requests
    that got other tokens than without kvsm. log: where the event log is, if it was kept."""

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
    """version: of vLLM. platform: what its engine runs on. interface: what kvsm needs of vLLM and does not
    find. engines: the first is that without kvsm."""

    version: str
    tested: bool
    platform: str
    ranks: int
    interface: tuple[str, ...]
    engines: tuple[EngineCheck, ...]

    @property
    def wrong(self) -> list[str]:
        """A line for each thing that is wrong; empty: kvsm works here."""
        return [*self.interface, *(f"{one.name}: {line}" for one in self.engines for line in one.wrong)]


def check_installation(
    ranks: int = 1, logs: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> InstallationCheck:
    """logs: where event logs are kept; None: nowhere. tell: hears what is going on now.

    Raises `ConfigError` without vLLM, and `TrialFailed` if vLLM does not serve even without kvsm.
    """
    version = installed()
    tell(f"looking at vLLM {version}")
    missing, platform = _look()
    with TemporaryDirectory(prefix="kvsm-check-") as scratch:
        parent = Path(scratch) if logs is None else logs
        tell("serving without kvsm")
        plain = run_trial(_trial(ranks, None))
        engines = [_served("without kvsm", plain)]
        for name in CONTESTANTS:
            tell(f"serving with {name}")
            engines.append(_serve(name, ranks, plain, parent / name, kept=logs is not None))
    return InstallationCheck(
        version=version,
        tested=version.split("+")[0] in TESTED,
        platform=platform,
        ranks=ranks,
        interface=tuple(missing),
        engines=tuple(engines),
    )


# What can be read.


def _look() -> tuple[list[str], str]:
    """(what is missing, the platform)."""
    try:
        from vllm.platforms import current_platform
    except Exception as error:  # Whatever keeps vLLM from being imported is what the user must hear.
        raise KvsmError(f"vLLM cannot be imported: {type(error).__name__}: {error}") from error
    missing = missing_names(Path(__file__).parent)
    if not missing:
        missing = [line for module, name in _CALLED for line in misfits(getattr(import_module(module), name))]
    return missing, str(current_platform.device_type)


def missing_names(package: Path) -> list[str]:
    """What the files of a package import from vLLM that is not there."""
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
    """Why vLLM cannot call this class of kvsm as it calls its own: what it has not, what vLLM does not know,
    what takes other arguments."""
    title = ours.__name__
    theirs = [base for base in ours.__mro__ if base.__module__.split(".")[0] == "vllm"]
    found = [f"{title} lacks {name}, which vLLM needs" for name in sorted(_abstract(ours))]
    for name, method in vars(ours).items():
        if name.startswith("_") or not (callable(method) or isinstance(method, classmethod | property)):
            continue
        base = next((base for base in theirs if name in vars(base)), None)
        if base is None:
            if name not in LATER:
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
    # vLLM gives arguments by place and by name: those that it gives must come first, in its order.
    if list(taken)[: len(given)] == list(given) and len(needed) <= len(given):
        return []
    return [f"{title}.{name} takes ({', '.join(taken)}); vLLM gives ({', '.join(given)})"]


# What can be run.


def prompts() -> list[list[int]]:
    """Conversations that share nothing, and that together are three times what the device holds."""
    drawn = random.Random(0)
    return [[drawn.randrange(3, VOCABULARY) for _ in range(_PROMPT_TOKENS)] for _ in range(_CONVERSATIONS)]


def _trial(ranks: int, kv_transfer: dict[str, Any] | None) -> Trial:
    engine = {
        "num_gpu_blocks_override": _DEVICE_BLOCKS,
        "max_num_seqs": 4,
        "tensor_parallel_size": ranks,
    }
    # Every rank needs a head of its own.
    model = {**LLAMA, "num_attention_heads": max(ranks, LLAMA["num_attention_heads"])}
    return Trial(rounds=[prompts()] * _ROUNDS, kv_transfer=kv_transfer, engine=engine, model=model)


def kv_transfer_of(name: str, **options: Any) -> dict[str, Any]:
    """vLLM's configuration for one of the contestants."""
    return connector_config(**options) if name == "KvsmConnector" else spec_config(name, **options)


def _serve(name: str, ranks: int, plain: TrialOutcome, logs: Path, kept: bool) -> EngineCheck:
    # Checksums are of the connector alone: vLLM gives a spec no way to say that a copy failed.
    options = {"verify_copies": True} if name == "KvsmConnector" else {}
    kv_transfer = kv_transfer_of(name, cpu_bytes_to_use=_HOST_BYTES, event_log=str(logs), **options)
    try:
        outcome = run_trial(_trial(ranks, kv_transfer))
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
    """With what the engine's event log tells."""
    directories = sorted(logs.iterdir()) if logs.exists() else []
    if not directories:
        return msgspec.structs.replace(served, wrong=(f"no event log in {logs}",))
    directory = directories[-1]
    found = verify_log(directory)
    wrong = [f"the event log breaks {one.property}: {one.message}" for one in found.violations]
    if found.damage is not None or not found.condition.complete:
        wrong.append(f"the event log is not whole: {found.damage or found.condition.notes()}")
    reader = LogReader(directory)
    counted = Metrics.of(reader.head.config, reader.events()).values()
    for direction, outcomes in counted["transfers_ended"].items():
        if outcomes["failed"]:
            wrong.append(f"{direction}s that failed: {outcomes['failed']:,}")
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
    """With what is wrong beside the engine without kvsm."""
    others = sum(ours != theirs for ours, theirs in zip_longest(outcome.tokens, plain.tokens))
    wrong = list(served.wrong)
    if others:
        wrong.append(f"{others} of {len(plain.tokens)} requests got other tokens than without kvsm")
    # What comes again is in whole blocks, and its last token is computed. A few blocks may come too late.
    again = (_ROUNDS - 1) * _CONVERSATIONS * ((_PROMPT_TOKENS - 1) // BLOCK_TOKENS)
    if served.blocks_loaded < again * 3 // 4:
        wrong.append(
            f"{served.blocks_loaded:,} blocks were loaded, of {served.blocks_stored:,} stored; "
            f"{again:,} came again"
        )
    if served.cached_tokens <= sum(plain.cached_tokens):
        wrong.append(
            f"{served.cached_tokens:,} prompt tokens came from a cache, and without kvsm "
            f"{sum(plain.cached_tokens):,}"
        )
    return msgspec.structs.replace(served, other_tokens=others, wrong=tuple(wrong))
