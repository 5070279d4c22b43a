"""`ppma data`: generate a data set."""

import argparse

HELP = "generate a data set of digit scenes for detection and segmentation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=("scenes",), help="scenes of handwritten digits, in the COCO and ADE20K layouts"
    )
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument("--train", type=int, default=1000, help="training scenes (default: %(default)s)")
    parser.add_argument("--val", type=int, default=200, help="held-out scenes (default: %(default)s)")
    parser.add_argument("--size", type=int, default=96, help="image height and width in pixels (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Write the data set and print commands that use it."""
    from ppma.data.scenes_files import write_scenes

    out = arguments.out
    write_scenes(out, train=arguments.train, val=arguments.val, size=arguments.size, seed=arguments.seed)
    print(f"{out}: {arguments.train} training and {arguments.val} held-out scenes. To train on them:")
    for recipe in ("scenes_maskrcnn_nano", "scenes_upernet_nano"):
        print(f"  ppma train {recipe} data.root={out}")
    return 0
