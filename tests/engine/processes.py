"""Training of the stand-in in separate processes.

They are forked from a server that has imported the libraries once and run nothing: fresh, and started in milliseconds.
"""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["matplotlib.figure", "ppma.engine.trainer", "safetensors.torch"])


class Ended(NamedTuple):
    exit_code: int | None  # negative: killed by that signal
    output: str


class Program:
    """A started process."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        self.output = Path(tempfile.mkstemp(suffix=".txt")[1])
        self.process = _context.Process(target=_child, args=(list(command), str(self.output), environment or {}))
        self.process.start()

    def wait(self) -> Ended:
        self.process.join(120)
        if self.process.is_alive():
            self.process.kill()
            raise TimeoutError(self.output.read_text())
        ended = Ended(self.process.exitcode, self.output.read_text())
        self.output.unlink()
        return ended


def _child(command: list[str], output: str, environment: dict[str, str]) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in an ordinary program
    sys.path.insert(0, str(Path(__file__).parent))
    from stand_in import main

    main(command)


def program(out: Path, resume: str, *arguments: str) -> Ended:
    """Train to the end, or to the death that the arguments ask for."""
    return Program(str(out), resume, *arguments).wait()
