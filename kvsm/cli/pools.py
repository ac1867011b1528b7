"""`kvsm pools`: list the host pools that outlive their processes. It needs no torch."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from kvsm.cli.log_options import json_option
from kvsm.cli.output import Command, say, say_json, say_table
from kvsm.copies.host_pools.kept_file import KeptPoolFacts, read_kept_pool, remove_kept_pool
from kvsm.errors import ConfigError

_GIB = 1 << 30


class ListedPool(msgspec.Struct, frozen=True, kw_only=True):
    """A host pool that outlives its processes.

    path: its file.
    blocks, block_bytes, ranks: its sizes. bytes: size of all its blocks.
    means: the facts that define what its bytes mean, by name; empty if the pool is not whole.
    users: the processes that use it, or used it and have not ended yet.
    cold_reason: why no engine can start warm with it, a line for each reason.
    removed: whether this command removed it.
    """

    path: str
    blocks: int
    block_bytes: int
    ranks: int
    bytes: int
    means: dict[str, str]
    users: list[str]
    cold_reason: list[str]
    removed: bool


class PoolsAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.pools/1"):
    """What `kvsm pools --json` prints: the host pools of a directory. pools: in the order of their names."""

    directory: str
    pools: list[ListedPool]


@click.command(cls=Command)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--remove", is_flag=True, help="Remove the pools that no process uses, to free their memory.")
@json_option
def pools(directory: Path, remove: bool, as_json: bool) -> None:
    """List the host pools kept in DIR, and the processes using them.

    DIR is the `pool_dir` of an engine that restarts warm. A pool stays there when its engine ends, so that
    the next engine finds the stored blocks. Other files, and pools of other users, are not listed.

    \b
    Examples:
      kvsm pools /dev/shm/kvsm-a
      kvsm pools /dev/shm/kvsm-a --remove
      kvsm pools /dev/shm/kvsm-a --json | jq '.pools[].users'
    """
    found = [_listed(path, facts, remove) for path, facts in _kept_in(directory)]
    if as_json:
        say_json(PoolsAnswer(directory=str(directory), pools=found))
        return
    if not found:
        say(f"{directory}: no host pool of this user is kept here")
        return
    from rich.table import Table

    table = Table("pool", "GiB", "blocks", "ranks", "used by", "a warm start", box=None, pad_edge=False)
    for one in found:
        users = "; ".join(one.users) or ("nobody: removed" if one.removed else "nobody")
        warm = "; ".join(one.cold_reason) or "is possible"
        sizes = f"{one.bytes / _GIB:.3f}", f"{one.blocks:,}", str(one.ranks)
        table.add_row(Path(one.path).name, *sizes, users, warm)
    say_table(table)
    for name, value in found[0].means.items():
        say(f"  {name}: {value}")


def _kept_in(directory: Path) -> list[tuple[Path, KeptPoolFacts]]:
    """Return the pools in a directory. Raises `ConfigError` if it cannot be listed."""
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be listed: {error.strerror}") from error
    found = [(path, _facts_of(path)) for path in paths]
    return [(path, facts) for path, facts in found if facts is not None]


def _facts_of(path: Path) -> KeptPoolFacts | None:
    try:
        return read_kept_pool(path)
    except ConfigError:
        return None


def _listed(path: Path, facts: KeptPoolFacts, remove: bool) -> ListedPool:
    return ListedPool(
        path=str(path),
        blocks=facts.sizes.num_blocks,
        block_bytes=facts.sizes.block_bytes,
        ranks=facts.sizes.ranks,
        bytes=facts.sizes.total_bytes,
        means=dict(facts.identity.facts) if facts.identity is not None else {},
        users=[str(one) for one in facts.users],
        cold_reason=facts.cold_reason,
        removed=remove and not facts.users and remove_kept_pool(path),
    )
