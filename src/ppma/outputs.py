"""Output files: checks of paths, made before the work rather than after it, and contents."""

import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image


def check_target(name: str, path: str | Path, suffixes: Sequence[str] = ()) -> Path:
    """Check that a file can be written, without touching it.

    Args:
        name: name of the argument, for messages.
        path: the file.
        suffixes: allowed suffixes in lower case; any if empty.

    Returns:
        The path.

    Raises:
        ValueError: the file cannot be written; the message says why.

    Examples:
        >>> check_target("OUT", "model.bin", (".onnx", ".pt2"))
        Traceback (most recent call last):
        ValueError: OUT: expected a name that ends in .onnx or .pt2, got 'model.bin'
    """
    target = Path(path)
    if suffixes and target.suffix.lower() not in suffixes:
        raise ValueError(f"{name}: expected a name that ends in {' or '.join(suffixes)}, got {str(path)!r}")
    if target.is_dir():
        raise ValueError(f"{name}: expected a file, got the folder {target}")
    if not target.parent.is_dir():
        raise ValueError(f"{name}: expected a folder at {target.parent}, found none")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ValueError(f"{name}: cannot write to {target.parent}: {error.strerror}") from None
    if target.exists() and not os.access(target, os.W_OK):
        raise ValueError(f"{name}: cannot write {target}: it is read-only")
    return target


def csv_bytes(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    r"""A table with a header; None is an empty cell.

    Examples:
        >>> csv_bytes(("class", "IoU"), [("sky", 87.5), ("bird, small", None)])
        b'class,IoU\nsky,87.5\n"bird, small",\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")  # names of files that are no UTF-8


def json_bytes(value: Any) -> bytes:
    r"""A value as JSON: a list with an item on each line, anything else indented.

    Examples:
        >>> json_bytes([{"id": 1}, {"id": 2}])
        b'[\n{"id": 1},\n{"id": 2}\n]\n'
    """
    if isinstance(value, list):
        return ("[\n" + ",\n".join(map(json.dumps, value)) + "\n]\n").encode()
    return (json.dumps(value, indent=1) + "\n").encode()


def png_bytes(picture: "Image.Image") -> bytes:
    """A picture as PNG."""
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
