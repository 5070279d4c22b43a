"""The explorer's page: one HTML file that computes masks and attention in the browser and loads nothing."""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from ppma.atomic import write_atomically
from ppma.explore.images import MAX_BYTES, find_image, sample_names
from ppma.explore.record import ImageRecord, image_record
from ppma.explore.subject import Subject
from ppma.layers.attention import FORMULATIONS
from ppma.masks import KINDS
from ppma.progress import track

SCRIPTS = ("masks.js", "draw.js", "image.js", "playground.js", "main.js")
THUMBNAIL = 72  # pixels


def page_html(subject: Subject, records: Sequence[ImageRecord], *, live: bool = False) -> str:
    """Build the page.

    Args:
        subject: the model.
        records: of the images that the page has from the start; the first is shown.
        live: a server is there to record samples and uploads.
    """
    data: dict[str, Any] = {
        "model": subject.name,
        "trained": subject.trained,
        "colours": {name: _css(colour) for name, colour in zip(subject.classes, subject.colours, strict=False)},
        "masks": list(KINDS),
        "formulations": list(FORMULATIONS),
        "records": list(records),
        "samples": _thumbnails() if live else {},
        "live": live,
        "megabytes": MAX_BYTES // 1_000_000,
    }
    parts = {
        "TITLE": html.escape(f"{subject.name} · polyline path masked attention"),
        "STYLE": _file("page.css"),
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
        "SCRIPTS": "\n".join(map(_file, SCRIPTS)),
    }
    page = _file("page.html")
    for name, text in parts.items():
        page = page.replace(f"@{name}@", text)
    return page


def write_page(subject: Subject, images: Mapping[str, Image.Image], path: Path) -> None:
    """Write the page for some images to one self-contained HTML file.

    Args:
        subject: the model.
        images: by name; the first is shown first.
        path: of the file.
    """
    records = [image_record(subject, image, name) for name, image in track([*images.items()], "images")]
    write_atomically(path, page_html(subject, records).encode())


def _css(colour: tuple[int, int, int] | None) -> str:
    return "var(--line)" if colour is None else f"rgb{colour}"


def _file(name: str) -> str:
    return resources.files("ppma.explore").joinpath("page").joinpath(name).read_text("utf-8")


@cache
def _thumbnails() -> dict[str, str]:
    """Small data URLs of the sample images."""
    urls = {}
    for name in sample_names():
        image = find_image(name)
        image.thumbnail((2 * THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=80)
        urls[name] = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return urls
