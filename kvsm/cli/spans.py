"""`kvsm spans`: send the requests of a log to an OpenTelemetry trace collector. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument, trust_options, window_options
from kvsm.cli.opened_tables import opened_log
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.core.log import LogReader
from kvsm.explain.spans import TraceSpan, open_requests, request_spans
from kvsm.explain.story.window import LogPoint


class SpansAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.spans/1"):
    """What `kvsm spans --json` prints: what was sent.

    log: the log's directory. endpoint: the collector's URL.
    requests: the number of requests that were sent, each as one trace. spans: the number of their spans.
    not_ended: the number of requests that had not ended at the end of the log. They were not sent.
    """

    log: str
    endpoint: str
    requests: int
    spans: int
    not_ended: int


@click.command(cls=Command)
@log_argument()
@click.option(
    "--endpoint",
    metavar="URL",
    help="The collector's URL for OTLP over HTTP. /v1/traces is added to a URL without a path.  "
    "[default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, else "
    "http://localhost:4318]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the collector may take for a batch of 512 spans.",
)
@window_options
@trust_options
@json_option
def spans(
    log: Path,
    endpoint: str | None,
    timeout_s: float,
    since: LogPoint | None,
    until: LogPoint | None,
    as_json: bool,
    **trust: Any,
) -> None:
    """Send the requests of LOG to an OpenTelemetry trace collector.

    Each request that has ended becomes a trace: a span with its lookups, and a child span for each wait, load
    and store. The attribute kvsm.why holds the answer of `kvsm why`. With --since and --until, the requests
    that ended between them are sent. Ids are computed from LOG: a span that is sent twice has the same id.
    The extra kvsm[otel] is needed.

    \b
    Examples:
      kvsm spans kvsm-log --endpoint http://localhost:4318
      OTEL_EXPORTER_OTLP_HEADERS=api-key=KEY kvsm spans LOG --endpoint https://collector/v1/traces

    Exits with 2 if the collector does not accept the spans, and with 1 if LOG is damaged or lacks events.
    """
    from kvsm.explain.otel_export import collector, send, traces_url, without_password

    url = traces_url(endpoint)
    exporter, shown = collector(url, timeout_s), without_password(url)
    with opened_log(log, **trust) as opened:
        requests = 0

        def found() -> Iterator[TraceSpan]:
            nonlocal requests
            for trace in request_spans(opened, opened.window(since, until)):
                requests += 1
                yield from trace

        run = LogReader(log).head.run.hex()
        sent = send(found(), exporter, run, url)
        waiting = open_requests(opened)
        if as_json:
            say_json(
                SpansAnswer(log=str(log), endpoint=shown, requests=requests, spans=sent, not_ended=waiting)
            )
        else:
            say(f"sent {requests:,} requests as {sent:,} spans to {shown}")
            if waiting:
                say(f"{waiting:,} requests have not ended, and were not sent")
        if opened.stopped is not None:
            complain(f"{opened.stopped}; only requests that ended before were sent")
        leave(opened.condition, good=opened.stopped is None)
