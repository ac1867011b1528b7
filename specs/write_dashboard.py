"""Write deploy/grafana/kvsm.json: a Grafana dashboard over the metrics that `KvsmConnector` exports in vLLM.

    PYTHONPATH=specs python -m write_dashboard

tests/house/test_dashboard.py checks that the file is up to date, that every metric in it is exported, and
that promtool accepts each query.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "kvsm.json"

SCHEMA_VERSION = 39
"""The version of the dashboard's JSON format. Grafana 10.4 and later read it."""

MATCH = 'model_name=~"$model_name",instance=~"$instance",engine=~"$engine"'
"""The label matchers in each query. The variables of the dashboard choose their values."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

NOT_SHOWN = {
    "kv_offload_config_info": "`config_info` has the same values",
    "kv_offload_cpu_cache_usage_perc": "the panels of `blocks` show these slots",
    "kv_offload_cpu_cache_write_usage_perc": "the panels of `blocks` show these slots",
    "kv_offload_cpu_cache_read_usage_perc": "the panels of `blocks` show these slots",
}
"""Exported metric -> why no panel shows it."""


class Panel(NamedTuple):
    """A panel.

    queries: legend -> PromQL. `%` stands for `MATCH`.
    unit: the name of a unit in Grafana.
    kind: the type of the panel.
    stack: whether the series are stacked.
    about: the panel's description.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    stack: bool = False
    about: str = ""


def _rate(name: str, by: str = "", matchers: str = "") -> str:
    more = f",{matchers}" if matchers else ""
    of = f" by ({by})" if by else ""
    return f"sum{of} (rate(vllm:kvsm_{name}_total{{%{more}}}[$__rate_interval]))"


def _sum(name: str, by: str = "") -> str:
    of = f" by ({by})" if by else ""
    return f"sum{of} (vllm:kvsm_{name}{{%}})"


