"""Printing shared by the commands."""

import os
import sys
import threading
import warnings
from typing import Any


def tell(text: str) -> None:
    """Print in the main process only."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def show_warnings_in_one_line() -> None:
    """Print warnings and errors of background threads as one line each, without source code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    threading.excepthook = lambda failed: show(f"{failed.exc_type.__name__}: {failed.exc_value}")


def table(rows: list[list[str]]) -> str:
    """Align columns: text to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left_aligned = [not any(row[column][:1].isdigit() for row in rows[1:]) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left_aligned, strict=True)
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
