"""Screenshots of the explorer in Chromium: `make screenshots` writes docs/images/explorer*.png."""

import sys
from pathlib import Path

from browser import DESKTOP, PHONE, browser  # tests/explore

DOG = "tab=image&image=dog&at=0.53,0.36&head=0&scale=log"
VIEWS = {
    "explorer": (DESKTOP, "light", DOG),
    "explorer-dark": (DESKTOP, "dark", DOG),
    "explorer-grid": ({"width": 1280, "height": 720}, "light", "tab=grid"),
    "explorer-phone": (PHONE, "light", DOG),
}


def main(page: str, folder: str) -> None:
    """Photograph every view of a static page."""
    with browser() as launched:
        for name, (viewport, scheme, link) in VIEWS.items():
            tab = launched.new_page(viewport=viewport, color_scheme=scheme)
            tab.goto(f"{Path(page).resolve().as_uri()}#{link}")
            tab.wait_for_timeout(500)  # the picture is decoded
            tab.screenshot(path=f"{folder}/{name}.png")
            tab.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
