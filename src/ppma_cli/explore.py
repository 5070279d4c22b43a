"""`ppma explore`: a model in the browser."""

import argparse

from ppma_cli.model_options import add_subject

HELP = "look into a model in the browser: click a token, see its mask and attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to look at, and where the page is served."""
    add_subject(parser, default="ppma_tiny")
    parser.add_argument("--image", default="cat", help="a file, or a sample (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Serve the explorer until it is interrupted."""
    from ppma.explore.app import check_address, serve
    from ppma.explore.images import find_image
    from ppma.explore.subject import open_subject

    check_address(arguments.host, arguments.port)  # before a model is loaded
    subject = open_subject(arguments.checkpoint, arguments.model)
    serve(subject, find_image(arguments.image), host=arguments.host, port=arguments.port)
    return 0
