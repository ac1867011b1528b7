"""Check that the built site is complete and can be read without a network.

    python specs/check_site.py [--browser] SITE

Prints each page that loads something from a network, and each link to a missing file or anchor. Links to
other sites are not checked. With `--browser`, Chromium opens each page in the widths of a desktop and of a
phone. It prints each page that scrolls sideways, each block of code, table or picture that is cut off, and
each word that the search does not find. It needs chromium, chromium-driver and selenium.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_CSS_LOADS = re.compile(r"(?:@import\s*|url\(\s*)[\"']?((?:https?:)?//[^\"')\s]+)")


_NOT_LOADED = ("canonical", "next", "prev", "search", "index")
"""The `rel` values of a `<link>` that a browser does not load."""


WIDTHS = (1280, 390)
"""Widths of the window (CSS pixels): for a desktop and for a phone."""

SEARCHED = ("eviction", "OffloadScheduler", "AllBlocksCleared")
"""Words that the search must find."""

_SEARCH_SECONDS = 20

_CUT = """
const found = [];
if (document.documentElement.scrollWidth > window.innerWidth + 1) found.push("the page scrolls sideways");
for (const element of document.querySelectorAll("article pre, article table, article img, article .sig")) {
  const box = element.getBoundingClientRect();
  if (!box.width) continue;
  const right = box.left + Math.max(element.scrollWidth, box.width);
  for (let place = element; place; place = place.parentElement) {
    const overflow = getComputedStyle(place).overflowX;
    if (place !== document.body && ["auto", "scroll"].includes(overflow)) break;
    const edge = Math.min(place.getBoundingClientRect().right, window.innerWidth);
    const hides = ["hidden", "clip"].includes(overflow) || place === document.documentElement;
    if (hides && right > edge + 1) {
      found.push("cut off: " + (element.textContent.trim() || element.src).slice(0, 60));
      break;
    }
  }
}
return found;
"""
"""Returns what a reader can neither see nor scroll to."""


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


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a headless Chromium, which ends with the `with` block."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for option in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "allow-file-access-from-files"):
        options.add_argument(f"--{option}")
    options.binary_location = "/usr/bin/chromium"
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


def seen_problems(site: Path, driver: Any) -> Iterator[str]:
    """Yield a message for each problem that a reader sees in a browser."""
    for width in WIDTHS:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for page in sorted(site.rglob("*.html")):
            driver.get(page.as_uri())
            for problem in driver.execute_script(_CUT):
                yield f"{page.relative_to(site)}, {width} pixels wide: {problem}"
    for word in SEARCHED:
        if not _finds(driver, site, word):
            yield f"search.html does not find {word}"


def _finds(driver: Any, site: Path, word: str) -> bool:
    driver.get(f"{(site / 'search.html').as_uri()}?q={word}")
    until = time.monotonic() + _SEARCH_SECONDS
    while time.monotonic() < until:
        if driver.execute_script("return document.querySelectorAll('#search-results ul.search li').length"):
            return True
        time.sleep(0.1)
    return False


def main(site: Path, in_browser: bool = False) -> int:
    """Print the problems. Returns the exit code."""
    if not any(site.glob("*.html")):
        print(f"{site}: no page here", file=sys.stderr)
        return 2
    site = site.resolve()
    found = list(problems(site))
    if in_browser:
        with chromium() as driver:
            found += seen_problems(site, driver)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if in_browser := "--browser" in arguments:
        arguments.remove("--browser")
    if len(arguments) != 1:
        sys.exit("usage: python specs/check_site.py [--browser] SITE")
    sys.exit(main(Path(arguments[0]), in_browser))
