"""The explorer of the home page: `ppma explore --static` into the site, when MkDocs has built it (mkdocs.yml)."""

from pathlib import Path
from typing import Any

IMAGES = ("dog", "cat", "rocket")  # half a megabyte each


def on_post_build(config: Any, **_: Any) -> None:
    """MkDocs calls this after the last page."""
    from ppma_cli import main

    if main(["explore", "--static", str(Path(config.site_dir) / "explorer.html"), "--image", *IMAGES]):
        raise SystemExit("the explorer of the home page could not be written")
