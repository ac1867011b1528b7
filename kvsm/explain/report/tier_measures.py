"""Compute the figures of two tiers in a report: queries over the tables of both logs."""

from __future__ import annotations

from typing import NamedTuple

from kvsm.explain.report.cache_measures import group_figures, hit_figures
from kvsm.explain.report.figures import DiskFailureFigures, HeldFigures, TierHitFigures, TiersFigures
from kvsm.explain.report.measures import ADMITTED, SHOWN, Tables
from kvsm.explain.story.window import Window
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.row_kinds import Gone
from kvsm.tiers.disk_tier import DISK


class OpenedTier(NamedTuple):
    """The other tier of a log.

    tier: `host` or `disk`.
    log: its log; None: not there, or it cannot be read.
    why_not: why there is no log; None: there is one.
    """

    tier: str
    log: OpenedLog | None
    why_not: str | None = None


def same_time(log: OpenedLog, other: Tables) -> Window | None:
    """The window of `log` that has the time of the tables `other`; None if no event of `log` is in it."""
    if other.whole:
        return Window()
    query = "SELECT min(event), max(event) FROM events WHERE wall_ns BETWEEN ? AND ?"
    first, last = log.sql(query, (other.began_ns, other.ended_ns)).fetchone()
    return None if first is None else Window(first, last)


def tiers_figures(host: Tables | None, disk: Tables | None, why_not: str | None) -> TiersFigures:
    """Compute the figures of both tiers. host, disk: None: missing, and `why_not` says why; never both."""
    if host is not None:
        from_disk = _copied(host, f"source = '{DISK}'")
    else:
        assert disk is not None, "one of the logs was asked"
        from_disk = _copied(disk, "direction = 'load'")
    return TiersFigures(
        host=None if host is None else _held(host),
        disk=None if disk is None else _held(disk),
        why_not=why_not,
        hits=None if host is None else _hits(host),
        found=None if disk is None else _found(disk),
        to_disk=None if disk is None else _copied(disk, _STORES),
        not_stored=None if disk is None else _not_stored(disk),
        from_disk=from_disk,
        unused=None if host is None else _unused(host),
        failures=None if disk is None else _failures(disk),
    )


_STORES = "direction = 'store' AND source IS NULL"
"""SQL condition for the transfers in the disk's log that copy from the host."""


def _copied(tables: Tables, which: str) -> int:
    """Count the blocks of completed transfers. which: an SQL condition for the transfers."""
    [blocks] = tables.one(
        "SELECT coalesce(sum(slots), 0) FROM transfers"
        f" WHERE {which} AND outcome = 'completed' AND {tables.within('transfer')}"
    )
    return int(blocks)


def _found(tables: Tables) -> int | None:
    """Count the blocks that the disk had at its start; None if the log's beginning is missing.

    They are logged as the first store of the log, so they count for every window.
    """
    [blocks] = tables.one("SELECT coalesce(sum(slots), 0) FROM transfers WHERE source IS NOT NULL")
    return int(blocks) if tables.log.first == 1 else None


def _held(tables: Tables) -> HeldFigures:
    [blocks] = tables.one(
        "SELECT coalesce(sum(blocks), 0) FROM block_runs"
        f" WHERE stored <= {tables.last} AND (gone IS NULL OR gone > {tables.last})"
    )
    [evicted] = tables.one(
        "SELECT coalesce(sum(blocks), 0) FROM block_runs"
        f" WHERE why = '{Gone.EVICTED}' AND {tables.within('gone')}"
    )
    log = tables.log
    return HeldFigures(log=str(log.directory), slots=log.config.host_blocks, blocks=blocks, evicted=evicted)


def _hits(tables: Tables) -> TierHitFigures | None:
    found = hit_figures(tables)
    if found.asked is None or found.on_device is None or found.on_host is None:
        return None
    if len(group_figures(tables)) > 1:
        return None
    from_disk = _hits_from_disk(tables)
    return TierHitFigures(
        asked=found.asked,
        device=found.on_device,
        host=found.on_host - from_disk,
        disk=from_disk,
        computed=found.missed or 0,
    )


def _hits_from_disk(tables: Tables) -> int:
    """Count the host blocks with which requests were admitted and that came from the disk for them."""
    query = f"""
        WITH brought AS (
            SELECT owner.value AS request, transfer, ended, slots
            FROM transfers, json_each(requests) AS owner
            WHERE source = '{DISK}' AND outcome = 'completed'
        ), served AS (
            SELECT on_host, sum(slots) * {tables.log.config.blocks_per_chunk} AS came
            FROM lookups JOIN brought USING (request)
            WHERE on_device IS NOT NULL AND {ADMITTED} AND {tables.within("admitted")}
            AND ended < admitted AND transfer > (
                SELECT max(arrived) FROM requests
                WHERE requests.request = lookups.request AND arrived <= admitted)
            GROUP BY admitted
        )
        SELECT coalesce(sum(min(on_host, came)), 0) FROM served
    """
    [blocks] = tables.one(query)
    return int(blocks)


def _unused(tables: Tables) -> int:
    [blocks] = tables.one(
        "SELECT coalesce(sum(blocks), 0) FROM block_runs JOIN transfers USING (transfer)"
        f" WHERE source = '{DISK}' AND stored IS NOT NULL AND hits = 0 AND {tables.within('transfer')}"
    )
    return int(blocks)


def _not_stored(tables: Tables) -> int:
    [copied] = tables.one(
        "SELECT coalesce(sum(slots), 0) FROM transfers"
        f" WHERE {_STORES} AND outcome != 'completed' AND {tables.within('transfer')}"
    )
    [skipped] = tables.one(f"SELECT coalesce(sum(blocks), 0) FROM skips WHERE {tables.within('event')}")
    return int(copied + skipped)


def _failures(tables: Tables) -> DiskFailureFigures:
    within = tables.within("transfer")
    stores, loads, reports, first_ns, last_ns = tables.one(
        "SELECT coalesce(sum(good = 0 AND direction = 'store'), 0),"
        " coalesce(sum(good = 0 AND direction = 'load'), 0), count(reported),"
        " min(CASE WHEN good = 0 THEN reported_ns END), max(CASE WHEN good = 0 THEN reported_ns END)"
        f" FROM copies WHERE {within}"
    )
    errors = tables.all(
        f"SELECT error, count(*) AS times FROM copies WHERE {within} AND good = 0 AND error IS NOT NULL"
        f" GROUP BY error ORDER BY times DESC, error LIMIT {SHOWN}"
    )
    return DiskFailureFigures(
        stores=stores,
        loads=loads,
        reports=reports,
        first_ns=first_ns,
        last_ns=last_ns,
        errors=tuple([(error, times) for error, times in errors]),
    )
