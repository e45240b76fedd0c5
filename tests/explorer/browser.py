"""A real Chromium without a screen; WebGL is drawn by the processor."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

SECONDS = 120  # a machine with nothing else to do takes one


@contextmanager
def chromium(width: int = 1280, height: int = 860, dark: bool = False) -> Iterator[webdriver.Chrome]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program and driver, "chromium and chromedriver are missing: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "use-gl=angle", "use-angle=swiftshader"):
        options.add_argument(f"--{flag}")
    options.add_argument("--enable-unsafe-swiftshader")
    options.add_argument(f"--window-size={width},{height}")
    if dark:
        options.add_argument("--force-dark-mode")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_script_timeout(SECONDS)
    browser.set_page_load_timeout(SECONDS)
    try:
        yield browser
    finally:
        browser.quit()


def until(what: Callable[[], Any]) -> Any:
    """What it says as soon as it says something."""
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        found = what()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def opened(browser: webdriver.Chrome, address: str) -> None:
    """Until the first map is drawn."""
    browser.get(address)
    until(lambda: browser.execute_script("return document.body.dataset.drawn"))


def complaints(browser: webdriver.Chrome) -> list[str]:
    return [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]
