"""Write which checker looks at which property: the table in docs/verification.md.

Each cell is read from the code, and not written by hand:

- proved for any size: the claims that the declared protocols make, and progress, which is always proved;
- explored: the models of `kvsm check`. A declared protocol checks its claims; a world, the properties that
  its code names;
- walked: the targets of `kvsm fuzz` and of the museum, in the same way;
- in production: the properties that `kvsm verify` names, and the recorder of vLLM's managers;
- in vLLM: the same for `kvsm vllm-fuzz`, and what `kvsm conform` has found held in the newest vLLM.

A checker names a property if its code does: its world, and the functions and classes that this uses, in the
packages of checks (`CHECKS`). Only `ASIDE` is written by hand: what the names of the checkers do not say, and
tests.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.check.scopes.models import MODELS
from kvsm.check.scopes.serving_scopes import ServingModel
from kvsm.check.scopes.tier_scopes import TiersModel
from kvsm.check.threads import SCOPES as THREAD_SCOPES
from kvsm.check.walks.repeated import differing_log
from kvsm.check.walks.targets import TARGETS
from kvsm.check.worlds.copy_world import CopyEngineWorld
from kvsm.check.worlds.hand_over_world import HandOverWorld
from kvsm.explain.verify.auditor import verify_log
from kvsm.properties import Property

ROOT = Path(__file__).resolve().parents[1]

CHECKS = (
    "kvsm.check.explore.live_model",
    "kvsm.check.explore.rerun",
    "kvsm.check.scopes.",
    "kvsm.check.threads.",
    "kvsm.check.vllm_fuzz.",
    "kvsm.check.walks.repeated",
    "kvsm.check.walks.walk",
    "kvsm.check.worlds.",
    "kvsm.copies.simulated",
    "kvsm.core.ledger.invariants",
    "kvsm.explain.verify.",
    "kvsm.vllm.manager_recorder",
)
"""The modules in which uses are followed, and prefixes of such modules."""

Symbol = tuple[str, str]
"""A module and the name of a function, class or value in it."""


def symbol_of(thing: Any) -> Symbol:
    return thing.__module__, thing.__name__


STARTS_OF_MODELS: Mapping[str, tuple[Symbol, ...]] = {
    "serving": (symbol_of(ServingModel),),
    "copies": (symbol_of(CopyEngineWorld),),
    "hand-over": (symbol_of(HandOverWorld),),
    "tiers": (symbol_of(TiersModel),),
    "threads": tuple(sorted({symbol_of(scope.scenario) for scope in THREAD_SCOPES.values()})),
}
"""Model of `kvsm check` that is no declared protocol -> its world, or the scenarios of its threads."""

VERIFY = symbol_of(verify_log)
REPEATED = symbol_of(differing_log)
RECORDER = "kvsm.vllm.manager_recorder", "ManagerRecorder"
VLLM_WORLD = "kvsm.check.vllm_fuzz.vllm_world", "VllmWorld"

ASIDE = {
    Property.CONSERVATION: (
        "tiers: the ledgers agree about each copy; after a crash, the disk's ledger has the blocks that "
        "the scan finds"
    ),
    Property.PUBLISH_AFTER_COMMIT: (
        "contracts (a step); hand-over: the source gives up its blocks at any moment; tiers: a block "
        "that one rank lacks is not recovered"
    ),
    Property.NO_REUSE_IN_FLIGHT: "contracts (a step)",
    Property.ONE_RELEASE_PER_HOLD: "contracts (a step); requests: a released request holds nothing",
    Property.STALE_REPORTS: "contracts (counting); serving: late and doubled reports",
    Property.FAILURE_IS_NOT_SUCCESS: (
        "contracts (a step); requests: the engine is notified once of how each load ended, correctly; "
        "in protocol workers fail"
    ),
    Property.MATCH_HOLDS: (
        "contracts (a step); requests: pinned, loaded, voided or released; tiers: a block that came from "
        "disk is held before anything else happens"
    ),
    Property.LEGAL_CALLS: "contracts (a step); core: every public call",
    Property.PROGRESS: "in the proofs any order of draining, elsewhere one order; a deferred request wakes",
    Property.EVENTS_ARE_STATE: (
        "serving (`router`): KV events fold to what can be matched; `test_replay.py`, `test_kv_events.py`"
    ),
    Property.DETERMINISM: (
        "one run in a hundred, also of vllm-fuzz, is repeated in a process with another hash seed; "
        "`kvsm run --copies simulated` twice, byte for byte"
    ),
    Property.COPY_ORDER: "`--copies simulated`: races found on any schedule; GPU stress",
    Property.STORED_ONCE: (
        "with the lazy store, the next victims on the device are on the host; tiers: at rest the disk "
        "has each idle block of the host; "
        "`test_scheduler_storing.py` (offered again), `test_scheduler_retry.py` (after a failure)"
    ),
    Property.NO_STALE_DATA: "after a reset, a crash and a restart; crash tests of the log",
    Property.CORRECT_BYTES: (
        "contracts (runs copy the pairs of their job); `--verify-copies` in production; [restored "
        "copies](warm-restart.md#restored-copies) of log, pool, checksums and disk in every "
        "combination"
    ),
    Property.FULL_OFFLOAD: (
        "tiers: blocks that every rank had sealed and flushed are found after a crash; "
        "`test_scheduler_ending.py`, `kvsm run --remote-decode`"
    ),
    Property.ONE_TOKEN_LEFT: "contracts",
    Property.STORED_SO_SERVED: (
        "contracts (the longest hit of several groups); protocol and requests: a match can pin each "
        "key that is held; serving and tiers: every answer, and at rest the next process serves all blocks "
        "on the host or disk; verify: [what a log shows](#what-kvsm-verify-checks-and-when)"
    ),
}
"""What the names of the checkers do not say."""


def property_table() -> str:
    """Return the table: a row for each property, a column for each way in which it is checked."""
    rows = [
        [
            str(one),
            _listed(name for name, found in _proved().items() if one in found),
            _listed(name for name, found in _explored().items() if one in found),
            _listed(name for name, found in _walked().items() if one in found),
            _listed(name for name, found in _in_production().items() if one in found),
            _listed(name for name, found in _in_vllm().items() if one in found),
            ASIDE.get(one, ""),
        ]
        for one in Property
    ]
    titles = [
        "property",
        "proved for any size",
        "explored",
        "walked",
        "in production",
        "in vLLM",
        "other checks",
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in [titles, ["---"] * len(titles), *rows])


def bounds_table() -> str:
    """Return the models of `kvsm check` with their number of scopes, and the bounds of the widest scope."""
    rows = []
    for name, model in MODELS.items():
        widest = "full" if "full" in model.scopes else list(model.scopes)[-1]
        bounds = ", ".join(f"{count} {bound.replace('_', ' ')}" for bound, count in _bounds(name, widest))
        rows.append(f"| {name} | {len(model.scopes)} | {widest}: {bounds} |\n")
    return "| model | scopes | the widest one |\n| --- | --- | --- |\n" + "".join(rows)


def _bounds(model: str, scope: str) -> list[tuple[str, int]]:
    """Return the bounds of a scope that are not 0."""
    known = MODELS[model]
    return [(name, number) for name, number in known.bounds(known.scopes[scope]).items() if number]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


@cache
def _proved() -> dict[str, set[Property]]:
    """Declared protocol -> what is proved of it for any size."""
    found = {}
    for name, model in MODELS.items():
        if isinstance(model, DeclaredModel):
            versions = [sized[0] for sized in model.versions().values()]
            found[name] = {Property(one.id) for version in versions for one in version.always}
            found[name].add(Property.PROGRESS)
    return found


@cache
def _explored() -> dict[str, set[Property]]:
    rest = _symbols("kvsm.check.explore.rerun")
    worlds = {name: named_by(*starts, *rest) for name, starts in STARTS_OF_MODELS.items()}
    return {**_proved(), **worlds}


@cache
def _walked() -> dict[str, set[Property]]:
    rest = _symbols("kvsm.check.walks.walk")
    targets = {
        name: named_by(symbol_of(target.world), *rest, *([REPEATED] if target.has_log else []))
        for name, target in TARGETS.items()
    }
    return {**targets, "museum": named_by(*_symbols("museum.drawn_worlds"), *rest)}


@cache
def _in_production() -> dict[str, set[Property]]:
    return {"verify": named_by(VERIFY), "recorder": named_by(RECORDER)}


@cache
def _in_vllm() -> dict[str, set[Property]]:
    return {"vllm-fuzz": named_by(VLLM_WORLD, REPEATED), "conform": held_in_vllm()}


def held_in_vllm() -> set[Property]:
    """Return what `kvsm conform` found held in kvsm's connector with the newest vLLM of the field."""
    results = sorted(
        (ROOT / "docs" / "field").glob("vllm-*-KvsmConnector.json"),
        key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)],
    )
    facts = json.loads(results[-1].read_text(encoding="utf-8"))
    return {Property(one["property_id"]) for one in facts["properties"] if one["verdict"] == "held"}


