"""A proxy before a prefill engine and a decode engine (docs/disaggregated-prefill.md).

    python examples/disaggregated_proxy.py --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200 --port 8000

Each request goes to the prefill engine for one token. Its answer says where the blocks of the prompt are, and
with that the request goes to the decode engine. The decode engine's answer goes back as it comes, so streams
stream. For trying out: a real proxy chooses among several engines, and limits what it takes.
"""

from __future__ import annotations

import argparse
import http.client
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ONE_TOKEN = {
    "max_tokens": 1,
    "stream": False,
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
}
"""What the prefill engine is asked for, in place of what the client said."""

LENGTHS = ("stream_options", "max_completion_tokens", "min_tokens")
"""What a request for one token, which does not stream, must not have."""


class Proxy(BaseHTTPRequestHandler):
    """Serves one client."""

    protocol_version = "HTTP/1.1"
    prefill = decode = ""

    def do_POST(self) -> None:
        """A completion request, or any other that both engines know."""
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        first = {name: value for name, value in asked.items() if name not in LENGTHS} | ONE_TOKEN
        with_prefill = self._post(self.prefill, first)
        answer = json.loads(with_prefill.read())
        handed = answer.get("kv_transfer_params") if with_prefill.status == 200 else None
        # Without it the decode engine computes the prompt itself.
        self._pass_on(self._post(self.decode, {**asked, "kv_transfer_params": handed} if handed else asked))

    def do_GET(self) -> None:
        """For example /v1/models."""
        connection = http.client.HTTPConnection(self.decode)
        connection.request("GET", self.path)
        self._pass_on(connection.getresponse())

    def _post(self, engine: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(engine)
        headers = {"Content-Type": "application/json"}
        if "Authorization" in self.headers:
            headers["Authorization"] = self.headers["Authorization"]
        connection.request("POST", self.path, json.dumps(body), headers)
        return connection.getresponse()

    def _pass_on(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while piece := answer.read1(1 << 16):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", required=True, help="HOST:PORT of the prefill engine")
    parser.add_argument("--decode", required=True, help="HOST:PORT of the decode engine")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    Proxy.prefill, Proxy.decode = given.prefill, given.decode
    ThreadingHTTPServer(("127.0.0.1", given.port), Proxy).serve_forever()


if __name__ == "__main__":
    main()
