"""The `ppma` command: one module a command, each with `add_arguments(parser)` and `run(arguments)`.

This package stands beside `ppma`, whose import brings torch: a module here imports it inside `run`, so that help and
usage errors answer at once.
"""

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from ppma_cli import (
    ablate,
    bench,
    completion,
    convert,
    data,
    demo,
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
)

COMMANDS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        recipes,
        train,
        eval,
        predict,
        ablate,
        demo,
        data,
        bench,
        kernels,
        example,
        figure,
        explore,
        info,
        convert,
        export,
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on stderr and exit code 2, a run that failed is one line and 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments, unknown = make_parser().parse_known_args(words)
    name = arguments.command
    unknown = settings.collect(arguments, unknown, words)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return COMMANDS[name].run(arguments)
    except ModuleNotFoundError as error:
        print(f"ppma {name}: needs the package {error.name!r}: pip install 'ppma[all]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        _print_error(name, str(stop) or "interrupted")
        return 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        _print_error(name, error)
        return 2
    except RuntimeError as error:
        return _report_failure(name, error)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
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


def _report_failure(name: str, error: RuntimeError) -> int:
    """One line for the failures that the library announces; others are bugs and are raised."""
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
    print(f"ppma {name}: {' '.join(text.split())}", file=sys.stderr)
