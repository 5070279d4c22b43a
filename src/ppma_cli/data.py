"""`ppma data`: check, convert or generate a data set."""

import argparse
from typing import TYPE_CHECKING

from ppma_cli.output import show_warnings_in_one_line, table
from ppma_cli.settings import add_settings

if TYPE_CHECKING:
    from ppma.data.checked import SplitFacts

HELP = "check what a training will see of its data; convert data sets; generate scenes"

PANELS = 16
LAYOUTS = ("yolo", "voc", "cityscapes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for each action."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (text, add_options, _) in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(parser=action)
        add_options(action)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action."""
    return ACTIONS[arguments.action][2](arguments)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe name (see `ppma recipes`) or a YAML file")
    parser.add_argument("--out", metavar="FILE.png", help="draw augmented training samples with their labels")
    parser.add_argument("--panels", type=int, default=PANELS, help="samples to draw (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="images to read of each split, evenly spread (default: all)")
    add_settings(parser)


def _check(arguments: argparse.Namespace) -> int:
    """Print what the splits hold, and draw a contact sheet."""
    for option in ("panels", "limit"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option}: expected at least 1, got {value}")
    from ppma.outputs import check_target
    from ppma.progress import Progress
    from ppma.tasks.data_check import check_data
    from ppma.tasks.registry import load_config, make_task

    show_warnings_in_one_line()
    out = check_target("--out", arguments.out, (".png",)) if arguments.out else None
    task = make_task(load_config(arguments.recipe, arguments.assignments))
    with Progress("opening the data"):
        check = check_data(task, limit=arguments.limit, panels=arguments.panels if out else 0)
    print(_describe(check.splits))
    broken = [message for split in check.splits for message in split.broken]
    for message in broken:
        print(f"broken: {message}")
    if len(broken) > task.config.max_broken:
        print(f"{len(broken)} broken samples: the training fails after max_broken={task.config.max_broken}")
    if out and check.sheet:
        check.sheet.save(out)
        print(f"wrote {out}")
    return 0


def _describe(splits: "list[SplitFacts]") -> str:
    rows = [["split", "samples", "read", "broken", "image size in pixels"]]
    for split in splits:
        numbers = [f"{number:,}" for number in (split.samples, split.read, len(split.broken))]
        rows.append([split.name, *numbers, split.describe_sizes()])
    histogram = [["class", *(f"{split.name} {split.unit}" for split in splits)]]
    others = {name for split in splits for name in split.counts} - set(splits[0].classes)
    for name in (*splits[0].classes, *sorted(others)):
        cells = [f"{split.counts[name]:,} {split.counts[name] / max(1, split.counts.total()):6.1%}" for split in splits]
        histogram.append([name, *cells])
    return f"{table(rows)}\n\n{table(histogram)}"


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layout", choices=LAYOUTS, help="layout of the data set")
    parser.add_argument("source", metavar="SOURCE", help="folder of the data set; yolo: or its YAML file")
    parser.add_argument("dest", metavar="DEST", help="new or empty folder")
    parser.add_argument("--link", action="store_true", help="link images instead of copying them")


def _convert(arguments: argparse.Namespace) -> int:
    """Convert a data set and print what was written."""
    from ppma.data.converters import convert
    from ppma.progress import Progress

    with Progress(f"reading {arguments.source}"):
        lines = convert(arguments.layout, arguments.source, arguments.dest, link=arguments.link)
    for line in lines:
        print(f"{arguments.dest}: {line}")
    return 0


def _add_scenes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument("--train", type=int, default=1000, help="training scenes (default: %(default)s)")
    parser.add_argument("--val", type=int, default=200, help="held-out scenes (default: %(default)s)")
    parser.add_argument("--size", type=int, default=96, help="image height and width in pixels (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")


def _scenes(arguments: argparse.Namespace) -> int:
    """Write the data set and print commands that use it."""
    from ppma.data.scenes_files import write_scenes

    out = arguments.out
    write_scenes(out, train=arguments.train, val=arguments.val, size=arguments.size, seed=arguments.seed)
    print(f"{out}: {arguments.train} training and {arguments.val} held-out scenes. To train on them:")
    for recipe in ("scenes_maskrcnn_nano", "scenes_upernet_nano"):
        print(f"  ppma train {recipe} data.root={out}")
    return 0


ACTIONS = {
    "check": ("show what a training will see: counts, classes, sizes, broken files, samples", _add_check, _check),
    "convert": ("convert a data set to COCO files and label maps", _add_convert, _convert),
    "scenes": ("generate scenes of handwritten digits, in the COCO and ADE20K layouts", _add_scenes, _scenes),
}
