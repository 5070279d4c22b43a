"""`ppma train`: train as a recipe says."""

import argparse
from pathlib import Path

from ppma_cli.output import show_warnings_in_one_line, tell
from ppma_cli.settings import add_settings

HELP = "train a model from a recipe; resumes, and runs under torchrun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a name (`ppma recipes` lists them), for example digits_nano, or a YAML file"
    )
    parser.add_argument("--out", help="folder of the run (default: runs/ and the name of the recipe)")
    parser.add_argument(
        "--resume", default="none", metavar="auto|PATH", help="continue the run in --out, or from a checkpoint"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run in --out")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train; the same command under torchrun trains on several processes."""
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
        raise KeyboardInterrupt(f"interrupted; --resume auto continues from the newest checkpoint in {out}") from None
    tell(f"{out}: {describe(summary)}")
    return 0
