"""Chromium for the tests of the explorer's page, and for its screenshots."""

import shutil
from contextlib import contextmanager

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# Without these, Chromium itself tries to contact its maker.
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]


@contextmanager
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        launched = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-quic", *QUIET]
        )
        yield launched
        launched.close()
