"""Write the screenshots in docs/pictures/, of logs of the tests' incidents.

`PYTHONPATH=specs:tests/support python -m write_pictures` writes them. It needs Debian's packages chromium,
chromium-driver and fonts-dejavu-core, and the Python packages of `kvsm[test]`. No test compares the pictures,
because browsers differ in their pixels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from click.testing import CliRunner
from incidents import eviction_burst
from timeline_browser import started_browser, why_no_browser

from kvsm.cli import main

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
LARGEST_BYTES = 300_000


def write_timeline() -> None:
    """Write `timeline.png`: a batch job evicts blocks of conversations, and one eviction is selected."""
    with TemporaryDirectory() as place, started_browser(1440, 960) as browser:
        os.chdir(place)  # the page shows the log's name as the command was given it
        eviction_burst(Path("kvsm-log"))
        done = CliRunner().invoke(main, ["timeline", "kvsm-log", "-o", "t.html"])
        if done.exit_code:
            sys.exit(done.output)
        browser.open(Path(place) / "t.html")
        browser.run(
            """
            const { blocks } = page.model.tables;
            const missed = new Map();
            blocks.gone.forEach((gone, row) => {
              if (blocks.wanted[row] !== null) missed.set(gone, (missed.get(gone) ?? 0) + 1);
            });
            const [event] = [...missed].sort((a, b) => b[1] - a[1])[0];
            page.select({ type: 'eviction', row: event });
            page.canvas.from = 85e9;
            page.canvas.to = 165e9;
            page.redraw();
            """
        )
        browser.drawn()
        picture = browser.driver.get_screenshot_as_png()
    if len(picture) > LARGEST_BYTES:
        sys.exit(f"timeline.png has {len(picture):,} bytes; at most {LARGEST_BYTES:,} belong into the docs")
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "timeline.png").write_bytes(picture)


if __name__ == "__main__":
    missing = why_no_browser()
    if missing is not None:
        sys.exit(f"there is no browser to draw with: {missing}")
    write_timeline()
