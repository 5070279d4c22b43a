"""`ppma ablate`: compare masks."""

import argparse
from pathlib import Path

from ppma_cli import choices
from ppma_cli.output import show_warnings_in_one_line
from ppma_cli.settings import add_settings
from ppma_cli.study import run_study

HELP = "train one recipe with each mask and several seeds; print one table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a recipe name (see `ppma recipes`), such as digits_ablation, or a YAML file",
    )
    parser.add_argument(
        "--masks",
        default=",".join(choices.MASKS),
        help="comma-separated mask names (default: all); 2d-linear: the 2d mask with linear attention in all stages",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="train every mask with each of these values: model_args.formulation=paper,release; can be repeated",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs per mask (default: %(default)s)")
    parser.add_argument("--out", help="output folder for the runs and the table (default: runs/RECIPE)")
    parser.add_argument("--latex", action="store_true", help="print the table for LaTeX (booktabs)")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train with each mask and several seeds and print one table; finished runs are reused."""
    from ppma.tasks import registry
    from ppma.tasks.ablation import Ablation

    show_warnings_in_one_line()
    config = registry.load_config(arguments.recipe, arguments.assignments)
    out = Path(arguments.out or Path("runs") / Path(arguments.recipe).stem)
    study = Ablation(config, arguments.masks.split(","), arguments.seeds, out, arguments.vary)
    return run_study(study, latex=arguments.latex)
