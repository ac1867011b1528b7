"""The exporter: a Prometheus server reads what was counted."""

from __future__ import annotations

import importlib
import sys
import urllib.request
from pathlib import Path

import pytest
from core_life import begin_store, keys, new_core, store
from log_life import disk
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig
from kvsm.explain import prometheus
from kvsm.explain.metric_table import METRICS
from kvsm.explain.metrics import Metrics
from kvsm.explain.prometheus import PrometheusCollector

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exporting() -> tuple[Offloader, CollectorRegistry]:
    core, _ = new_core(host_blocks=4, block_bytes=4096)
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(Metrics.attached_to(core)))
    return core, registry


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def at(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_exposition_says_what_was_counted() -> None:
    core, registry = exporting()
    store(core, "r", keys(3))
    begin_store(core, "r", keys(2, "q"), 8)
    found = samples(generate_latest(registry).decode())
    assert at(found, "kvsm_blocks_stored_total") == 3
    assert at(found, "kvsm_blocks_evicted_total") == 1
    assert at(found, "kvsm_transfers_ended_total", direction="store", outcome="completed") == 1
    assert at(found, "kvsm_transfers_ended_total", direction="load", outcome="lost") == 0
    assert at(found, "kvsm_resident_blocks") == 2
    assert at(found, "kvsm_blocks", state="STORING") == 2
    assert at(found, "kvsm_live_transfers", direction="store") == 1


def test_buckets_add_up() -> None:
    """Each bucket includes the buckets below it; the last one counts everything."""
    core, registry = exporting()
    for number, blocks in enumerate((1, 1, 3)):
        store(core, "r", keys(blocks, f"p{number}"))
    found = samples(generate_latest(registry).decode())
    buckets = {
        bound: at(found, "kvsm_transfer_blocks_bucket", direction="store", le=bound)
        for bound in ("1.0", "2.0", "4.0", "4096.0", "+Inf")
    }
    assert buckets == {"1.0": 2, "2.0": 2, "4.0": 3, "4096.0": 3, "+Inf": 3}
    assert at(found, "kvsm_transfer_blocks_count", direction="store") == 3
    assert at(found, "kvsm_transfer_bytes_sum", direction="store") == 5 * 4096


def test_every_metric_is_exported_with_its_help() -> None:
    _, registry = exporting()
    families = {
        family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())
    }
    for metric in METRICS:
        family = families[f"kvsm_{metric.name}"]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert {frozenset(one.labels) - {"le"} for one in family.samples} == {frozenset(metric.labels)}


def test_scrape_over_http_sees_what_happened_since() -> None:
    core, registry = exporting()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        for stored in (0, 2, 4):
            if stored:
                store(core, "r", keys(2, f"p{stored}"))
            with open_url(url, timeout=30) as answer:
                assert at(samples(answer.read().decode()), "kvsm_blocks_stored_total") == stored
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, prometheus.__name__)
    with pytest.raises(ImportError, match=r"pip install 'kvsm\[prometheus\]'"):
        importlib.import_module(prometheus.__name__)


def test_a_broken_log_is_exported(tmp_path: Path) -> None:
    """A metric shows that an engine continues without its log, so an alert can use it."""
    config = OffloadConfig(host_blocks=4, device_blocks=16)
    with disk(1 << 20) as limited:
        core = Offloader.open(config, tmp_path / "log", durability="none", on_failure="continue")
        registry = CollectorRegistry()
        registry.register(PrometheusCollector(Metrics.attached_to(core)))
        assert core.log is not None
        for free, broken, dropped in ((1 << 20, 0, 0), (0, 1, 1)):
            limited.free = free
            core.arrive(f"r{free}")
            core.log.flush()
            found = samples(generate_latest(registry).decode())
            assert at(found, "kvsm_log_broken") == broken
            assert at(found, "kvsm_log_events_dropped_total") == dropped
        core.close()
