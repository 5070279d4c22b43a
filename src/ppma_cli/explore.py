"""`ppma explore`: inspect a model in the browser."""

import argparse

from ppma_cli.model_options import add_subject

HELP = "inspect a model in the browser: click a token, see its mask and attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subject(parser, default="ppma_tiny")
    parser.add_argument("--image", default="cat", help="an image file or the name of a sample (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Serve the explorer until it is interrupted."""
    from ppma.explore.app import check_address, serve
    from ppma.explore.images import find_image
    from ppma.explore.subject import open_subject

    check_address(arguments.host, arguments.port)  # fail before loading a model
    subject = open_subject(arguments.checkpoint, arguments.model)
    serve(subject, find_image(arguments.image), host=arguments.host, port=arguments.port)
    return 0
