"""Check the arguments of the engine's calls: convert them, or raise `WrongArgument` that names the argument.

As in `kvsm.core.offloader.arguments`, a call checks its arguments before it changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kvsm.core.offloader.arguments import a, integer, integers, items, request_name
from kvsm.core.plan import WorkerReport
from kvsm.core.scheduler.protocols import StepOutput
from kvsm.errors import WrongArgument

_REPORTS: set[type] = {WorkerReport}

BlockTables = Sequence[Sequence[int]]
"""The device blocks of a request, by group."""


def token_count(call: str, argument: str, value: object) -> int:
    """Check a number of tokens, which must be 0 or more."""
    number = integer(call, argument, value)
    if number < 0:
        raise WrongArgument(call, argument, f"is {number}; it must be 0 or more")
    return number


def block_tables(
    call: str, argument: str, tables: Any, groups: int, *, may_be_none: bool = False
) -> BlockTables:
    """Check the block tables of a request, one per group. may_be_none: whether there may be none."""
    if type(tables) is not list and type(tables) is not tuple:
        tables = items(call, argument, tables)
    if not tables and may_be_none:
        return ()
    if len(tables) != groups:
        raise WrongArgument(call, argument, f"has {len(tables)} tables; there are {groups} KV cache groups")
    if _are_tables([tables], groups):
        return tables  # type: ignore[no-any-return]
    return [integers(call, f"{argument}[{n}]", table) for n, table in enumerate(tables)]


def _are_tables(requests: Iterable[Any], groups: int) -> bool:
    """Whether each request has lists or tuples of ints, one for each group."""
    try:
        for tables in requests:
            if (type(tables) is not tuple and type(tables) is not list) or len(tables) != groups:
                return False
            for table in tables:
                # A sum of ints is an int: a fast check (6 ns a block). The core checks them again.
                if (type(table) is not list and type(table) is not tuple) or type(sum(table)) is not int:
                    return False
    except TypeError:
        return False
    return True


def are_known(tables: Any, known: Sequence[list[int]]) -> bool:
    """Whether these are plain lists equal to `known`. If the int objects are the same: 1 ns per block."""
    if (type(tables) is not list and type(tables) is not tuple) or len(tables) != len(known):
        return False
    return all(type(table) is list and table == blocks for table, blocks in zip(tables, known))


def worker_reports(reports: Iterable[WorkerReport]) -> Sequence[WorkerReport]:
    """Check all reports before the first one is applied."""
    call = "update_connector_output"
    if type(reports) is not list and not isinstance(reports, Iterable):
        raise WrongArgument(call, "reports", f"is {a(reports)}; it must be an iterable of WorkerReports")
    taken = reports if type(reports) is list else list(reports)
    if _REPORTS.issuperset(map(type, taken)):
        return taken
    for place, report in enumerate(taken):
        if type(report) is not WorkerReport:
            raise WrongArgument(call, f"reports[{place}]", f"is {a(report)}; it must be a WorkerReport")
    return taken


def new_blocks(output: StepOutput, groups: int) -> Mapping[str, BlockTables]:
    """Check and return the blocks that a step adds to each request's tables."""
    call = "build_connector_meta"
    given = output.new_block_ids
    if not given:
        return {}
    if type(given) is not dict and not isinstance(given, Mapping):
        raise WrongArgument(call, "output.new_block_ids", f"is {a(given)}; it must be a mapping")
    if _are_tables(given.values(), groups):
        return given
    return {
        name: block_tables(call, f"output.new_block_ids[{name!r}]", tables, groups)
        for name, tables in given.items()
    }


def scheduled_tokens(output: StepOutput) -> Mapping[str, int] | None:
    """Return how many tokens each request computes in a step; None if the engine does not say."""
    call, argument, given = "build_connector_meta", "output.num_scheduled_tokens", output.num_scheduled_tokens
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise WrongArgument(call, argument, f"is {a(given)}; it must be a mapping")
    return {name: token_count(call, f"{argument}[{name!r}]", tokens) for name, tokens in given.items()}


_OF_A_POOL = ("touch", "free_blocks", "key_of", "cached_block", "free_queue")


def device_pool(pool: object, live: Collection[int]) -> None:
    """Check a pool before it is bound. live: the live transfers."""
    call = "bind_gpu_block_pool"
    lacks = [name for name in _OF_A_POOL if not callable(getattr(pool, name, None))]
    if lacks:
        problem = f"is {a(pool)} without {', '.join(lacks)}; it must have the methods of DevicePool"
        raise WrongArgument(call, "pool", problem)
    if live:
        named = ", ".join(map(str, sorted(live)[:8]))
        problem = f"has no references for the live transfers ({named}); bind it before the first step"
        raise WrongArgument(call, "pool", problem)


def engine_name(call: str, request: Any) -> str:
    """Check and return the name of an engine's request."""
    return request_name(call, request.request_id, "request.request_id")
