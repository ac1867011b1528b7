"""Check that the built site is complete and can be read without a network.

    python specs/check_site.py SITE

Prints each page that loads something from a network, and each link to a missing file or anchor. Links to
other sites are not checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_CSS_LOADS = re.compile(r"(?:@import\s*|url\(\s*)[\"']?((?:https?:)?//[^\"')\s]+)")


_NOT_LOADED = ("canonical", "next", "prev", "search", "index")
"""The `rel` values of a `<link>` that a browser does not load."""


class Page(HTMLParser):
    """The addresses that a page loads, its links, and its anchors (`places`)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the addresses that a tag loads, its link and its anchors."""
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a":
            self.links += [values["href"]] if "href" in values else []
        elif tag == "link" and values.get("rel") not in _NOT_LOADED:
            self.loads.append(values.get("href", ""))
        elif "src" in values:
            self.loads.append(values["src"])
        self.loads += _CSS_LOADS.findall(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Record the addresses that a style sheet in the page loads."""
        self.loads += _CSS_LOADS.findall(data)


def problems(site: Path) -> Iterator[str]:
    """A message for each problem of the site in this directory."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    places = {path: page.places for path, page in pages.items()}
    for sheet in sorted(site.rglob("*.css")):
        for address in _CSS_LOADS.findall(sheet.read_text(encoding="utf-8")):
            yield f"{sheet.relative_to(site)} loads {address}"
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name} loads {address}" for address in page.loads if urlsplit(address).netloc)
        for link in (*page.links, *page.loads):
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path.resolve()
            if not target.exists():
                yield f"{name} links to {link}, which is not there"
            elif address.fragment and unquote(address.fragment) not in places.get(target, {address.fragment}):
                yield f"{name} links to {link}, and there is no such place"


def main(site: Path) -> int:
    """Print the problems. Returns the exit code."""
    if not any(site.glob("*.html")):
        print(f"{site}: no page here", file=sys.stderr)
        return 2
    found = list(problems(site.resolve()))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python specs/check_site.py SITE")
    sys.exit(main(Path(sys.argv[1])))
