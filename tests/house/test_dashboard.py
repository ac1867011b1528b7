"""The Grafana dashboard and the Prometheus rules in deploy/ agree with the metrics exported in vLLM."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import write_dashboard
import yaml
from places import ROOT

from kvsm.cli import COMMANDS
from kvsm.explain.metric_table import EXPORTED, Metric
from kvsm.explain.vllm_metric_names import NAMES_IN_VLLM

RULES = ROOT / "deploy" / "prometheus" / "kvsm.rules.yml"
REPOSITORY = "https://github.com/kvsm/kvsm/blob/main/"
OF_VLLM = frozenset({"model_name", "engine", "instance"})
"""Labels of vLLM and of Prometheus, which every series has."""

BY_TITLE = {f"vllm:kvsm_{name}": metric for name, metric in EXPORTED.items()} | {
    f"vllm:{name}": metric for name, metric in NAMES_IN_VLLM.items()
}
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
SERIES = {f"{title}{ending}": metric for title, metric in BY_TITLE.items() for ending in ENDINGS[metric.kind]}
"""Each name that Prometheus scrapes -> its metric."""


def shown() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(write_dashboard.DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return panels


def queries() -> list[str]:
    """The queries of the dashboard and of the rules."""
    found = [target["expr"] for panel in shown() for target in panel.get("targets", ())]
    return found + [rule["expr"] for rule in rules()]


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def used(query: str) -> Iterator[tuple[str, Metric, list[tuple[str, str]]]]:
    """Each series in a query: its name, its metric, and (label, value) of its exact matchers."""
    for name, matchers in re.findall(r"(vllm:\w+)(?:\{([^}]*)\})?", query):
        assert name in SERIES, f"{name} is not exported"
        yield name, SERIES[name], re.findall(r'(\w+)\s*(?:=|!=|=~)\s*"([^"]*)"', matchers)


def test_the_dashboard_is_current() -> None:
    """`PYTHONPATH=specs python -m write_dashboard` writes it."""
    assert write_dashboard.DASHBOARD.read_text(encoding="utf-8") == write_dashboard.text()


def test_every_name_label_and_value_is_exported() -> None:
    for query in queries():
        groupings = re.findall(r"by \(([^)]*)\)", query)
        grouped = {label.strip() for grouping in groupings for label in grouping.split(",")} - {"le"}
        found = list(used(query))
        for name, metric, matchers in found:
            for label, value in matchers:
                assert label in metric.labels or label in OF_VLLM, (name, label)
                assert label in OF_VLLM or value in metric.labels[label], (name, value)
        labels = {label for _, metric, _ in found for label in metric.labels}
        assert grouped <= labels | OF_VLLM, query


def test_every_gauge_is_shown_or_has_a_reason_not_to_be() -> None:
    gauges = {title.removeprefix("vllm:") for title, metric in BY_TITLE.items() if metric.kind == "gauge"}
    in_panels = {
        name.removeprefix("vllm:")
        for panel in shown()
        for target in panel.get("targets", ())
        for name, _, _ in used(target["expr"])
    }
    assert gauges - in_panels == set(write_dashboard.NOT_SHOWN)


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = shown()
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24, "Grafana's grid has 24 columns"


def test_each_alert_says_what_to_do_with_kvsm_and_where_it_is_explained() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Kvsm\w+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in alerts] != []
    for rule in alerts:
        told = rule["annotations"]
        named = set(re.findall(r"`kvsm (\S+?)[ `]", told["description"]))
        assert named, rule["alert"]
        assert named <= set(COMMANDS), rule["alert"]
        page, _, anchor = told["runbook_url"].removeprefix(REPOSITORY).partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, told["runbook_url"]


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    return found


def run(promtool: str, *arguments: str | Path) -> None:
    done = subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules(promtool: str) -> None:
    run(promtool, "check", "rules", RULES)


def test_the_alerts_fire_when_they_should(promtool: str) -> None:
    run(promtool, "test", "rules", RULES.with_name("kvsm.rules.test.yml"))


def test_prometheus_takes_each_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    """As a recording rule, with values for the variables that Grafana fills in."""
    asked = [target["expr"] for panel in shown() for target in panel.get("targets", ())]
    filled = [query.replace("$__rate_interval", "5m").replace("$", "") for query in asked]
    recorded = [{"record": f"query:{place}", "expr": query} for place, query in enumerate(filled)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    run(promtool, "check", "rules", "--lint=none", path)
