"""The explorer: a web page served locally that loads nothing from the network."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported

import gradio as gr
from PIL import Image
from starlette.middleware import Middleware
from torch import Tensor

from ppma.explore import requests, view
from ppma.explore.gate import Gate
from ppma.explore.images import MAX_BYTES, read_image, sample_names, sample_path
from ppma.explore.playground_page import LATEST, playground_page
from ppma.explore.subject import Subject
from ppma.layers.attention import FORMULATIONS
from ppma.masks import KINDS

OWN = "the model's own"
FONT, MONOSPACE = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")  # installed fonts, no download
MAX_STRENGTH = 8
# One request is drawn at a time, whichever function it calls; few may wait. Handlers validate the raw values.
EVENT: dict[str, Any] = {"preprocess": False, "concurrency_id": "draw", "concurrency_limit": 1}
WAITING = 16
SESSIONS = 64  # kept; the oldest is dropped
FILES_LIVE = 3600  # seconds: uploads and drawn images


def show_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show a ValueError of a handler as a message on the page."""

    @wraps(function)
    def wrapped(*args: Any) -> Any:
        try:
            return function(*args)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None

    return wrapped


def build(subject: Subject, image: Image.Image) -> gr.Blocks:
    """Build the page.

    Args:
        subject: the model to inspect.
        image: the image shown first.
    """
    page = gr.Blocks(title="ppma explore", analytics_enabled=False, delete_cache=(FILES_LIVE, FILES_LIVE))
    with page:
        gr.Markdown(
            "## Polyline path masked attention\nClick a token of the image to see its decays, mask and attention."
        )
        with gr.Tab("Image"):
            _image_page(subject, image)
        with gr.Tab("Grid playground"):
            playground_page(show_errors, EVENT)
    return page.queue(max_size=WAITING)


def _image_page(subject: Subject, image: Image.Image) -> None:
    first = view.Choice(edges=not subject.trained)
    captures, prepared = view.CaptureCache(subject), subject.prepare(image)
    captured = captures(prepared)
    current, chosen = gr.State(prepared), gr.State(first)
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            picture = gr.Image(
                view.clickable_image(captured, first),
                label="Image: click a token",
                interactive=False,
                buttons=[],
                elem_id="picture",
            )
            samples = gr.Gallery(
                [(str(sample_path(name)), name) for name in sample_names()],
                label="Samples",
                columns=3,
                height=330,
                object_fit="cover",
                allow_preview=False,
                elem_id="samples",
            )
            upload = gr.UploadButton(
                f"Upload an image (up to {MAX_BYTES / 1e6:g} MB)", file_types=["image"], elem_id="upload"
            )
        with gr.Column(scale=3, min_width=480):
            panels = gr.Image(
                view.panels_image(captured, first), show_label=False, interactive=False, buttons=[], elem_id="panels"
            )
            said = gr.Markdown(view.describe(subject, captured, first), elem_id="said")
            controls = _controls(subject, first)
    stage, block, head, *_ = controls
    shown = [chosen, picture, panels, said]

    def show(prepared: Tensor, choice: view.Choice) -> tuple[Any, ...]:
        captured = captures(prepared)
        return (
            choice,
            view.clickable_image(captured, choice),
            view.panels_image(captured, choice),
            view.describe(subject, captured, choice),
        )

    @show_errors
    def click(prepared: Tensor, choice: view.Choice, event: gr.SelectData) -> tuple[Any, ...]:
        x, y = requests.click_position(event.index, view.PICTURE_SIDE)
        return show(prepared, replace(choice, place=(y / view.PICTURE_SIDE, x / view.PICTURE_SIDE)))

    def open_file(path: Path | str, choice: view.Choice) -> tuple[Any, ...]:
        prepared = subject.prepare(read_image(path))
        return prepared, *show(prepared, choice)

    @show_errors
    def upload_file(file: dict[str, Any], choice: view.Choice) -> tuple[Any, ...]:
        return open_file(file["path"], choice)

    @show_errors
    def pick(choice: view.Choice, event: gr.SelectData) -> tuple[Any, ...]:
        names = sample_names()
        return open_file(sample_path(names[requests.integer("sample", event.index, 0, len(names) - 1)]), choice)

    @show_errors
    def change(prepared: Tensor, choice: view.Choice, *values: Any) -> tuple[Any, ...]:
        return show(prepared, replace(choice, **_choices(subject, values)))

    @show_errors
    def fit(stage: Any) -> tuple[Any, Any]:
        """Update the choices of blocks and heads to those of the stage."""
        config = subject.model.config
        stage = requests.integer("stage", stage, 0, len(config.depths) - 1)
        return (
            gr.Dropdown(choices=_counted("block", config.depths[stage]), value=0),
            gr.Dropdown(choices=_heads(config.heads[stage]), value=-1),
        )

    picture.select(click, [current, chosen], shown, trigger_mode=LATEST, **EVENT)
    samples.select(pick, [chosen], [current, *shown], **EVENT)
    upload.upload(upload_file, [upload, chosen], [current, *shown], **EVENT)
    stage.input(fit, [stage], [block, head], **EVENT).then(change, [current, chosen, *controls], shown, **EVENT)
    for control in controls[1:]:
        event = control.release if isinstance(control, gr.Slider) else control.input
        event(change, [current, chosen, *controls], shown, trigger_mode=LATEST, **EVENT)


