"""`ppma eval`: evaluate a checkpoint."""

import argparse
import json

from ppma_cli import choices
from ppma_cli.output import show_warnings_in_one_line, tell
from ppma_cli.settings import add_settings

HELP = "evaluate a checkpoint on held-out data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a weight file, such as best.safetensors of a run, or a published name")
    parser.add_argument("--data", required=True, help="a recipe, a folder, or digits")
    parser.add_argument("--split", help="data split (default: the held-out split)")
    parser.add_argument("--batch-size", type=int, help="per process (default: 64; detection and segmentation: 4)")
    parser.add_argument("--workers", type=int, default=0, help="data loader processes (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the GPU if there is one)")
    parser.add_argument("--amp", choices=choices.AMP, default="none", help="mixed precision (default: %(default)s)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for metrics.json, classes.csv, the confusion matrix (classification, segmentation) and "
        "predictions.json in COCO's results format (detection)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace such files in DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a checkpoint and print its metrics."""
    from ppma.engine.logging import format_metrics, headline
    from ppma.models import open_checkpoint
    from ppma.tasks.registry import task_class

    show_warnings_in_one_line()
    checkpoint = open_checkpoint(arguments.checkpoint)
    measured = task_class(checkpoint.task, str(checkpoint.path)).evaluate(
        checkpoint,
        arguments.data,
        split=arguments.split,
        assignments=arguments.assignments,
        workers=arguments.workers,
        amp=arguments.amp,
        device=arguments.device,
        batch_size=arguments.batch_size,
        out=arguments.out,
        overwrite=arguments.overwrite,
    )
    if arguments.json:
        tell(json.dumps(measured, indent=2))
    else:
        where = f", details in {arguments.out}" if arguments.out else ""
        tell(f"{measured['count']} samples, {measured['per_second']:.3g} per second{where}")
        tell(format_metrics(headline(measured)))
    return 0
