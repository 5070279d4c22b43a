"""How a run can fail. Each error is one line for the user; the command line prints it and leaves with `exit_code`."""

import signal


class RunError(RuntimeError):
    """A run that could not go on, or could not keep its results.

    Attributes:
        exit_code: of the command.
    """

    exit_code = 1


class NonFiniteLossError(RunError):
    """The loss became NaN or infinite; the state before that step was saved."""


class TooManyBrokenError(RunError):
    """More samples could not be read than the configuration allows."""


class LoaderDiedError(RunError):
    """A loader process was killed from outside, most often for want of memory."""

    exit_code = 2


class IncompleteRunError(RunError):
    """The run reached its last step, but not all of its results could be written."""


class StoppedError(RunError):
    """The run was asked to stop and has saved; `signal` says by what."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number
        self.exit_code = 128 + (number or signal.SIGTERM)  # 0: another process of the run was asked
