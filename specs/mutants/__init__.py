"""Mutants: wrong versions of kvsm that the checkers must find, chosen independently of the checkers."""

from __future__ import annotations

from mutants.adapting import ADAPTING
from mutants.checking import CHECKING
from mutants.durable import DURABLE
from mutants.folding import FOLDING
from mutants.hits import HITS
from mutants.logs import LOGS
from mutants.mutant import Mutant
from mutants.offloading import OFFLOADING
from mutants.saving import SAVING
from mutants.scheduling import SCHEDULING
from mutants.tiering import TIERING
from mutants.vllm_adapting import VLLM_ADAPTING

AREAS: tuple[tuple[Mutant, ...], ...] = (
    *(SCHEDULING, OFFLOADING, FOLDING, TIERING, SAVING, LOGS, CHECKING, ADAPTING, VLLM_ADAPTING),
    HITS,
    DURABLE,
)
MUTANTS: dict[str, Mutant] = {one.id: one for area in AREAS for one in area}

__all__ = ["AREAS", "MUTANTS", "Mutant"]
