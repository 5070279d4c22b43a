"""The `ppma` command: a table of subcommands, each with a function that adds its arguments and one that runs it.

Both are named here and imported when the subcommand is used, so that `ppma --help` and the light commands stay light.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ppma


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        help: one line for `ppma --help`.
        arguments: "module:function" that takes the parser.
        run: "module:function" that takes the parsed arguments and returns the exit code.
    """

    help: str
    arguments: str
    run: str


COMMANDS: dict[str, Command] = {
    "info": Command(
        "parameters, FLOPs, activations, grid and attention of a model, or of all",
        "ppma.models.commands:info_arguments",
        "ppma.models.commands:info",
    ),
    "convert": Command(
        "make a safetensors file of the authors' checkpoint",
        "ppma.models.commands:convert_arguments",
        "ppma.models.commands:convert",
    ),
    "export": Command(
        "write a model as ONNX or as a torch.export program",
        "ppma.models.commands:export_arguments",
        "ppma.models.commands:export",
    ),
}


def _load(reference: str) -> Callable[..., Any]:
    module, function = reference.split(":")
    return getattr(importlib.import_module(module), function)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; a user's mistake is one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="ppma",
        description=ppma.__doc__,
        usage="ppma [--version] COMMAND ...",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ppma {ppma.__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="see below; each has its own --help")
    name = parser.parse_args(arguments[:1]).command
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"ppma {name}", description=command.help)
    _load(command.arguments)(parser)
    try:
        return _load(command.run)(parser.parse_args(arguments[1:]))
    except (ValueError, FileNotFoundError, ImportError, ppma.BackendUnavailableError) as error:
        print(f"ppma {name}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
