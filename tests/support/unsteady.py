"""Bugs that make a log differ from process to process, to be planted in two processes.

A name of `UNSTEADY` in the environment variable `VARIABLE` plants the bug at the start of a process, if
`SITE` is the text of a `sitecustomize.py` on its path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import kvsm.check.worlds.small_engine
from kvsm.core.offloader import Offloader

VARIABLE = "KVSM_TEST_UNSTEADY"
SITE = f"import os, unsteady\nunsteady.UNSTEADY[os.environ[{VARIABLE!r}]](setattr)\n"

SetAttr = Callable[[Any, str, Any], None]


class _AtAddress:
    """Hashed by its address."""

    def __init__(self, offer: Any) -> None:
        self.offer = offer


def _in_order(order: Callable[[Sequence[Any]], list[Any]]) -> Callable[[SetAttr], None]:
    """Return what makes the core record the offers of a step in another order."""
    advance = Offloader.advance

    def advance_in_order(core: Offloader, offers: Sequence[Any]) -> None:
        advance(core, order(offers))

    return lambda set_attribute: set_attribute(Offloader, "advance", advance_in_order)


def _by_hash(offers: Sequence[Any]) -> list[Any]:
    by_name = {offer[0]: offer for offer in offers}
    return [by_name[name] for name in set(by_name)]


def _by_address(offers: Sequence[Any]) -> list[Any]:
    return [one.offer for one in {_AtAddress(offer) for offer in offers}]


def _with_clock(set_attribute: SetAttr) -> None:
    set_attribute(kvsm.check.worlds.small_engine, "no_clock", time.time_ns)


UNSTEADY: dict[str, Callable[[SetAttr], None]] = {
    "the order of a set of strings": _in_order(_by_hash),
    "the order of a set of objects": _in_order(_by_address),
    "a clock in an event": _with_clock,
}
