"""`ppma data`: write a data set."""

import argparse

HELP = "write a data set: scenes of digits for detection and segmentation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("scenes",), help="scenes of handwritten digits, in COCO's and ADE20K's layout")
    parser.add_argument("--out", required=True, help="a new folder")
    parser.add_argument("--train", type=int, default=1000, help="training scenes (default: %(default)s)")
    parser.add_argument("--val", type=int, default=200, help="held-out scenes (default: %(default)s)")
    parser.add_argument("--size", type=int, default=96, help="side in pixels (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder, and say what can be done with it."""
    from ppma.data.scenes_files import write_scenes

    out = arguments.out
    write_scenes(out, train=arguments.train, val=arguments.val, size=arguments.size, seed=arguments.seed)
    print(f"{out}: {arguments.train} training and {arguments.val} held-out scenes; now, for example:")
    for recipe in ("scenes_maskrcnn_nano", "scenes_upernet_nano"):
        print(f"  ppma train {recipe} data.root={out}")
    return 0
