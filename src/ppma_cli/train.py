"""`ppma train`: train from a recipe."""

import argparse
from pathlib import Path

from ppma_cli.output import show_warnings_in_one_line, tell
from ppma_cli.settings import add_settings

HELP = "train a model from a recipe; supports resuming and torchrun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a recipe name (see `ppma recipes`), such as digits_nano, or a YAML file"
    )
    parser.add_argument("--out", help="output folder (default: runs/RECIPE)")
    parser.add_argument(
        "--resume", default="none", metavar="auto|PATH", help="continue the run in --out (auto) or a checkpoint"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run in --out")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train; under torchrun, on several processes."""
    from ppma.engine.results import describe
    from ppma.tasks.run import train

    show_warnings_in_one_line()
    out = Path(arguments.out or Path("runs") / Path(arguments.recipe).stem)
    try:
        summary = train(
            arguments.recipe,
            out,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            assignments=arguments.assignments,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; --resume auto continues from the latest checkpoint in {out}") from None
    tell(f"{out}: {describe(summary)}")
    return 0
