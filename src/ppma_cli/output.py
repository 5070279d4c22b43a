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
