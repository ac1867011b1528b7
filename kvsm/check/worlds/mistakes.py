"""A mistake of the small engine: it asks for a load into a device block that a copy touches.

The offload core must refuse the load and leave its ledger unchanged (conservation, S1), because an engine may
continue after such an error.
"""

from __future__ import annotations

from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.ledger.snapshot import digest
from kvsm.core.offloader import Offloader
from kvsm.errors import KvsmError, PropertyBroken
from kvsm.properties import Property

_NAME = "mistaken"
"""The request of the load. It is finished within the action."""


def _readable(core: Offloader) -> int | None:
    return next((slot for slot in core.ledger.index.values() if core.ledger.readable(slot)), None)


def _under_copy(core: Offloader) -> int | None:
    blocks = range(core.config.device_blocks)
    return next((block for block in blocks if core.leased([block])), None)


def may_load_over_a_copy(core: Offloader) -> bool:
    """Whether a block on the host is readable, and a copy touches some device block."""
    return _readable(core) is not None and _under_copy(core) is not None


def load_over_a_copy(core: Offloader) -> bool:
    """Match a block and load it into a device block that a copy touches. False if there are no such blocks.

    Raises `PropertyBroken` if the core accepts the load, or refuses it but has changed its ledger.
    """
    slot, block = _readable(core), _under_copy(core)
    if slot is None or block is None:
        return False
    core.pin(_NAME, [slot], None)
    before = digest(core.ledger)
    try:
        core.prepare_load(_NAME, [block])
    except KvsmError:
        if digest(core.ledger) != before:
            for violation in check_ledger(core.ledger):
                raise PropertyBroken(violation.property, violation.message) from None
            raise PropertyBroken(
                Property.CONSERVATION, "a load was refused, and the ledger has changed"
            ) from None
    else:
        raise PropertyBroken(
            Property.NO_REUSE_IN_FLIGHT, f"a load may write device block {block}, which a copy touches"
        )
    core.finish(_NAME)
    return True
