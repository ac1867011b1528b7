"""A real browser for tests of the timeline page: headless Debian Chromium, driven by Selenium.

It is configured to reach no network, and all its requests are recorded.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WAIT_SECONDS = 60
"""Time limit for a page (s). A page takes about a second; a busy machine takes longer."""


def why_no_browser() -> str | None:
    """Return what is missing for these tests; None if nothing is."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "apt-get install chromium chromium-driver"
    return None if find_spec("selenium") else "pip install 'kvsm[test]'"


class Browser:
    """A page in the browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path) -> float:
        """Open a page, and wait until it is drawn. Returns the wall time (s)."""
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        began = time.perf_counter()
        self.driver.get(page.as_uri())
        self.wait("return window.kvsmTimeline?.canvas.frames.length > 0")
        return time.perf_counter() - began

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the value of a script in the page. In the script, `page` is the page's own object."""
        return self.driver.execute_script(f"const page = window.kvsmTimeline; {script}", *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Wait until a script returns a true value."""
        until = time.monotonic() + WAIT_SECONDS
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > until:
                raise TimeoutError(f"not true after {WAIT_SECONDS} s: {script}; {self.errors()}")
            time.sleep(0.02)
        return found

    def drawn(self) -> None:
        """Wait until all requested drawing is on the canvas."""
        self.wait("return !page.waiting")

    def text(self, selector: str) -> str:
        """Return an element's text, as in the document."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def answer(self) -> str:
        """Return the answer in the panel."""
        return self.text("#detail .answer")

    def errors(self) -> list[str]:
        """Return the console messages since the last call.

        Omits a performance hint that only these tests cause, because they read pixels.
        """
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in messages if "willReadFrequently" not in message]

    def requests(self) -> list[str]:
        """Return the addresses that the page has requested since it was opened, and its policy allowed."""
        messages = [json.loads(one["message"])["message"] for one in self.driver.get_log("performance")]
        refused = {
            one["params"]["requestId"] for one in messages if one["params"].get("blockedReason") == "csp"
        }
        return [
            one["params"]["request"]["url"]
            for one in messages
            if one["method"] == "Network.requestWillBeSent" and one["params"]["requestId"] not in refused
        ]

    def click_at(self, x: float, y: float) -> None:
        """Click at a point of the canvas, with real mouse events."""
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        self.drawn()
        box = self.run("const box = page.canvas.element.getBoundingClientRect(); return [box.x, box.y]")
        actions = ActionBuilder(self.driver)
        actions.pointer_action.move_to_location(
            round(box[0] + x), round(box[1] + y)
        ).pointer_down().pointer_up()
        actions.perform()
        ActionChains(self.driver).perform()

    def keys(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()


@contextmanager
def started_browser(width: int = 1600, height: int = 1000) -> Iterator[Browser]:
    """Start a new browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # CI is root, and Chromium refuses to run as root with a sandbox
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--force-device-scale-factor=1",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
