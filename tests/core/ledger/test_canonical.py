"""Decision state declares each of its fields: what is left undeclared is refused, not passed over."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from kvsm.check.worlds.saving import Saver
from kvsm.check.worlds.serving_world import ServingOptions, ServingWorld
from kvsm.check.worlds.small_pool import SmallPool
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import (
    _RULES,
    KEPT,
    Dropped,
    Fixed,
    Names,
    Remade,
    Seen,
    compared,
    declare,
    declared,
    rules_of,
)
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig

NAMES = Names(Ledger(OffloadConfig(host_blocks=1, device_blocks=1)), {}, {}, {}, {7: 0})


@declared
class Declared(msgspec.Struct):
    kept: Annotated[int, KEPT] = 1
    block: Annotated[int, Seen(lambda one, names: names.blocks[one.block])] = 7
    dropped: Annotated[int, Dropped("for this test")] = 3


def test_a_field_is_compared_as_it_declares() -> None:
    assert compared(Declared(), NAMES) == [1, 0]
    assert compared(None, NAMES) is None


def test_a_field_without_declaration_is_refused_when_its_class_is_made() -> None:
    with pytest.raises(ConfigError, match=r"Forgetful\.forgotten does not declare"):

        @declared
        class Forgetful(msgspec.Struct):
            kept: Annotated[int, KEPT] = 1
            forgotten: int = 2


@pytest.mark.parametrize(
    "fields", [{"kept": KEPT}, {"kept": KEPT, "block": KEPT, "dropped": KEPT, "more": KEPT}]
)
def test_declarations_from_outside_must_fit_the_class(fields: dict[str, Fixed]) -> None:
    with pytest.raises(ConfigError, match="fields and declarations differ"):
        declare(Declared, **fields)


def test_an_attribute_that_no_declaration_names_is_refused() -> None:
    pool = SmallPool(1)
    pool.novelty = 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="SmallPool: fields and declarations differ: novelty"):
        rules_of(pool)


def test_an_object_outside_the_parts_of_its_world_is_refused() -> None:
    """It would be shared by all worlds that are loaded."""
    world = ServingWorld(ServingOptions())
    world.engine.scheduler.device_blocks.pool = SmallPool(1)
    with pytest.raises(ConfigError, match=r"DeviceBlocks\.pool is none of the parts"):
        Saver(world)


def test_what_is_not_compared_has_a_reason() -> None:
    for rules in _RULES.values():
        for rule in rules.values():
            assert not isinstance(rule, Dropped | Fixed | Remade) or rule.why
