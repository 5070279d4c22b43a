"""`ppma explore`: inspect a model in the browser."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppma_cli.model_options import add_subject

if TYPE_CHECKING:
    from ppma.explore.subject import Subject

HELP = "inspect a model in the browser: click a token, see its mask and attention"
FIRST = "dog"  # the sample that is shown first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument(
        "--image",
        nargs="+",
        metavar="IMAGE",
        help="image files or names of samples (default: all samples; without --static, the first is shown first)",
    )
    parser.add_argument("--static", type=Path, metavar="FILE.html", help="write one self-contained page, serve nothing")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default: %(default)s)")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="do not open the browser")


def run(arguments: argparse.Namespace) -> int:
    """Serve the explorer until it is interrupted, or write it to a file."""
    from ppma.explore.images import find_image, sample_names
    from ppma.explore.page import write_page
    from ppma.explore.server import check_address, serve
    from ppma.explore.subject import default_name, open_subject
    from ppma.models import open_checkpoint
    from ppma.models.published import PUBLISHED
    from ppma.outputs import check_target

    # Fail before loading a model.
    if arguments.static is not None:
        check_target("static", arguments.static, (".html",))
    else:
        check_address(arguments.host, arguments.port)
    names = arguments.image or sorted(sample_names(), key=lambda name: name != FIRST)
    images = {_unique(name, names): find_image(name) for name in (names if arguments.static else names[:1])}
    name = arguments.model or default_name("segmentation", "classification")
    subject = open_subject(arguments.checkpoint, name)
    source = arguments.checkpoint or (name if name in PUBLISHED else None)
    if source is not None and open_checkpoint(source).task == "segmentation":
        subject = _with_prediction(subject, source)
    if arguments.checkpoint is None and arguments.model is None and not subject.trained:
        print(f"no trained weights in this installation: {name} with random weights, decays set from the image's edges")
    if arguments.static is None:
        first, image = next(iter(images.items()))
        serve(subject, image, first, host=arguments.host, port=arguments.port, browser=arguments.browser)
        return 0
    write_page(subject, images, arguments.static)
    print(f"wrote {arguments.static} ({arguments.static.stat().st_size / 1e6:.1f} MB)")
    return 0


def _unique(name: str, names: Sequence[str]) -> str:
    """The stem of an image's file; its whole name where another has the same stem."""
    stem = Path(name).stem
    return name if [Path(other).stem for other in names].count(stem) > 1 else stem


def _with_prediction(subject: "Subject", source: str | Path) -> "Subject":
    """The whole segmentation model in place of its backbone, if the package of its decoder is installed."""
    try:
        from ppma.tasks.segmentation.inside import segmenter_subject
    except ModuleNotFoundError as error:
        print(f"{subject.name}: without the package {error.name!r} its prediction is not shown")
        return subject
    return segmenter_subject(subject, source)
