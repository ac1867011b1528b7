"""Check the links of all Markdown pages of the project, and the addresses in pyproject.toml.

    python specs/check_links.py              links to files, and to headings of pages
    python specs/check_links.py --online     also asks other sites for each address

Prints each link that leads nowhere. `check_site.py` checks the built site.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?\)")
_BARE = re.compile(r"https?://[^\s)>\"'`\]]+")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_LEFT_ALONE = {"build", "failures", "site", "node_modules"}
TIMEOUT_S = 20


def pages(root: Path) -> list[Path]:
    """Return the Markdown files of the project, except in directories of builds and environments."""
    return [
        path
        for path in sorted(root.rglob("*.md"))
        if not any(
            part in _LEFT_ALONE or (part.startswith(".") and part != ".github")
            for part in path.relative_to(root).parts
        )
    ]


@cache
def places(path: Path) -> frozenset[str]:
    """Return the anchors of a page: its headings, as GitHub and MyST name them, and `id`s in HTML."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found: Counter[str] = Counter()
    names = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in _HEADING.findall(text):
        shown = re.sub(r"[`*]|!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return frozenset(names)


def links(path: Path) -> list[str]:
    """Return the targets of the links of a page."""
    text = re.sub(r"(`+).+?\1", lambda span: "" if "](" in span[0] else span[0], _without_code(path))
    return _LINK.findall(text)


def addresses(root: Path) -> dict[str, str]:
    """Return each address of another site -> the first file that names it."""
    named: dict[str, str] = {}
    for path in [*pages(root), root / "pyproject.toml"]:
        text = _without_code(path) if path.suffix == ".md" else path.read_text(encoding="utf-8")
        for address in _BARE.findall(text):
            named.setdefault(address.rstrip(".,;:"), str(path.relative_to(root)))
    return named


def _without_code(path: Path) -> str:
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def problems(root: Path) -> Iterator[str]:
    """Yield a message for each link without a target, and for each invalid address."""
    for path in pages(root):
        name = path.relative_to(root)
        for link in links(path):
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            if not target.exists():
                yield f"{name} links to {link}, which is not there"
            elif not target.is_relative_to(root):
                yield f"{name} links to {link}, which is outside of the project"
            elif address.fragment and target.suffix == ".md" and address.fragment not in places(target):
                yield f"{name} links to {link}, and there is no such heading"
    for link, named_by in addresses(root).items():
        host = urlsplit(link).hostname or ""
        if not re.fullmatch(r"[\w-]+(\.[\w-]+)+|localhost", host):
            yield f"{named_by} names {link}, which has no host"


def unanswered(root: Path) -> Iterator[str]:
    """Yield a message for each address of another site that does not answer."""
    named = {one: by for one, by in addresses(root).items() if not _is_local(one)}
    with ThreadPoolExecutor(8) as pool:
        for (link, named_by), why in zip(named.items(), pool.map(why_unanswered, named)):
            if why:
                yield f"{named_by} names {link}: {why}"


def why_unanswered(address: str) -> str:
    """Return why this address cannot be read; empty if it can."""
    request = urllib.request.Request(address, headers={"User-Agent": "check_links"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except (OSError, ValueError) as error:
        return str(error)


def _is_local(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    return host in ("localhost", "127.0.0.1") or "." not in host


def main() -> int:
    """Print the problems, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--online", action="store_true", help="also ask other sites for each address")
    found = list(problems(ROOT))
    if parser.parse_args().online:
        found += unanswered(ROOT)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
