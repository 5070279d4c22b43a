"""The `ppma` command: a table of commands, each with a function that adds its arguments and one that runs it.

Both are named here and imported when the command is used, so that `ppma --help` and the light commands stay light.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import ppma
from ppma.engine.errors import RunError, StoppedError


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: one line for `ppma --help`.
        module: where its two functions are.
        arguments: the function that takes the parser.
        run: the function that takes the parsed arguments and returns the exit code.
    """

    help: str
    module: str
    arguments: str
    run: str


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train a model as a configuration file says; resumes, and runs under torchrun",
        "ppma.tasks.commands",
        "train_arguments",
        "train",
    ),
    "eval": Command("measure a checkpoint on held-out data", "ppma.tasks.commands", "eval_arguments", "evaluate"),
    "predict": Command(
        "classify images, or draw what is in them", "ppma.tasks.commands", "predict_arguments", "predict"
    ),
    "ablate": Command(
        "compare the masks: train each with several seeds, one table",
        "ppma.tasks.commands",
        "ablate_arguments",
        "ablate",
    ),
    "demo": Command(
        "train on the embedded digits, measure and look inside, in minutes",
        "ppma.tasks.commands",
        "demo_arguments",
        "run_demo",
    ),
    "data": Command(
        "write a data set: scenes of digits for detection and segmentation",
        "ppma.data.command",
        "add_arguments",
        "run",
    ),
    "bench": Command("measure, and compare with another implementation", "ppma.bench.command", "add_arguments", "run"),
    "kernels": Command(
        "the GPU kernels: predicted cost; registers, shared memory and spills (--report)",
        "ppma.bench.kernels",
        "add_arguments",
        "run",
    ),
    "example": Command("the paper's 4 x 4 example, worked out", "ppma.explore.command", "no_arguments", "example"),
    "figure": Command(
        "draw paths, masks, attention, costs: .png, .pdf, .svg, .gif",
        "ppma.explore.command",
        "figure_arguments",
        "figure",
    ),
    "explore": Command(
        "look into a model in the browser: click a token, see its mask and attention",
        "ppma.explore.command",
        "explore_arguments",
        "explore",
    ),
    "info": Command(
        "parameters, FLOPs, activations, grid and attention of a model, or of all",
        "ppma.models.commands",
        "info_arguments",
        "info",
    ),
    "convert": Command(
        "make a safetensors file of the authors' checkpoint", "ppma.models.commands", "convert_arguments", "convert"
    ),
    "export": Command(
        "write a model as ONNX or as a torch.export program", "ppma.tasks.export_command", "add_arguments", "run"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on stderr and exit code 2, a run that failed is one line and 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = _parser().parse_args(words[:1]).command
    command = COMMANDS[name]
    try:
        module = importlib.import_module(command.module)
        parser = argparse.ArgumentParser(prog=f"ppma {name}", description=command.help)
        getattr(module, command.arguments)(parser)
        return getattr(module, command.run)(parser.parse_args(_one_by_one(words[1:])))
    except ModuleNotFoundError as error:
        print(f"ppma {name}: needs the package {error.name!r}: pip install 'ppma[all]'", file=sys.stderr)
    except (ValueError, OSError, ppma.BackendUnavailableError) as error:
        _print_error(name, error)
    except RunError as error:
        if not isinstance(error, StoppedError) or os.environ.get("RANK", "0") == "0":  # all processes stop
            _print_error(name, error)
        return error.exit_code
    except KeyboardInterrupt as stop:
        _print_error(name, str(stop) or "interrupted")
        return 128 + signal.SIGINT
    return 2


def _print_error(name: str, error: Exception | str) -> None:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    print(f"ppma {name}: {' '.join(text.split())}", file=sys.stderr)


def _one_by_one(words: Sequence[str]) -> list[str]:
    """`--set a=1 b=2` as `--set a=1 --set b=2`; argparse's own way would take a file's name behind them as well."""
    spread: list[str] = []
    setting = False
    for word in words:
        assignment = setting and "=" in word and not word.startswith("-")
        if assignment and spread[-1] != "--set":
            spread.append("--set")
        setting = assignment or word == "--set"
        spread.append(word)
    return spread


def _parser() -> argparse.ArgumentParser:
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
    return parser
