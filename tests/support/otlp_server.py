"""A collector of traces: OTLP over HTTP, with OpenTelemetry's own messages. Run as a program.

    python otlp_server.py SPANS [--status CODE]

It prints its port. Each span that it takes is a line of JSON in the file SPANS.
"""

from __future__ import annotations

import argparse
import gzip
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


def plain(attributes: Any) -> dict[str, Any]:
    """The attributes of a message as a dict."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def spans_of(request: ExportTraceServiceRequest) -> list[dict[str, Any]]:
    return [
        {
            "name": span.name,
            "trace": span.trace_id.hex(),
            "span": span.span_id.hex(),
            "parent": span.parent_span_id.hex(),
            "start": span.start_time_unix_nano,
            "end": span.end_time_unix_nano,
            "attributes": plain(span.attributes),
            "events": [[event.name, event.time_unix_nano, plain(event.attributes)] for event in span.events],
            "error": span.status.message if span.status.code == 2 else None,
            "resource": plain(resource.resource.attributes),
        }
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spans", type=Path)
    parser.add_argument("--status", type=int, default=200)
    given = parser.parse_args()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces" and given.status == 200:
                with given.spans.open("a") as file:
                    for span in spans_of(ExportTraceServiceRequest.FromString(body)):
                        file.write(json.dumps(span) + "\n")
            self.send_response(given.status if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
