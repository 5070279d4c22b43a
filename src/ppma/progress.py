"""Progress of long commands: one line on stderr if it is a terminal, nothing otherwise."""

import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

Item = TypeVar("Item")

_DELAY = 1.0  # seconds before the line appears, so that short work shows none
_INTERVAL = 0.5  # seconds between redraws
_BAR = 24  # characters
_running: "list[Progress]" = []


class Progress:
    """A progress line: a bar with the time left, or the time elapsed if the number of steps is unknown.

    Of nested ones the innermost is shown.

    Args:
        title: what is running.
        total: number of steps; None if unknown.

    Examples:
        >>> from ppma.progress import Progress
        >>> with Progress("measuring", total=3) as progress:
        ...     for size in (32, 64, 128):
        ...         progress.advance(f"{size} pixels")
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        self.title, self.total, self.done = title, total, 0
        self._begun = self._drawn = time.monotonic()
        self._finished = threading.Event()
        self._visible = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Progress":
        _running.append(self)
        # Counted steps redraw the line themselves: a thread would disturb what they measure.
        if self.total is None and _is_terminal():
            self._thread = threading.Thread(target=self._redraw, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
        self.clear()
        _running.remove(self)

    def clear(self) -> None:
        """Remove the line until the next step redraws it, to print something else."""
        if self._visible:
            _write("")
            self._visible = False

    def advance(self, note: str = "") -> None:
        """Count one step as done.

        Args:
            note: shown behind the bar until the next step.
        """
        self.done += 1
        now = time.monotonic()
        if now - self._begun >= _DELAY and now - self._drawn >= _INTERVAL and _is_terminal():
            self._draw(note)

    def _redraw(self) -> None:
        pause = _DELAY
        while not self._finished.wait(pause):
            self._draw("")
            pause = _INTERVAL

    def _draw(self, note: str) -> None:
        if _running[-1:] != [self]:
            return
        self._visible, self._drawn = True, time.monotonic()
        elapsed = self._drawn - self._begun
        if self.total is None:
            _write(f"{self.title} {_clock(elapsed)}")
            return
        filled = _BAR * min(self.done, self.total) // max(self.total, 1)
        left = elapsed / max(self.done, 1) * max(self.total - self.done, 0)
        bar = "#" * filled + "." * (_BAR - filled)
        _write(f"{self.title} [{bar}] {self.done}/{self.total}, {_clock(left)} left  {note}")


def track(items: Collection[Item], title: str) -> Iterator[Item]:
    """Iterate over items with a progress line.

    Args:
        items: anything with a length.
        title: what is running.
    """
    with Progress(title, len(items)) as progress:
        for item in items:
            yield item
            progress.advance()


def announce(text: str) -> None:
    """Print a line about what starts now, for work that has a progress bar of its own."""
    if _is_terminal():
        print(text, file=sys.stderr)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(line: str) -> None:
    """Replace the terminal's last line."""
    width = shutil.get_terminal_size().columns - 1
    print(f"\r{line[:width]}\033[K", end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
