"""`ppma weights`: list published weights, or verify one."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from ppma_cli.output import table

HELP = "list published weights by name, or verify one (--verify)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--verify",
        metavar="NAME",
        help="download and load one, check names and shapes, and print a checksum of its output",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list, or verify one entry; exit code 1 if its checksum differs."""
    if arguments.verify:
        return _verify(arguments.verify)
    entries = _published()
    if arguments.json:
        print(json.dumps(entries, indent=2))
        return 0
    rows = [["name", "task", "data", "parameters", "result", "licence", "from"]]
    for entry in entries:
        figures = (f"{entry['parameters']:,}", entry["figure"], entry["license"])
        source = "this package" if entry["repository"] is None else f"hf.co/{entry['repository']}"
        rows.append([entry["name"], entry["task"], entry["data"], *figures, f"{source}: {entry['file']}"])
    print(table(rows))
    return 0


def _published() -> list[dict[str, Any]]:
    """The entries of `ppma.models.published`, read without importing ppma, which would import torch."""
    spec = importlib.util.find_spec("ppma")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "models" / "published.json"
    return json.loads(spec.loader.get_data(str(path)))  # type: ignore[union-attr]  # works in zipped packages too


def _verify(name: str) -> int:
    from ppma.tasks.verify import verify

    found = verify(name)
    print(f"{name}: {found.path}")
    print("  every name and shape fits the model")
    print(f"  output {found.shape} for a synthetic image, checksum {found.checksum:.9g} (norm {found.norm:.6g})")
    if found.expected is None:
        print("  no checksum is recorded to compare with")
    else:
        print(f"  recorded checksum {found.expected:.9g}: {'agrees' if found.passed else 'DIFFERS'}")
    return 0 if found.passed else 1
