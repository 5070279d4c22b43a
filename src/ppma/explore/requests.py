"""Validation of requests. A request need not come from the page, so every value is checked on the server."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeGuard

import gradio as gr
from gradio.utils import get_upload_folder

from ppma.ops import checks

LONGEST = 40  # characters of a value in an error message
Scalar = str | int | float | bool | None


def abbreviate(value: object) -> str:
    """A value for an error message, on one line of bounded length."""
    text = repr(value) if isinstance(value, Scalar) else type(value).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def number(name: str, value: object, low: float, high: float) -> float:
    """A finite number from `low` to `high`."""
    if _is_real(value) and low <= value <= high:  # NaN is not
        return float(value)
    raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {abbreviate(value)}")


def integer(name: str, value: object, low: int, high: int) -> int:
    """An integer from `low` to `high`; the browser may send 3.0."""
    if _is_real(value) and low <= value <= high and value == int(value):
        return int(value)
    raise ValueError(f"{name}: expected a whole number from {low} to {high}, got {abbreviate(value)}")


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def boolean(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {abbreviate(value)}")
    return value


def choice(name: str, value: object, valid: Collection[str]) -> str:
    """One of the valid strings."""
    checks.one_of(name, value[:LONGEST] if isinstance(value, str) else value, valid)
    assert isinstance(value, str)
    return value


def click_position(index: object, side: int) -> tuple[float, float]:
    """The position (x, y) of a click in an image of side x side pixels."""
    if not isinstance(index, list) or len(index) != 2:
        raise ValueError(f"click: expected a position x, y in the image, got {abbreviate(index)}")
    x, y = (number(name, value, 0, side) for name, value in zip("xy", index, strict=True))
    return x, y


def parse(page: gr.Blocks, body: bytes) -> dict[str, Any]:
    """Parse a request and keep the fields that the page uses, each of the type that its component expects.

    Gradio processes values before it validates them: it downloads a file whose path is a URL, for example. Values that
    pass here are harmless; the handlers check their ranges.

    Args:
        page: the page whose handler is called.
        body: JSON.

    Raises:
        ValueError: the page would not send such a request.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("request: expected JSON") from None
    if not isinstance(asked, dict):
        raise ValueError(f"request: expected a JSON object, got {abbreviate(asked)}")
    function, session, trigger = (asked.get(name) for name in ("fn_index", "session_hash", "trigger_id"))
    if type(function) is not int or function not in page.fns:
        raise ValueError(f"fn_index: expected a function of the page, got {abbreviate(function)}")
    if not (isinstance(session, str) and session.isalnum() and len(session) <= LONGEST):
        raise ValueError(f"session_hash: expected up to {LONGEST} letters and digits, got {abbreviate(session)}")
    if trigger is not None and (type(trigger) is not int or trigger not in page.blocks):
        raise ValueError(f"trigger_id: expected a component of the page, got {abbreviate(trigger)}")
    inputs, data = page.fns[function].inputs, asked.get("data")
    if not isinstance(data, list) or len(data) != len(inputs):
        raise ValueError(f"data: expected a list of {len(inputs)} values, got {abbreviate(data)}")
    return {
        "fn_index": function,
        "session_hash": session,
        "trigger_id": trigger,
        "data": [_input(component, value) for component, value in zip(inputs, data, strict=True)],
        "event_data": {"index": _index(asked.get("event_data")), "value": None},
    }


def _input(component: object, value: object) -> Any:
    name = getattr(component, "elem_id", None) or type(component).__name__
    if isinstance(component, gr.State):
        return None  # kept on the server
    if isinstance(component, gr.UploadButton):
        return {"path": _uploaded(name, value), "meta": {"_type": "gradio.FileData"}}
    if isinstance(component, gr.Dataframe):
        return {"headers": [], "data": _table(name, value), "metadata": None}
    if not isinstance(value, Scalar):
        raise ValueError(f"{name}: expected a number or a word, got {abbreviate(value)}")
    return value


def _uploaded(name: str, value: object) -> str:
    if isinstance(value, list) and len(value) == 1:  # Gradio accepts this too
        value = value[0]
    path = value.get("path") if isinstance(value, dict) else None
    folder = Path(get_upload_folder()).resolve()
    try:
        if isinstance(path, str) and Path(path).resolve().is_relative_to(folder) and Path(path).is_file():
            return path
    except (OSError, ValueError):  # the name is too long or contains a null byte
        pass
    raise ValueError(f"{name}: expected an uploaded file, got {abbreviate(path)}")


def _table(name: str, value: object) -> list[list[Scalar]]:
    rows = value.get("data") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{name}: expected a table, got {abbreviate(value)}")
    for cell in (cell for row in rows for cell in row):
        if not isinstance(cell, Scalar):
            raise ValueError(f"{name}: expected a number in each cell, got {abbreviate(cell)}")
    return rows


def _index(event: object) -> Scalar | list[Scalar]:
    """The index of a clicked item or position, if any."""
    index = event.get("index") if isinstance(event, dict) else None
    listed = index if isinstance(index, list) else [index]
    if len(listed) > 2 or not all(isinstance(part, Scalar) for part in listed):
        raise ValueError(f"event_data: expected one or two numbers, got {abbreviate(index)}")
    return index