def _counted(word: str, count: int) -> list[tuple[str, int]]:
    return [(f"{word} {n + 1}", n) for n in range(count)]


def _heads(count: int) -> list[tuple[str, int]]:
    return [("mean over the heads", -1), *_counted("head", count)]


def _controls(subject: Subject, first: view.Choice) -> list[Any]:
    """Controls for stage, block, head, mask, formulation, decays and strength, in the order of `_choices`."""
    config = subject.model.config
    with gr.Row():
        stage = gr.Dropdown(_counted("stage", len(config.depths)), value=first.stage, label="Stage", elem_id="stage")
        block = gr.Dropdown(_counted("block", config.depths[0]), value=first.block, label="Block", elem_id="block")
        head = gr.Dropdown(_heads(config.heads[0]), value=-1, label="Head", elem_id="head")
    gr.Markdown("**What if** this attention were different? Earlier layers are unchanged.")
    with gr.Row():
        mask = gr.Dropdown([OWN, *KINDS], value=OWN, label="Mask", elem_id="mask")
        formulation = gr.Dropdown([OWN, *FORMULATIONS], value=OWN, label="Formulation", elem_id="formulation")
        source = gr.Dropdown(
            [(OWN, False), ("from the image's edges", True)], value=first.edges, label="Decays", elem_id="decays"
        )
    strength = gr.Slider(
        0, MAX_STRENGTH, value=first.strength, step=0.25, label="Strength: factor on the log-decays", elem_id="strength"
    )
    return [stage, block, head, mask, formulation, source, strength]


def _choices(subject: Subject, values: tuple[Any, ...]) -> dict[str, Any]:
    stage, block, head, mask, formulation, edges, strength = values
    config = subject.model.config
    stage = requests.integer("stage", stage, 0, len(config.depths) - 1)
    head = requests.integer("head", head, -1, config.heads[stage] - 1)
    mask = requests.choice("mask", mask, (OWN, *KINDS))
    formulation = requests.choice("formulation", formulation, (OWN, *FORMULATIONS))
    return {
        "stage": stage,
        "block": requests.integer("block", block, 0, config.depths[stage] - 1),
        "head": None if head == -1 else head,
        "mask": None if mask == OWN else mask,
        "formulation": None if formulation == OWN else formulation,
        "edges": requests.boolean("decays", edges),
        "strength": requests.number("strength", strength, 0, MAX_STRENGTH),
    }


def launch(page: gr.Blocks, *, host: str = "127.0.0.1", port: int | None = None) -> str:
    """Serve the page in the background and return its URL.

    Args:
        page: from `build`.
        host: address or name to listen on.
        port: port to listen on; None for the first free one from 7860.
    """
    if ":" in host:
        host = f"[{host.strip('[]')}]"  # IPv6 addresses are bracketed in URLs
    gate = Middleware(Gate, host=host, parse=partial(requests.parse, page), upload_bytes=MAX_BYTES)
    with _no_proxy():
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            inbrowser=False,
            prevent_thread_lock=True,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            footer_links=[],
            max_file_size=MAX_BYTES,
            state_session_capacity=SESSIONS,
            theme=gr.themes.Default(font=FONT, font_mono=MONOSPACE),
            app_kwargs={"middleware": [gate]},
        )
    return address


@contextlib.contextmanager
def _no_proxy() -> Iterator[None]:
    """Keep Gradio's health check of its own server off the environment's proxy."""
    before = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    os.environ.update(dict.fromkeys(before, "*"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def check_address(host: str, port: int) -> None:
    """Raise a ValueError unless the host is an address of this machine and the port is free."""
    if not 1 <= port <= 65535:
        raise ValueError(f"port: expected 1 to 65535, got {port}")
    bare = host.strip("[]")
    try:
        family, kind, *_, address = socket.getaddrinfo(bare or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except PermissionError:
        raise ValueError(f"port: expected one that this user may open (from 1024 on), got {port}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port: expected a free one, got {port}, which is in use on {host}") from None
        raise ValueError(f"host: expected an address of this machine, got {host!r}") from None
    except UnicodeError:
        raise ValueError(f"host: expected an address of this machine, got {host!r}") from None


def serve(subject: Subject, image: Image.Image, *, host: str, port: int) -> None:
    """Serve the page until interrupted."""
    page = build(subject, image)
    try:
        print(f"Exploring {subject.name} at {launch(page, host=host, port=port)} (Ctrl-C to stop)", flush=True)
    except OSError:
        raise ValueError(f"host, port: expected a free port of this machine, got {host}:{port}") from None
    page.block_thread()
