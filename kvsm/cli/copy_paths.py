"""`kvsm copy-paths`: show the path table of a GPU."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import click
import msgspec

from kvsm.cli.log_options import json_option
from kvsm.cli.output import Command, say, say_json, say_table
from kvsm.errors import ConfigError

if TYPE_CHECKING:
    from kvsm.cuda_io.paths import Cells, PathTable, TableDevice


class PathRange(msgspec.Struct, frozen=True, kw_only=True):
    """Copies that take the same path.

    fragment_bytes: size of their fragments, rounded down to a measured size.
    from_count, to_count: least and most fragments; None: no limit.
    path: the fastest path. `pitched` is only for rectangles of many rows; other copies take the next path.
    otherwise: the other paths, fastest first.
    """

    fragment_bytes: int
    from_count: int
    to_count: int | None
    path: str
    otherwise: list[str]


class CopyPathsAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.copy-paths/1"):
    """What `kvsm copy-paths --json` prints: which copy path is fastest on a GPU.

    device: name of the GPU. driver_version: the CUDA version of its driver, 12080 for 12.8.
    file: the cache file that has the table; None: none has, because it is a guess or could not be written.
    is_measured: false: the table is a guess, because it could not be measured.
    store_thread_blocks, load_thread_blocks: most thread blocks of the copy kernel; None: not measured.
    stores, loads: by fragment size, then by count.
    """

    device: str
    driver_version: int
    file: str | None
    is_measured: bool
    store_thread_blocks: int | None
    load_thread_blocks: int | None
    stores: list[PathRange]
    loads: list[PathRange]


@click.command(cls=Command)
@click.option("--device", default=0, show_default=True, help="Number of the GPU.")
@click.option("--measure", is_flag=True, help="Measure again, and replace the cached table.")
@json_option
def copy_paths(device: int, measure: bool, as_json: bool) -> None:
    """Show which copy path is fastest on a GPU.

    A copy takes the path that was fastest for its direction, the size of its fragments and their number.
    The paths are measured once for each kind of GPU and driver, in a few seconds, and cached in a file.
    Measure on an idle GPU. Needs an NVIDIA GPU.

    \b
    Examples:
      kvsm copy-paths
      kvsm copy-paths --measure
      kvsm copy-paths --json | jq '.stores[] | select(.path == "kernel")'
    """
    answer = _answer(device, measure)
    if as_json:
        say_json(answer)
        return
    measured = "measured" if answer.is_measured else "guessed, because it could not be measured"
    say(f"{answer.device}, driver {answer.driver_version}: {measured}")
    if answer.store_thread_blocks is not None:
        blocks = f"{answer.store_thread_blocks} to store, {answer.load_thread_blocks} to load"
        say(f"thread blocks of the copy kernel: at most {blocks}")
    for title, ranges in (("stores", answer.stores), ("loads", answer.loads)):
        _say_ranges(title, ranges)
    say("not cached" if answer.file is None else f"cached in {answer.file}")


def _answer(ordinal: int, measure: bool) -> CopyPathsAnswer:
    from kvsm.cuda_io.copier import CopyCalls, cached_path_table, measured_path_table
    from kvsm.cuda_io.driver import CudaContext
    from kvsm.cuda_io.paths import NOT_MEASURED, TableDevice

    context = CudaContext(ordinal)
    device = TableDevice(context.name, context.driver_version)
    with context:
        calls = CopyCalls(context)
        table = measured_path_table(calls, device) if measure else cached_path_table(context, calls)
        calls.close()
    context.release()
    blocks = table.thread_blocks
    return CopyPathsAnswer(
        device=device.name,
        driver_version=device.driver_version,
        file=_file_with(table, device),
        is_measured=table.device != NOT_MEASURED,
        store_thread_blocks=blocks.store if blocks else None,
        load_thread_blocks=blocks.load if blocks else None,
        stores=_ranges(table.stores),
        loads=_ranges(table.loads),
    )


def _file_with(table: PathTable, device: TableDevice) -> str | None:
    """Return the cache file of the device if it has this table."""
    from kvsm.cuda_io.copier import table_file
    from kvsm.cuda_io.paths import PathTable

    file = table_file(device)
    try:
        return str(file) if PathTable.load(file, device) == table else None
    except (ConfigError, OSError):
        return None


def _ranges(cells: Cells) -> list[PathRange]:
    """Merge the neighbouring cells of a fragment size whose rankings are equal."""
    from kvsm.cuda_io.paths import FRAGMENT_BYTES

    ranges = []
    for fragment_bytes, row in zip(FRAGMENT_BYTES, cells):
        first = 0
        for ranking, group in groupby(row):
            behind = first + len(list(group))
            path, *otherwise = (path.value for path in ranking)
            ranges.append(
                PathRange(
                    fragment_bytes=fragment_bytes,
                    from_count=1 << first,
                    to_count=(1 << behind) - 1 if behind < len(row) else None,
                    path=path,
                    otherwise=otherwise,
                )
            )
            first = behind
    return ranges


def _say_ranges(title: str, ranges: list[PathRange]) -> None:
    from rich.table import Table

    table = Table(title, "fragments", "path", "otherwise", box=None, pad_edge=False)
    for each in ranges:
        last = "and more" if each.to_count is None else f"to {each.to_count:,}"
        counts = f"{each.from_count:,} {last}"
        table.add_row(f"{each.fragment_bytes >> 10} KiB", counts, each.path, ", ".join(each.otherwise))
    say_table(table)
