"""`ppma ablate`: compare the masks."""

import argparse
from pathlib import Path

from ppma_cli import choices
from ppma_cli.output import show_warnings_in_one_line
from ppma_cli.settings import add_settings

HELP = "compare the masks: train each with several seeds, one table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a name (`ppma recipes` lists them), for example digits_ablation, or a YAML file",
    )
    parser.add_argument(
        "--masks",
        default=",".join(choices.MASKS),
        help="comma-separated (default: all); 2d-linear is the 2d mask with linear attention in all stages",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs for each mask")
    parser.add_argument("--out", help="folder of the runs and the table (default: runs/ and the name of the recipe)")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train with each mask and several seeds, and print one table; finished runs are not repeated."""
    from ppma.engine.errors import StoppedError
    from ppma.tasks import registry
    from ppma.tasks.classification.ablation import Ablation

    show_warnings_in_one_line()
    config = registry.load_config(arguments.recipe, arguments.assignments)
    out = Path(arguments.out or Path("runs") / Path(arguments.recipe).stem)
    study = Ablation(config, arguments.masks.split(","), arguments.seeds, out)
    try:
        study.run()
    except StoppedError as stopped:
        raise StoppedError("stopped; the same command goes on from here", stopped.signal) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on from the newest checkpoint") from None
    finally:  # a run that fails does not take the finished ones with it
        if study.results():
            print(study.table())
            print(f"\nwritten: {out / 'ablation.md'}, {out / 'ablation.json'}")
    return 0
