"""Changes of a recipe on the command line: `key=value` words, with or without `--set` before them."""

import argparse
import re
from collections.abc import Sequence

_ASSIGNMENT = re.compile(r"\w[\w.-]*\s*=")  # a path such as runs/lr=1/config.yaml is none


def add_settings(parser: argparse.ArgumentParser) -> None:
    """`key=value ...` and `--set key=value ...`; both end up in `arguments.assignments`."""
    parser.add_argument(
        "assignments",
        nargs="*",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="changes of the recipe, for example lr=1e-4 data.root=/data",
    )
    parser.add_argument(
        "--set", type=_assignment, action="append", metavar="KEY=VALUE", dest="assignments", help="the same"
    )


def collect(arguments: argparse.Namespace, unknown: list[str], argv: Sequence[str]) -> list[str]:
    """Sort the words of a parsed command; returns the words that it does not take.

    argparse hands back positional words that follow an option, and takes a setting for the recipe where `--set a=1 b=2`
    comes first. Settings are put in the order of `argv`, since the last one of a key counts.
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
