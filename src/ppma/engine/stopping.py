"""Stopping a run before its last step: SIGTERM and Ctrl-C are handled between two steps."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """A signal handler that records the signal.

    Attributes:
        signal: number of the signal received, 0 for none.
    """

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C exits at once
        self.signal = number


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Handle SIGTERM and SIGINT inside the context; outside the main thread, do nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