def _quantiles(name: str, by: str = "") -> dict[str, str]:
    of = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    buckets = f"sum by ({of}) (rate(vllm:kvsm_{name}_bucket{{%}}[$__rate_interval]))"
    return {f"{legend}p{100 * share:g}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.95)}


_HOST, _LOOKED_FOR = 'found="on the host"', 'found!="on the device"'

ROWS: dict[str, tuple[Panel, ...]] = {
    "Hits": (
        Panel(
            "Share of the blocks missing on the device that the host had",
            {"share": f"{_rate('blocks_asked', '', _HOST)} / {_rate('blocks_asked', '', _LOOKED_FOR)}"},
            "percentunit",
            about="If it fell: `kvsm report LOG` says why blocks were missing, and `kvsm why LOG REQUEST` "
            "explains one request.",
        ),
        Panel("Blocks of prompts", {"{{found}}": _rate("blocks_asked", "found")}, "ops", stack=True),
        Panel(
            "Requests with and without a hit",
            {
                "{{result}}": _rate("matches", "result"),
                "host slots matched": _rate("blocks_matched"),
            },
            "ops",
        ),
        Panel(
            "Waits for copies in flight",
            {"{{how}}": _rate("deferrals_ended", "how"), "begun": _rate("deferrals")},
            "ops",
        ),
        Panel("Duration of these waits", _quantiles("deferral_seconds"), "s"),
        Panel("Requests", {"known": _sum("known_requests"), "waiting for a copy": _sum("deferred_requests")}),
    ),
    "Bytes": (
        Panel("Bytes copied", {"{{direction}}": _rate("copied_bytes", "direction")}, "Bps"),
        Panel(
            "Bandwidth while copying, for each worker",
            {"{{direction}}": f"{_rate('copied_bytes', 'direction')} / {_rate('copy_seconds', 'direction')}"},
            "Bps",
        ),
        Panel("Size of a copy on one worker", _quantiles("copy_bytes", "direction"), "bytes"),
        Panel(
            "Blocks stored and loaded",
            {"stored": _rate("blocks_stored"), "loaded": _rate("blocks_loaded")},
            "ops",
        ),
        Panel("Blocks of a planned store", _quantiles("allocation_blocks")),
    ),
    "Latency of copies": (
        Panel("From submission to the last report", _quantiles("transfer_seconds", "direction"), "s"),
        Panel(
            "From submission to the last report, in engine steps", _quantiles("transfer_steps", "direction")
        ),
        Panel("A lookup, in the scheduler", _quantiles("lookup_seconds"), "s"),
        Panel(
            "Transfers planned or in flight",
            {"{{direction}}": _sum("live_transfers", "direction"), "draining": _sum("draining_transfers")},
        ),
        Panel("Transfers that the engine waited for", {"transfers": _rate("transfers_flushed")}, "ops"),
    ),
    "Pool": (
        Panel(
            "Slots by state",
            {"{{state}}": _sum("blocks", "state"), "capacity": _sum("capacity_blocks")},
        ),
        Panel(
            "Slots by use",
            {
                "can be matched": _sum("resident_blocks"),
                "pinned by a match": _sum("pinned_blocks"),
                "kept for sessions": _sum("leased_blocks"),
                "in a copy": _sum("in_flight_blocks"),
                "free": _sum("free_blocks"),
            },
        ),
        Panel(
            "Slots and device blocks that cannot be used",
            {
                "quarantined": _sum("quarantined_blocks"),
                "lost for good": _sum("retired_blocks"),
                "device blocks lost for good": _sum("retired_device_blocks"),
            },
            about="Lost for good: a rank did not report a copy. See the alert KvsmRankSilent.",
        ),
        Panel(
            "Evicted blocks, and evicted blocks that were offered again",
            {"evicted": _rate("blocks_evicted"), "recalled": _rate("keys_recalled")},
            "ops",
            about="Many recalled keys: the pool is too small. `kvsm whatif LOG` predicts the hit rate of a "
            "larger one.",
        ),
        Panel(
            "Offered blocks that were not stored", {"{{reason}}": _rate("blocks_skipped", "reason")}, "ops"
        ),
        Panel("Offers that found no room", {"offers": _rate("allocation_failures")}, "ops"),
    ),
    "Log": (
        Panel("The log cannot be written", {"{{instance}}": "max by (instance) (vllm:kvsm_log_broken{%})"}),
        Panel("Events that are missing in the log", {"events": _rate("log_events_dropped")}, "ops"),
        Panel("Events", {"{{kind}}": _rate("events", "kind")}, "ops", stack=True),
        Panel(
            "Processes that have written the log",
            {"{{instance}}": "max by (instance) (vllm:kvsm_life{%})", "restarts": _rate("restarts")},
        ),
        Panel("Bytes of keys in events", {"bytes": _rate("key_bytes")}, "Bps"),
    ),
    "Disk and other engines": (
        Panel("Blocks on the disk", {"blocks": _sum("disk_blocks")}),
        Panel(
            "Copies to and from the disk",
            {
                "stored": _rate("disk_blocks_stored"),
                "loaded": _rate("disk_blocks_loaded"),
                "not stored": _rate("disk_blocks_not_stored"),
            },
            "ops",
        ),
        Panel(
            "Parts that are configured but not in use",
            {"{{part}}": "max by (part) (vllm:kvsm_serves_without{%})"},
            about="1: the files of this part cannot be used, and vLLM's log says why.",
        ),
        Panel(
            "Blocks from another engine or the disk",
            {"blocks": _rate("blocks_imported"), "{{outcome}}": _rate("imports_ended", "outcome")},
            "ops",
        ),
        Panel(
            "Hand-overs",
            {"{{end}}": _rate("hand_overs", "end"), "missed": _rate("hand_overs_missed")},
            "ops",
        ),
        Panel(
            "Agent hints, and ends of their leases",
            {"{{outcome}}": _rate("hints", "outcome")},
            "ops",
        ),
    ),
    "Errors": (
        Panel(
            "Transfers that did not complete",
            {
                "{{direction}}, {{outcome}}": _rate(
                    "transfers_ended", "direction, outcome", 'outcome!="completed"'
                )
            },
            "ops",
            about="`kvsm report LOG` lists them; `kvsm why LOG --transfer ID` names the rank.",
        ),
        Panel("Reports of workers that changed nothing", {"{{reason}}": _rate("reports_rejected", "reason")}),
        Panel(
            "Loads given up, preemptions, resets",
            {
                "loads given up": _rate("loads_voided"),
                "preemptions": _rate("preemptions"),
                "resets": _rate("resets"),
            },
            "ops",
        ),
        Panel("Requests that ended", {"{{end}}": _rate("requests", "end")}, "ops"),
        Panel("Configuration", {"": "vllm:kvsm_config_info{%}"}, kind="table"),
    ),
}

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


def panels() -> Iterator[dict[str, Any]]:
    """Yield the panels, row after row."""
    number = top = 0
    for row, in_row in ROWS.items():
        number += 1
        place = {"h": 1, "w": _WIDTH * _COLUMNS, "x": 0, "y": top}
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        top += 1
        for count, panel in enumerate(in_row):
            number += 1
            place = {
                "h": _HEIGHT,
                "w": _WIDTH,
                "x": count % _COLUMNS * _WIDTH,
                "y": top + count // _COLUMNS * _HEIGHT,
            }
            yield _panel(number, panel, place)
        top += -(-len(in_row) // _COLUMNS) * _HEIGHT


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    table = panel.kind == "table"
    stacking = {"mode": "normal" if panel.stack else "none", "group": "A"}
    custom = {} if table else {"fillOpacity": 20 if panel.stack else 0, "stacking": stacking}
    options = {} if table else {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + count),
                "datasource": DATASOURCE,
                "expr": query.replace("%", MATCH),
                "legendFormat": legend,
                "instant": table,
                "range": not table,
                "format": "table" if table else "time_series",
            }
            for count, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _variable(name: str, label: str) -> dict[str, Any]:
    """Return a dashboard variable that offers the values of a label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values(vllm:kvsm_capacity_blocks, {name})", "refId": name},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "sort": 1,
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard's JSON model."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "kvsm",
        "title": "kvsm",
        "description": "KV-cache offload by kvsm in vLLM. docs/metrics.md explains each metric.",
        "tags": ["vllm", "kv-cache", "kvsm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {**source, "refresh": 1},
                _variable("model_name", "Model"),
                _variable("instance", "Server"),
                _variable("engine", "Engine"),
            ]
        },
        "panels": list(panels()),
    }


def text() -> str:
    """Return the text of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text(), encoding="utf-8")
