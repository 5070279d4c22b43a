"""`ppma --print-completion SHELL`: a shell completion script, generated from the parsers by shtab."""

import argparse
from typing import Any


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--print-completion", choices=("bash", "zsh"), action=_Print, help="print a completion script for this shell"
    )


class _Print(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        try:
            import shtab
        except ModuleNotFoundError:
            parser.exit(2, "ppma: --print-completion needs the package 'shtab': pip install shtab\n")
        _complete_files(parser, shtab.FILE)
        print(shtab.complete(parser, values))
        parser.exit()


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Complete file names for arguments that are neither choices nor numbers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.nargs != 0 and action.choices is None and action.type not in (int, float):
            action.complete = files  # type: ignore[attr-defined]
