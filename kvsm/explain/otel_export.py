"""Send spans to a collector by OTLP over HTTP: `pip install 'kvsm[otel]'`."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import islice
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from kvsm.errors import ConfigError
from kvsm.explain.spans import TraceSpan

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
except ImportError as error:
    raise ConfigError(
        f"spans need OpenTelemetry, which is not installed ({error}); pip install 'kvsm[otel]'"
    ) from error

BATCH_SPANS = 512
"""The number of spans in one message. OpenTelemetry's own processor sends as many."""

TRACES_PATH = "/v1/traces"
"""The path of a collector's OTLP endpoint."""

LOCAL = "http://localhost:4318"
"""A collector on this machine, at its usual port."""


def collector(url: str, timeout_s: float) -> SpanExporter:
    """Return an exporter to this URL. Headers and TLS follow OpenTelemetry's environment variables.

    timeout_s: how long one batch may take.

    Raises `ConfigError` if a header is none. OpenTelemetry would print it, with the key that it may hold.
    """
    with _Reasons("opentelemetry.util.re") as reasons:
        exporter = OTLPSpanExporter(endpoint=url, timeout=timeout_s)
    if reasons.first is not None:
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_HEADERS or OTEL_EXPORTER_OTLP_TRACES_HEADERS has a part that is not "
            "NAME=VALUE; write it so, with a space as %20"
        )
    return exporter


def traces_url(endpoint: str | None) -> str:
    """Return the URL to which spans are sent.

    endpoint: a URL; OTLP's path is added to a URL without a path. None: the URL in OpenTelemetry's
        environment variables, or else `LOCAL`.

    Raises `ConfigError` if it is not an HTTP URL.
    """
    name, base = "--endpoint", os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint is None and (whole := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        name, endpoint = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", whole
    elif endpoint is None and base:
        # This variable is for all signals. Each signal adds its own path, even to a URL with a path.
        name, endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT", base.rstrip("/") + TRACES_PATH
    elif endpoint is None:
        endpoint = LOCAL
    try:
        parts = urlsplit(endpoint)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # an address of IPv6, a port or a name that is none
        is_usable = False
    if not is_usable:
        raise ConfigError(f"{name} is {without_password(endpoint)!r}; it must be a URL such as {LOCAL}")
    return urlunsplit(parts._replace(path=TRACES_PATH)) if parts.path in ("", "/") else endpoint


def without_password(url: str) -> str:
    """Return the URL as it may be printed: without a user's name and password."""
    return re.sub(r"(?<=//)[^/?#]*@", "", url)


def send(spans: Iterable[TraceSpan], exporter: SpanExporter, run: str, to: str) -> int:
    """Send spans in batches of `BATCH_SPANS`, and return how many there were.

    run: the id of the log's run. to: the URL of the collector.

    Raises `ConfigError` if the collector does not accept a batch; it has accepted the batches before.
    """
    resource = Resource.create({"service.name": "kvsm", "service.instance.id": run})
    scope, sent = InstrumentationScope("kvsm", version("kvsm")), 0
    for batch in _batches(spans):
        with _Reasons("opentelemetry.exporter.otlp") as reasons:
            try:
                taken = exporter.export([_readable(span, resource, scope) for span in batch])
            except OSError as error:  # Older exporters raise this without a connection.
                taken, reasons.first = SpanExportResult.FAILURE, str(error)
        if taken is not SpanExportResult.SUCCESS:
            raise ConfigError(
                f"{without_password(to)} did not take the spans: {_unreachable(to) or reasons.first}; "
                f"{sent:,} spans were sent before. Repeat the command when it answers: the ids of spans stay "
                "the same"
            )
        sent += len(batch)
    return sent


def _unreachable(url: str) -> str | None:
    """Return why no connection to the collector can be made; None: it can be made, or a proxy makes it."""
    parts = urlsplit(url)
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname or ""):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=1).close()
    except OSError as error:
        return f"nothing answers there ({error.strerror or error})"
    return None


def _batches(spans: Iterable[TraceSpan]) -> Iterator[Sequence[TraceSpan]]:
    found = iter(spans)
    while batch := list(islice(found, BATCH_SPANS)):
        yield batch


def _readable(span: TraceSpan, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    parent = None if span.parent_id is None else _context(span.trace_id, span.parent_id)
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, _time(event.at_ns)) for event in span.events],
        kind=SpanKind.INTERNAL,
        instrumentation_scope=scope,
        status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=_time(span.start_ns),
        end_time=_time(span.end_ns),
    )


def _time(ns: float) -> int:
    """Return a time that OTLP can hold. In a crafted log a sum may be too large for SQLite's integers."""
    return min(max(int(ns), 0), (1 << 64) - 1)


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class _Reasons(logging.Handler):
    """Catches the messages that OpenTelemetry logs about a failure: it returns no reason, and would print it.

    logger: the name of OpenTelemetry's logger.
    first: the first message, which has the cause; None if there was none.
    """

    def __init__(self, logger: str) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None
        self._logger = logging.getLogger(logger)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first message, without its part about retries."""
        self.first = self.first or record.getMessage().partition(" encountered while")[0]

    def __enter__(self) -> _Reasons:
        self._propagate, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagate
