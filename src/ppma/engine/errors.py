"""The ways a run fails. Each error is one line; the command prints it and exits with `exit_code`."""

import signal


class RunError(RuntimeError):
    """A run that could not continue, or could not write its results.

    Attributes:
        exit_code: exit code of the command.
    """

    exit_code = 1


class NonFiniteLossError(RunError):
    """The loss became NaN or infinite."""


class TooManyBrokenError(RunError):
    """More samples were unreadable than `max_broken` allows."""


class LoaderDiedError(RunError):
    """A loader process was killed, most often because memory ran out."""

    exit_code = 2


class IncompleteRunError(RunError):
    """The run finished, but some results could not be written."""


class StoppedError(RunError):
    """A signal stopped the run, and its state was saved.

    Attributes:
        signal: number of the signal, 0 if another process of the run received it.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number
        self.exit_code = 128 + (number or signal.SIGTERM)
