"""The `ppma` command: one module per command, each with `add_arguments(parser)` and `run(arguments)`.

Importing `ppma` imports torch, which takes seconds. Modules here import it inside `run`, so help and usage errors are
immediate.
"""

import argparse
import difflib
import importlib.metadata
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from ppma_cli import (
    ablate,
    bench,
    compare,
    completion,
    convert,
    data,
    demo,
    doctor,
    eval,
    example,
    explore,
    export,
    figure,
    info,
    kernels,
    predict,
    recipes,
    settings,
    train,
    weights,
)

COMMANDS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        recipes,
        train,
        eval,
        predict,
        ablate,
        compare,
        demo,
        data,
        bench,
        kernels,
        doctor,
        example,
        figure,
        explore,
        info,
        weights,
        convert,
        export,
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    A user error is one line on stderr and exit code 2, a failed run one line and 1. When the reader of a pipe exits, as
    `head` does, the command ends quietly with 141, like a program killed by SIGPIPE.
    """
    name = "ppma"
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # as quiet as `ppma.progress`
    try:
        try:
            arguments = _parse(list(sys.argv[1:] if argv is None else argv))
            name = f"ppma {arguments.command}"
            return COMMANDS[arguments.command].run(arguments)
        finally:
            _flush()
    except BrokenPipeError:
        return 128 + 13  # SIGPIPE, which Windows lacks
    except ModuleNotFoundError as error:
        _print_error(name, f"needs the package {error.name!r}: {_pip_line(error.name or '')}")
        return 2
    except KeyboardInterrupt as stop:
        _print_error(name, str(stop) or "interrupted")
        return 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        _print_error(name, error)
        return 2
    except RuntimeError as error:
        return _report_failure(name, error)


def _pip_line(package: str) -> str:
    """The command that installs a missing package, with the rest of the smallest extra that it is part of."""
    top = package.partition(".")[0]
    try:
        from ppma.bench.doctor import extras
    except ModuleNotFoundError:  # torch itself
        return f"pip install {top}"
    among = [missing for missing in extras().values() if any(re.match(rf"{top}\b", line) for line in missing)]
    smallest = min(among, key=len, default=[top])
    return f"pip install {shlex.join(smallest)}"


def make_parser() -> argparse.ArgumentParser:
    """The parser for all commands."""
    parser = argparse.ArgumentParser(
        prog="ppma", description="Polyline path masked attention: structured 2D masks for attention, exact and fast."
    )
    parser.add_argument("--version", action="version", version=f"ppma {importlib.metadata.version('ppma')}")
    completion.add_option(parser)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands", description="each has its own --help"
    )
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        command.set_defaults(parser=command)
        module.add_arguments(command)
    return parser


def _parse(words: list[str]) -> argparse.Namespace:
    parser = make_parser()
    if words == ["help"]:
        words = ["--help"]
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2, "\nppma: error: expected a command\n")
    near = difflib.get_close_matches(words[0], COMMANDS, 1)
    if near and words[0] not in COMMANDS:
        parser.error(f"expected a command, got {words[0]!r}; did you mean {near[0]!r}?")
    arguments, unknown = parser.parse_known_args(words)
    unknown = settings.collect(arguments, unknown, words)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def _flush() -> None:
    """Flush stdout here, where errors are handled; the interpreter would report them once more at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _report_failure(name: str, error: RuntimeError) -> int:
    """One line for the failures that the library declares; anything else is a bug and keeps its traceback."""
    from ppma import BackendUnavailableError
    from ppma.engine.errors import RunError, StoppedError

    if not isinstance(error, RunError | BackendUnavailableError):
        raise error
    if not isinstance(error, StoppedError) or os.environ.get("RANK", "0") == "0":  # all processes stop
        _print_error(name, error)
    return error.exit_code if isinstance(error, RunError) else 2


def _print_error(name: str, error: Exception | str) -> None:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
