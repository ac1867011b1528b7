"""Each link of the project's pages leads somewhere (specs/check_links.py)."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from check_links import problems, why_unanswered
from places import ROOT


def test_every_link_leads_somewhere() -> None:
    assert list(problems(ROOT)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[x](gone.md)", "a.md links to gone.md, which is not there"),
        ("[x](b.md#gone)", "a.md links to b.md#gone, and there is no such heading"),
        ("[x](#gone)", "a.md links to #gone, and there is no such heading"),
        ("[x](..)", "a.md links to .., which is outside of the project"),
        ("![x](gone.png)", "a.md links to gone.png, which is not there"),
        ("[![x](b.md)](gone.md)", "a.md links to gone.md, which is not there"),
        ("https://example", "a.md names https://example, which has no host"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "b.md").write_text("# There\n")
    (tmp_path / "a.md").write_text(text)
    assert list(problems(tmp_path)) == [problem]


@pytest.mark.parametrize(
    "text",
    [
        "[x](b.md#a-code-and-a-link)",
        "[x](b.md#twice-1)",
        "[x](b.md)",
        "`[x](gone.md)`",
        "```md\n[x](gone.md)\n```",
    ],
)
def test_a_link_as_github_reads_it_is_good(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "b.md").write_text("# A `code`, and a [link](b.md)\n\n## Twice\n\n## Twice\n")
    (tmp_path / "a.md").write_text(text)
    assert list(problems(tmp_path)) == []


def test_an_address_is_asked_for_its_status() -> None:
    """`--online`, against a real server."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/there" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Site) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{site.server_port}"
        assert (why_unanswered(f"{address}/there"), why_unanswered(f"{address}/gone")) == ("", "status 404")
        site.shutdown()
