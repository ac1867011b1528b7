"""Worlds of cores, tiers and engines whose books are audited, or made wrong on purpose."""

from __future__ import annotations

import msgspec

from kvsm.check.worlds.audited import AuditedCore, AuditedWorld
from kvsm.check.worlds.serving_world import ServingOptions, ServingWorld
from kvsm.check.worlds.skewed_core import SkewedCoreOptions, SkewedCoreWorld
from kvsm.check.worlds.two_tiers import TwoTierOptions, TwoTierWorld
from kvsm.check.worlds.wrong_books import WrongBooksWorld
from kvsm.errors import ConfigError


class AuditedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The world whose books are audited: give exactly one. Raises `ConfigError`."""

    core: SkewedCoreOptions | None = None
    tiers: TwoTierOptions | None = None
    serving: ServingOptions | None = None

    def __post_init__(self) -> None:
        _require_one(self)


class WrongBooksOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The world whose books are made wrong: give exactly one. Raises `ConfigError`."""

    core: SkewedCoreOptions | None = None
    tiers: TwoTierOptions | None = None

    def __post_init__(self) -> None:
        _require_one(self)


def _require_one(options: AuditedOptions | WrongBooksOptions) -> None:
    given = [name for name, value in msgspec.structs.asdict(options).items() if value is not None]
    if len(given) != 1:
        known = ", ".join(options.__struct_fields__)
        raise ConfigError(f"give exactly one of the worlds {known}; given: {', '.join(given) or 'none'}")


def audited(options: AuditedOptions) -> AuditedWorld:
    """Return a world with a second ledger and book beside each of its cores."""
    if options.core is not None:
        core = SkewedCoreWorld(options.core)
        return AuditedWorld(core, lambda: [AuditedCore(core.core.ledger, core.events)])
    if options.tiers is not None:
        tiers = TwoTierWorld(options.tiers)
        return AuditedWorld(
            tiers, lambda: [AuditedCore(tiers.host.ledger, tiers.log), AuditedCore(tiers.disk.ledger, None)]
        )
    assert options.serving is not None
    serving = ServingWorld(options.serving)
    return AuditedWorld(serving, lambda: [AuditedCore(serving.engine.core.ledger, serving.engine.log)])


def with_wrong_books(options: WrongBooksOptions) -> WrongBooksWorld:
    """Return a world whose checks must object to copies of its books with one thing changed."""
    if options.core is not None:
        core = SkewedCoreWorld(options.core)
        return WrongBooksWorld(core, lambda: AuditedCore(core.core.ledger, core.events))
    assert options.tiers is not None
    tiers = TwoTierWorld(options.tiers)
    return WrongBooksWorld(tiers, lambda: AuditedCore(tiers.host.ledger, tiers.log), lambda: tiers.tier)
