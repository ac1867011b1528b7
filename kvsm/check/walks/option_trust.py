"""Refuse options from a file that name untrusted code or paths.

A saved failure, or a schedule of a corpus, contains the options of its world, and its author may be unknown.
So a field that names code or a path is refused, unless its value is harmless or the user has given the same
value on the command line. `TEXTS` lists what each text field may name; numbers, booleans and choices name
nothing. A text field that is missing there is treated as naming code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from shlex import join
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.check.walks.targets import OwnWorldOptions
from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.era_world import EraOptions
from kvsm.check.worlds.fleet_world import FleetMemberOptions
from kvsm.check.worlds.hand_over_options import HandOverWorldOptions
from kvsm.check.worlds.hint_options import HintWorldOptions
from kvsm.check.worlds.policy_world import PolicyWorldOptions
from kvsm.check.worlds.refusing_policy import REFUSING
from kvsm.check.worlds.serving_world import RequestSpec, ServingOptions
from kvsm.check.worlds.skewed_core import SkewedCoreOptions
from kvsm.check.worlds.two_tiers import TwoTierOptions
from kvsm.check.worlds.whole_disk import WholeDiskOptions
from kvsm.check.worlds.whole_world import WholeOptions
from kvsm.check.worlds.wider_serving import WiderOptions
from kvsm.core.policies import POLICIES
from kvsm.core.scheduler import KVCacheGroup
from kvsm.errors import ConfigError

_LONGEST_SHOWN = 200


class Named(NamedTuple):
    """The kind of thing that a field names.

    what: its description for people.
    option: the command line option by which a user allows a value.
    harmless: the values that are always allowed.
    """

    what: str
    option: str
    harmless: Collection[Any] = ()


_POLICY = Named("code of an eviction policy", "--allow-policy", (*POLICIES, REFUSING))

TEXTS: Mapping[type[msgspec.Struct], Mapping[str, Named | None]] = {
    CoreOptions: {"policy": _POLICY},
    ServingOptions: {"policy": _POLICY},
    WiderOptions: {"policy": _POLICY},
    WholeOptions: {"policy": _POLICY},
    WholeDiskOptions: {"policy": _POLICY},
    FleetMemberOptions: {"policy": _POLICY},
    # The `kv_transfer_params` of a client. They are read as data, and all engines are in this process.
    RequestSpec: {"parameters": None},
    # Only copied into KV events.
    KVCacheGroup: {"event_kind": None},
    HandOverWorldOptions: {"policy": _POLICY},
    HintWorldOptions: {"policy": _POLICY},
    TwoTierOptions: {"writes": None},
    EraOptions: {"writes": None},
    # Kinds of actions, which are only compared.
    SkewedCoreOptions: {"factors": None},
    PolicyWorldOptions: {"policy": _POLICY},
    EngineShape: {
        "connector": Named("code of a connector", "--connector", ("KvsmConnector",)),
        "extra": Named("code and paths of a connector's choice", "--config", ({},)),
        # Kinds of actions, which are only compared.
        "faults": None,
        "without": None,
    },
    # It seeds random numbers. The code is named by the target, which the user gives with --target.
    OwnWorldOptions: {"seed": None},
}
"""Struct -> text field -> the kind of thing that it names; None if no value names anything."""

_UNKNOWN = Named("something that kvsm has not judged", "a newer kvsm")


def refuse_named(options: msgspec.Struct, given: Mapping[str, Collection[Any]]) -> None:
    """Raises `ConfigError` if the options of a file name code or a path that the user has not allowed.

    given: field -> the values that the user allows.
    """
    for name, value, named in _named_in(options):
        if value in named.harmless or value in given.get(name, ()):
            continue
        shown = repr(value)
        shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + ".."
        raise ConfigError(
            f"its {name} is {shown}, which names {named.what}: to repeat it runs code of that name, or "
            f"writes there; if you trust it, allow that: {_allowed(named, value)}"
        )
    absent = [name for name, values in given.items() if values and not hasattr(options, name)]
    if absent:
        raise ConfigError(f"it has no {absent[0]}; leave out the option that allows one")


def allowing(options: msgspec.Struct) -> str:
    """The command line options that allow the code and paths of these options, each preceded by a space."""
    needed = [(named, value) for _, value, named in _named_in(options) if value not in named.harmless]
    return "".join([f" {_allowed(named, value)}" for named, value in needed])


def _allowed(named: Named, value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return join([named.option, text])


def _named_in(options: msgspec.Struct) -> Iterator[tuple[str, Any, Named]]:
    """(field, value, kind of thing named) for each field that may name something, also in nested structs."""
    texts = TEXTS.get(type(options), {})
    for field in fields_with_text(type(options)):
        named = texts.get(field, _UNKNOWN)
        if named is not None:
            yield field, getattr(options, field), named
    for value in msgspec.structs.asdict(options).values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, msgspec.Struct):
                yield from _named_in(part)


def fields_with_text(options: type[msgspec.Struct]) -> list[str]:
    """The fields that can contain arbitrary text, directly or in a list or dict."""
    found = inspect.type_info(options)
    assert isinstance(found, inspect.StructType)
    return [field.name for field in found.fields if _can_hold_text(field.type)]


def structs_in(options: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """This struct type and all struct types in its fields."""
    found = inspect.type_info(options)
    assert isinstance(found, inspect.StructType)
    inside = [struct for field in found.fields for part in _parts(field.type) for struct in _structs(part)]
    return [options, *[nested for struct in inside for nested in structs_in(struct)]]


def _structs(found: inspect.Type) -> list[type[msgspec.Struct]]:
    return [found.cls] if isinstance(found, inspect.StructType) else []


def _can_hold_text(found: inspect.Type) -> bool:
    named = (inspect.IntType, inspect.FloatType, inspect.BoolType, inspect.NoneType)
    closed = (inspect.EnumType, inspect.LiteralType, inspect.StructType)
    return any(not isinstance(part, (*named, *closed)) for part in _parts(found))


def _parts(found: inspect.Type) -> list[inspect.Type]:
    """The member types of a union and the element types of a list or tuple; else the type itself."""
    if isinstance(found, inspect.UnionType):
        return [part for one in found.types for part in _parts(one)]
    if isinstance(found, inspect.TupleType):
        return [part for one in found.item_types for part in _parts(one)]
    if isinstance(found, (inspect.VarTupleType, inspect.ListType)):
        return _parts(found.item_type)
    return [found]
