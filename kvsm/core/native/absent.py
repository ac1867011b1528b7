"""Placeholders for the native body if it does not run. These classes are never instantiated."""

from __future__ import annotations

from typing import Any


class FoldBody:
    """Placeholder for the native part of a ledger."""


class QueueBody:
    """Placeholder for the native part of a queue."""


class IndexBody:
    """Placeholder for the native part of an index."""


class PackerBody:
    """Placeholder for the native part that saves worlds."""


class CoreBody:
    """Placeholder for the native part of a core."""


def connect() -> None:
    """Do nothing: there is no body to connect."""


def connect_core(*of_python: Any) -> None:
    """Do nothing: there is no body to connect."""


def connect_offers(*of_python: Any) -> None:
    """Do nothing: there is no body to connect."""


def find_due(*_requests: object) -> None:
    """Return None: left to Python."""


def collect_due(*_batch: object) -> None:
    """Do nothing. Not called, because Python collects."""


def taken() -> bytes:
    """Return no flags: no arc was taken."""
    return b""


def forget() -> None:
    """Do nothing: no arc was taken."""


def plan_runs(*_copy: object) -> None:
    """Return None: Python plans."""


def plan_rectangles(*_copy: object) -> bytes:
    """Return no columns. Not called, because `plan_runs` returns None."""
    return b""


def plan_fragments(*_copy: object) -> bytes:
    """Return no columns. Not called, because `plan_runs` returns None."""
    return b""
