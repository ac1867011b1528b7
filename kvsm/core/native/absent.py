"""Stands for the native body where that does not run. No object of these classes is made."""

from __future__ import annotations

from typing import Any


class FoldBody:
    """Stands for the native part of a ledger."""


class QueueBody:
    """Stands for the native part of a queue."""


class IndexBody:
    """Stands for the native part of an index."""


class PackerBody:
    """Stands for what saves worlds."""


class CoreBody:
    """Stands for the native part of a core."""


def connect() -> None:
    """Do nothing: there is no body to connect."""


def connect_core(*of_python: Any) -> None:
    """Do nothing: there is no body to connect."""


def taken() -> bytes:
    """Return no flags: no arc was taken."""
    return b""


def forget() -> None:
    """Do nothing: no arc was taken."""