def named_by(*starts: Symbol) -> set[Property]:
    """Return the properties that these definitions name, or others in the modules of checks that they use."""
    seen, to_read, found = set[Symbol](), [*starts], set[Property]()
    while to_read:
        module, name = symbol = to_read.pop()
        if symbol not in seen and (definition := definitions(module).get(name)) is not None:
            seen.add(symbol)
            found |= definition.properties
            to_read += definition.uses
    return found


class _Definition(NamedTuple):
    """A function, class or value of a module: the properties that it names, and what else it uses."""

    properties: set[Property]
    uses: set[Symbol]


@cache
def definitions(module: str) -> dict[str, _Definition]:
    """Return the definitions of a module by name."""
    tree = ast.parse(_path_of(module).read_text(encoding="utf-8"))
    found: dict[str, list[ast.stmt]] = {}
    places: dict[str, Symbol] = {}
    for statement in tree.body:
        for name in _names_defined(statement):
            found.setdefault(name, []).append(statement)
            places[name] = module, name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(CHECKS):
            places |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
    return {name: _read(statements, places) for name, statements in found.items()}


def _names_defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [
        node.id for one in targets if one is not None for node in ast.walk(one) if isinstance(node, ast.Name)
    ]


def _read(statements: list[ast.stmt], places: Mapping[str, Symbol]) -> _Definition:
    properties, uses = set[Property](), set[Symbol]()
    to_read: list[ast.AST] = [*statements]
    while to_read:
        node = to_read.pop()
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "Property"
        ):
            properties.add(Property[node.attr])
        if isinstance(node, ast.Name) and node.id in places:
            uses.add(places[node.id])
        annotations = (getattr(node, "annotation", None), getattr(node, "returns", None))
        to_read += [part for part in ast.iter_child_nodes(node) if part not in annotations]
    return _Definition(properties, uses)


def _symbols(module: str) -> list[Symbol]:
    """Return all definitions of a module."""
    return [(module, name) for name in definitions(module)]


def _path_of(module: str) -> Path:
    """Return the file of a module of kvsm or of specs/."""
    parts = module.split(".")
    return (ROOT if parts[0] == "kvsm" else ROOT / "specs").joinpath(*parts[:-1], f"{parts[-1]}.py")
