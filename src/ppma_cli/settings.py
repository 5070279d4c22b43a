"""Recipe overrides on the command line: `key=value`, with or without `--set`."""

import argparse
import re
from collections.abc import Sequence

_ASSIGNMENT = re.compile(r"\w[\w.-]*\s*=")  # does not match paths such as runs/lr=1/config.yaml


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `key=value ...` and `--set key=value ...`; both are collected in `arguments.assignments`."""
    parser.add_argument(
        "assignments",
        nargs="*",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override recipe values, for example lr=1e-4 data.root=/data",
    )
    parser.add_argument(
        "--set", type=_assignment, action="append", metavar="KEY=VALUE", dest="assignments", help="same as KEY=VALUE"
    )


def collect(arguments: argparse.Namespace, unknown: list[str], argv: Sequence[str]) -> list[str]:
    """Move overrides among the unparsed words into `arguments.assignments`; returns the remaining words.

    argparse does not parse positionals that follow an option, and takes an override for the recipe when
    `--set a=1 b=2` comes first. Overrides keep the order of `argv`, since the last value of a key wins.
    """
    if "assignments" not in arguments or any(word.startswith("-") for word in unknown):
        return unknown
    words = [*arguments.assignments, *unknown]
    subject = next((name for name in ("recipe", "checkpoint") if name in arguments), None)
    others = [word for word in words if not _ASSIGNMENT.match(word)]
    if subject and others and _ASSIGNMENT.match(getattr(arguments, subject) or ""):
        words[words.index(others[0])] = getattr(arguments, subject)
        setattr(arguments, subject, others.pop(0))
    for word in others:
        arguments.parser.error(f"settings: expected key=value, got {word!r}")
    position = {re.sub("^--[a-z]+=", "", word): index for index, word in enumerate(argv)}
    arguments.assignments = sorted(words, key=lambda word: position[word])
    return []


def _assignment(text: str) -> str:
    if not _ASSIGNMENT.match(text):
        raise argparse.ArgumentTypeError(f"expected key=value, got {text!r}")
    return text
