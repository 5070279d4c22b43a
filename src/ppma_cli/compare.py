"""`ppma compare`: compare models."""

import argparse
from pathlib import Path

from ppma_cli.output import show_warnings_in_one_line
from ppma_cli.settings import add_settings
from ppma_cli.study import run_study

HELP = "train one recipe with several models, ours or timm's, and several seeds; print one table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe name (see `ppma recipes`), or a YAML file")
    parser.add_argument("--models", required=True, help="comma-separated names, such as ppma_tiny,resnet18")
    parser.add_argument("--seeds", type=int, default=3, help="runs per model (default: %(default)s)")
    parser.add_argument("--out", help="output folder for the runs and the table (default: runs/RECIPE-models)")
    parser.add_argument("--latex", action="store_true", help="print the table for LaTeX (booktabs)")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train with each model and several seeds and print one table; finished runs are reused."""
    from ppma.tasks.comparison import Comparison

    show_warnings_in_one_line()
    out = Path(arguments.out or Path("runs") / f"{Path(arguments.recipe).stem}-models")
    models = [name.strip() for name in arguments.models.split(",")]
    return run_study(
        Comparison(arguments.recipe, models, arguments.seeds, out, arguments.assignments), latex=arguments.latex
    )
