"""Ending a run before its last step: on SIGTERM and Ctrl-C, between two steps; and when it no longer improves."""

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ppma.engine.config import EarlyStoppingConfig


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


class EarlyStopping:
    """Counts the evaluations since the monitored metric last improved.

    Attributes:
        reference: the value to improve on.
        stale: number of evaluations since it improved.
        due: whether the run is to end.

    Examples:
        >>> stopping = EarlyStopping(EarlyStoppingConfig(patience=2))
        >>> for accuracy in (0.5, 0.6, 0.6, 0.4):
        ...     stopping.update(accuracy)
        >>> stopping.due
        True
    """

    def __init__(self, config: EarlyStoppingConfig | None) -> None:
        self.config = config
        self.reference, self.stale = -math.inf, 0

    @property
    def due(self) -> bool:
        return self.config is not None and self.stale >= self.config.patience

    def update(self, value: float) -> None:
        """Take the metric of an evaluation."""
        delta = 0.0 if self.config is None else self.config.min_delta
        if value > self.reference + delta or self.reference == -math.inf:
            self.reference, self.stale = value, 0
        else:
            self.stale += 1
