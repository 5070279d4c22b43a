"""The progress of a run on the terminal.

Needs the extra `train`; figures, which read a run's folder, do without. rich draws random numbers when it is imported,
which must not happen in the middle of a run: a resumed one would end with another state of the generators.
"""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0  # between progress lines when stderr is not a terminal


class ProgressLine:
    """A progress bar on a terminal, else a line every `LINE_SECONDS`.

    Args:
        title: name of the work.
        total: amount of work.
        done: amount already done.
        enabled: False in processes that do not print.
        unit: unit of `total`.
        within: a running bar, below which this one is shown.
    """

    def __init__(
        self,
        title: str,
        total: int,
        done: int = 0,
        *,
        enabled: bool = True,
        unit: str = "steps",
        within: "ProgressLine | None" = None,
    ) -> None:
        self.title, self.total, self.first, self.enabled, self.unit = title, total, done, enabled, unit
        self.console: Console = within.console if within is not None else Console(stderr=True)
        self.started = self.printed = time.monotonic()
        self.within = within
        self.bar: Progress | None = within.bar if within is not None else None
        if self.bar is None and enabled and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
            )
            self.bar.start()
        if self.bar is not None:
            self.task = self.bar.add_task(title, total=total, completed=done, note="")

    def update(self, done: int, note: str = "") -> None:
        """Show the progress, with a note beside it."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, note=note)
        elif self.enabled and (time.monotonic() - self.printed >= LINE_SECONDS):
            self.printed = time.monotonic()
            left = (self.printed - self.started) / max(done - self.first, 1) * (self.total - done)
            self.say(f"{self.title}: {done}/{self.total} {self.unit}, ETA {_duration(left)}, {note}".rstrip(", "))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.enabled:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None and self.within is not None:
            self.bar.remove_task(self.task)
        elif self.bar is not None:
            self.bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
