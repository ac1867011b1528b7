"""`kvsm spans`: requests of a log as OpenTelemetry spans, in the SDK's exporter and in another process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from core_life import begin_store, keys, load, store
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from places import ROOT
from served_logs import served

import kvsm
from kvsm.cli import main
from kvsm.core.offloader import Offloader
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.explain import otel_export
from kvsm.explain.otel_export import BATCH_SPANS, send, traces_url
from kvsm.explain.spans import SpanEvent, TraceSpan, request_spans
from kvsm.explain.story.window import EVERYTHING, Window
from kvsm.explain.why.causes import Inquiry
from kvsm.explain.why.questions import explain_request

BEGAN_NS = 1_763_802_000_000_000_000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with hits, evictions, failed copies, aborts and preemptions."""
    directory = tmp_path_factory.mktemp("spans") / "log"
    return served(directory, requests=60, failure_rate=0.1, abort_rate=0.1, preempt_rate=0.02, workers=2)


def exported(directory: Path, window: Window = EVERYTHING) -> list[ReadableSpan]:
    """The spans that the SDK's exporter gets."""
    exporter = InMemorySpanExporter()
    with kvsm.open(directory) as opened:
        traces = list(request_spans(opened, window))
        sent = send((span for trace in traces for span in trace), exporter, "run", "memory")
    assert sent == sum(map(len, traces)) == len(exporter.get_finished_spans())
    return list(exporter.get_finished_spans())


