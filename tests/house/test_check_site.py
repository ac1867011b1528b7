"""The check of the site finds what a reader without a network would miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_site import SEARCHED, WIDTHS, chromium, main, problems, seen_problems
from timeline_browser import why_no_browser


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "a.html loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', "a.html loads //cdn.example/x.css"),
        ('<style>@import "https://f.example/f.css";</style>', "a.html loads https://f.example/f.css"),
        ('<img src="http://e.example/p.png">', "a.html loads http://e.example/p.png"),
        ('<a href="gone.html">x</a>', "a.html links to gone.html, which is not there"),
        ('<img src="gone.png">', "a.html links to gone.png, which is not there"),
        ('<a href="b.html#nowhere">x</a>', "a.html links to b.html#nowhere, and there is no such place"),
        ('<a href="#nowhere">x</a>', "a.html links to #nowhere, and there is no such place"),
    ],
)
def test_a_problem_is_named(page: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    assert list(problems(tmp_path)) == [problem]
    assert main(tmp_path) == 1


def test_a_site_that_needs_nothing_is_good(tmp_path: Path) -> None:
    """A link for the reader may lead into the network."""
    (tmp_path / "a.html").write_text('<a href="https://example.com">x</a><a href="b.html#here">b</a>')
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1><link rel="canonical" href="https://e.example/b">')
    (tmp_path / "s.css").write_text("p { background: url(data:image/png;base64,xx) }")
    assert main(tmp_path) == 0


def test_a_style_sheet_that_loads_a_font_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("a")
    (tmp_path / "s.css").write_text("@font-face { src: url('https://fonts.example/f.woff2') }")
    assert list(problems(tmp_path)) == ["s.css loads https://fonts.example/f.woff2"]


def test_a_directory_without_a_page_is_no_site(tmp_path: Path) -> None:
    assert main(tmp_path) == 2


CUT = (
    '<article style="width:300px;overflow:hidden"><pre style="overflow:visible">'
    + "x" * 200
    + "</pre></article>"
)
WIDE = '<article><img style="width:2000px" src="s.svg"></article>'
SCROLLS = '<article><pre style="overflow:auto">' + "x" * 400 + "</pre></article>"


@pytest.mark.slow
@pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser()))
def test_a_browser_sees_what_is_cut_off_and_what_the_search_lacks(tmp_path: Path) -> None:
    for name, text in (("cut", CUT), ("wide", WIDE), ("scrolls", SCROLLS)):
        (tmp_path / f"{name}.html").write_text(text)
    words = "".join(f'<li hidden class="{word}"></li>' for word in SEARCHED[1:])
    (tmp_path / "search.html").write_text(
        f'<div id="search-results"><ul class="search">{words}</ul></div><script>'
        'const asked = new URLSearchParams(location.search).get("q");'
        'for (const row of document.querySelectorAll("li"))'
        " if (row.className !== asked) row.remove();</script>"
    )
    with chromium() as driver:
        seen = list(seen_problems(tmp_path, driver))
    assert {line.split(":")[0].split(",")[0] for line in seen} == {
        "cut.html",
        "wide.html",
        f"search.html does not find {SEARCHED[0]}",
    }
    assert len([line for line in seen if line.startswith("cut.html")]) == len(WIDTHS)