def known(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def is_root(span: ReadableSpan) -> bool:
    return span.parent is None


def test_each_request_that_ended_is_one_trace(log: Path) -> None:
    spans = exported(log)
    roots = [span for span in spans if is_root(span)]
    with kvsm.open(log) as opened:
        rows = [row for row in opened.requests() if row.finished is not None]
    assert [(known(one)["gen_ai.request.id"], one.start_time, one.end_time) for one in roots] == [
        (row.request, row.arrived_ns, row.finished_ns) for row in rows
    ]
    places = {(one.context.trace_id, one.context.span_id) for one in roots}
    assert all((span.context.trace_id, span.parent.span_id) in places for span in spans if span.parent)
    assert {span.name for span in spans} >= {"kvsm.request", "kvsm.store", "kvsm.load"}


def test_a_second_export_has_the_same_ids(log: Path) -> None:
    """So a collector replaces the spans of the first one."""
    first, second = exported(log), exported(log)
    ids = [(span.context.trace_id, span.context.span_id) for span in first]
    assert ids == [(span.context.trace_id, span.context.span_id) for span in second]
    assert len(ids) == len(set(ids))
    assert all(trace and span for trace, span in ids)


def test_the_events_are_the_lookups_and_their_causes(log: Path) -> None:
    """With the words of `kvsm why`."""
    events = [event for span in exported(log) if is_root(span) for event in span.events]
    with kvsm.open(log) as opened:
        lookups = list(opened.lookups())
        missed = sorted(
            (row.event, row.missed, Inquiry(opened).missed(row)) for row in lookups if row.missed is not None
        )
        loads = list(opened.transfers("direction = 'load' AND outcome = 'completed'"))
    counts = Counter(event.name for event in events)
    assert counts["asked"] == len(lookups)
    assert counts["hit"] == sum(row.hit_slots > 0 for row in lookups) > 0
    assert counts["loaded"] == len(loads) > 0
    found = [dict(event.attributes or {}) for event in events if event.name == "missed"]
    assert sorted((one["kvsm.event"], one["kvsm.key"], one["kvsm.why"]) for one in found) == missed


def test_a_span_has_the_answer_of_why(log: Path) -> None:
    roots = [span for span in exported(log) if is_root(span)]
    with kvsm.open(log) as opened:
        for span in roots[:20]:
            answer = explain_request(opened, known(span)["gen_ai.request.id"]).answer
            assert known(span)["kvsm.why"] == " ".join(answer)


def test_a_failed_load_is_an_error_that_names_the_rank(tmp_path: Path) -> None:
    now = BEGAN_NS
    core = Offloader.open(
        OffloadConfig(host_blocks=4, device_blocks=32, workers=2), tmp_path / "log", clock_ns=lambda: now
    )
    core.arrive("a")
    store(core, "a", keys(2))
    core.finish("a")
    core.arrive("b")
    transfer = load(core, "b", keys(2), 8)
    now += 7
    core.complete_load(transfer, 0)
    core.fail_load(transfer, 1, "the link is down")
    core.finish("b", aborted=True)
    core.close()
    failed = [span for span in exported(tmp_path / "log") if span.status.status_code is StatusCode.ERROR]
    (span,) = failed
    assert (span.name, span.start_time, span.end_time) == ("kvsm.load", BEGAN_NS, BEGAN_NS + 7)
    assert "rank 1 failed (the link is down)" in str(span.status.description)


def test_a_wait_is_a_span_that_names_the_copy(tmp_path: Path) -> None:
    now = BEGAN_NS
    core = Offloader.open(
        OffloadConfig(host_blocks=4, device_blocks=32), tmp_path / "log", clock_ns=lambda: now
    )
    core.arrive("a")
    transfer = begin_store(core, "a", keys(1))
    core.arrive("b")
    core.defer("b", transfer)
    now += 300_000_000
    core.complete_store(transfer, 0)
    core.finish("b")
    core.close()  # a has not ended
    spans = exported(tmp_path / "log")
    assert [known(span)["gen_ai.request.id"] for span in spans if is_root(span)] == ["b"]
    (wait,) = [span for span in spans if span.name == "kvsm.wait"]
    assert (wait.end_time or 0) - (wait.start_time or 0) == 300_000_000
    assert known(wait)["kvsm.why"] == f"store {transfer} of request a"


def test_a_window_has_the_requests_that_ended_in_it(log: Path) -> None:
    roots = [span for span in exported(log) if is_root(span)]
    ends = sorted(known(span)["kvsm.event.last"] for span in roots)
    part = Window(ends[10], ends[20])
    inside = [span for span in exported(log, part) if is_root(span)]
    assert sorted(known(span)["kvsm.event.last"] for span in inside) == [end for end in ends if end in part]


class _Slow(SpanExporter):
    """Notes how many spans were read when each batch comes."""

    def __init__(self) -> None:
        self.made, self.batches = 0, list[tuple[int, int]]()

    def spans(self, count: int) -> Iterator[TraceSpan]:
        for number in range(count):
            self.made += 1
            yield TraceSpan(
                name="kvsm.request",
                trace_id=number + 1,
                span_id=number + 1,
                parent_id=None,
                start_ns=1,
                end_ns=2,
                attributes={},
            )

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append((len(spans), self.made))
        return SpanExportResult.SUCCESS


def test_no_more_than_a_batch_is_in_memory() -> None:
    exporter = _Slow()
    assert send(exporter.spans(2 * BATCH_SPANS + 5), exporter, "run", "memory") == 2 * BATCH_SPANS + 5
    assert exporter.batches == [
        (BATCH_SPANS, BATCH_SPANS),
        (BATCH_SPANS, 2 * BATCH_SPANS),
        (5, 2 * BATCH_SPANS + 5),
    ]


class _Encodes(SpanExporter):
    """Encodes spans as they are sent."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans)
        return SpanExportResult.SUCCESS


@pytest.mark.parametrize("at_ns", [9.3e18, 1 << 70, -1])
def test_times_of_a_crafted_log_can_be_sent(at_ns: Any) -> None:
    """SQLite turns a sum that is too large for its integers into a float."""
    event = SpanEvent("asked", at_ns, {})
    (span,) = _Slow().spans(1)
    crafted: Any = {"start_ns": at_ns, "end_ns": at_ns, "events": (event,)}
    assert send([replace(span, **crafted)], _Encodes(), "run", "memory") == 1


# A collector in another process.


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """The file to which the collector writes the spans that it takes."""
    return tmp_path / "spans.jsonl"


@pytest.fixture
def collector(taken: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a collector. The fixture's parameter is the status with which it answers."""
    status = str(getattr(request, "param", 200))
    program = ROOT / "tests" / "support" / "otlp_server.py"
    with subprocess.Popen(
        [sys.executable, program, taken, "--status", status], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.terminate()


def test_a_collector_gets_every_span(log: Path, collector: str, taken: Path) -> None:
    result = CliRunner().invoke(main, ["spans", str(log), "--endpoint", collector, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    got = [json.loads(line) for line in taken.read_text().splitlines()]
    expected = exported(log)
    assert answer["spans"] == len(got) == len(expected)
    assert answer["requests"] == sum(is_root(span) for span in expected)
    assert [(one["span"], one["start"], one["end"]) for one in got] == [
        (f"{span.context.span_id:016x}", span.start_time, span.end_time) for span in expected
    ]
    assert [one["attributes"] for one in got] == [known(span) for span in expected]
    assert got[0]["resource"]["service.name"] == "kvsm"


@pytest.mark.parametrize("collector", [401], indirect=True)
def test_a_collector_that_refuses_is_told_with_its_answer(log: Path, collector: str) -> None:
    result = CliRunner().invoke(main, ["spans", str(log), "--endpoint", collector])
    assert result.exit_code == 2
    assert f"{collector}/v1/traces did not take the spans" in result.stderr
    assert "401" in result.stderr


def test_without_a_collector_the_error_says_so(log: Path) -> None:
    ended = ["spans", str(log), "--endpoint", "http://127.0.0.1:9", "--timeout", "0.2"]
    result = CliRunner().invoke(main, ended)
    assert result.exit_code == 2
    assert "nothing answers there (Connection refused); 0 spans were sent before" in result.stderr


def test_behind_a_proxy_the_error_is_its_answer(
    log: Path, collector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that only the proxy can reach is not called unreachable. The proxy here knows no URLs."""
    monkeypatch.setenv("http_proxy", collector)
    monkeypatch.setenv("no_proxy", "")
    result = CliRunner().invoke(main, ["spans", str(log), "--endpoint", "http://collector.invalid"])
    assert result.exit_code == 2
    assert "code: 404" in result.stderr
    assert "nothing answers there" not in result.stderr


def test_a_password_in_the_endpoint_is_not_printed(log: Path, collector: str) -> None:
    for address in (collector, "http://127.0.0.1:9"):
        with_password = address.replace("//", "//me:secret@")
        ended = ["spans", str(log), "--endpoint", with_password, "--timeout", "0.2", "--json"]
        result = CliRunner().invoke(main, ended)
        assert f"{address}/v1/traces" in result.output
        assert "secret" not in result.output
        assert "me:" not in result.output


def test_a_key_in_a_header_that_is_none_is_not_printed(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Bearer secret")
    result = CliRunner().invoke(main, ["spans", str(log), "--endpoint", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "has a part that is not NAME=VALUE" in " ".join(result.stderr.split())
    assert "secret" not in result.output + caplog.text


@pytest.mark.parametrize(
    "endpoint",
    [
        "localhost:4318",
        "ftp://localhost",
        "http://",
        "",
        "http://[::1",
        "http://localhost:port",
        "http://localhost:99999",
        "http://a..b:4318",
    ],
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        traces_url(endpoint)


def test_a_path_of_ones_own_is_kept() -> None:
    assert traces_url("http://host:1") == traces_url("http://host:1/") == "http://host:1/v1/traces"
    assert traces_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"


def test_without_an_endpoint_the_environment_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenTelemetry defines it: the variable for all signals is a base, to which each adds its path."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert traces_url(None) == "http://localhost:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://host/otlp")
    assert traces_url(None) == "https://host/otlp/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://host/other")
    assert traces_url(None) == "https://host/other"
    assert traces_url("http://given") == "http://given/v1/traces"


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, otel_export.__name__)
    with pytest.raises(ConfigError, match=r"pip install 'kvsm\[otel\]'"):
        importlib.import_module(otel_export.__name__)
