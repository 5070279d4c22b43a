"""The explorer: a page in the browser, served from here and loading nothing from elsewhere."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio as gr
from PIL import Image
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ppma.explore import view
from ppma.explore.images import MAX_BYTES, read_image, sample_names, sample_path
from ppma.explore.playground_page import LATEST, playground_page
from ppma.explore.subject import Subject
from ppma.layers.attention import FORMULATIONS
from ppma.masks import KINDS

OWN = "the model's own"
FONT, MONOSPACE = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")  # the reader's own
# The browser itself refuses whatever is not on this server, so the page works offline and tells nobody.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self' data: blob:"


class OnlyFromHere:
    """Adds the content security policy to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = POLICY
            await send(message)

        await self.app(scope, receive, with_policy)


def tell_mistakes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show a user's mistake as a message on the page."""

    @wraps(function)
    def told(*args: Any) -> Any:
        try:
            return function(*args)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None

    return told


def build(subject: Subject, image: Image.Image) -> gr.Blocks:
    """The page.

    Args:
        subject: the model to look into.
        image: shown first.
    """
    with gr.Blocks(title="ppma explore", analytics_enabled=False) as page:
        gr.Markdown("## Polyline path masked attention\nClick a token of the image; everything else follows.")
        with gr.Tab("Image"):
            _image_page(subject, image)
        with gr.Tab("Grid playground"):
            playground_page(tell_mistakes)
    return page


def _image_page(subject: Subject, image: Image.Image) -> None:
    first = view.Choice(edges=not subject.trained)
    seen = view.look(subject, image)
    looked, chosen = gr.State(seen), gr.State(first)
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            picture = gr.Image(
                view.clickable_image(seen, first),
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
                view.panels_image(seen, first), show_label=False, interactive=False, buttons=[], elem_id="panels"
            )
            said = gr.Markdown(view.describe(subject, seen, first), elem_id="said")
            controls = _controls(subject, first)
    stage, block, head, *_ = controls
    shown = [chosen, picture, panels, said]

    def show(seen: view.Look, choice: view.Choice) -> tuple[Any, ...]:
        return (
            choice,
            view.clickable_image(seen, choice),
            view.panels_image(seen, choice),
            view.describe(subject, seen, choice),
        )

    def click(seen: view.Look, choice: view.Choice, event: gr.SelectData) -> tuple[Any, ...]:
        x, y = event.index
        return show(seen, replace(choice, place=(y / view.PICTURE_SIDE, x / view.PICTURE_SIDE)))

    @tell_mistakes
    def open_file(path: str, choice: view.Choice) -> tuple[Any, ...]:
        seen = view.look(subject, read_image(path))
        return seen, *show(seen, choice)

    def pick(choice: view.Choice, event: gr.SelectData) -> tuple[Any, ...]:
        return open_file(str(sample_path(sample_names()[int(event.index)])), choice)

    @tell_mistakes
    def change(seen: view.Look, choice: view.Choice, *values: Any) -> tuple[Any, ...]:
        return show(seen, replace(choice, **_choices(values)))

    def fit(stage: int) -> tuple[Any, Any]:
        """A stage has blocks and heads of its own."""
        config = subject.model.config
        return (
            gr.Dropdown(choices=_counted("block", config.depths[stage]), value=0),
            gr.Dropdown(choices=_heads(config.heads[stage]), value=-1),
        )

    picture.select(click, [looked, chosen], shown, trigger_mode=LATEST)
    samples.select(pick, [chosen], [looked, *shown])
    upload.upload(open_file, [upload, chosen], [looked, *shown])
    stage.input(fit, [stage], [block, head]).then(change, [looked, chosen, *controls], shown)
    for control in controls[1:]:
        event = control.release if isinstance(control, gr.Slider) else control.input
        event(change, [looked, chosen, *controls], shown, trigger_mode=LATEST)


def _counted(word: str, count: int) -> list[tuple[str, int]]:
    return [(f"{word} {n + 1}", n) for n in range(count)]


def _heads(count: int) -> list[tuple[str, int]]:
    return [("mean over the heads", -1), *_counted("head", count)]


def _controls(subject: Subject, first: view.Choice) -> list[Any]:
    """Stage, block, head, mask, formulation, source of the decays, strength; in the order of `_choices`."""
    config = subject.model.config
    with gr.Row():
        stage = gr.Dropdown(_counted("stage", len(config.depths)), value=first.stage, label="Stage", elem_id="stage")
        block = gr.Dropdown(_counted("block", config.depths[0]), value=first.block, label="Block", elem_id="block")
        head = gr.Dropdown(_heads(config.heads[0]), value=-1, label="Head", elem_id="head")
    gr.Markdown("**What if** this attention were different (all before it stays as it is):")
    with gr.Row():
        mask = gr.Dropdown([OWN, *KINDS], value=OWN, label="Mask", elem_id="mask")
        formulation = gr.Dropdown([OWN, *FORMULATIONS], value=OWN, label="Formulation", elem_id="formulation")
        source = gr.Dropdown(
            [(OWN, False), ("from the image's edges", True)], value=first.edges, label="Decays", elem_id="decays"
        )
    strength = gr.Slider(
        0, 8, value=first.strength, step=0.25, label="Strength: factor on the log-decays", elem_id="strength"
    )
    return [stage, block, head, mask, formulation, source, strength]


def _choices(values: tuple[Any, ...]) -> dict[str, Any]:
    stage, block, head, mask, formulation, edges, strength = values
    return {
        "stage": stage,
        "block": block,
        "head": None if head == -1 else head,
        "mask": None if mask == OWN else mask,
        "formulation": None if formulation == OWN else formulation,
        "edges": edges,
        "strength": strength,
    }


def launch(page: gr.Blocks, *, host: str = "127.0.0.1", port: int | None = None) -> str:
    """Serve the page in the background; returns its address."""
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        inbrowser=False,
        prevent_thread_lock=True,
        ssr_mode=False,
        pwa=False,
        footer_links=[],
        max_file_size=MAX_BYTES,
        theme=gr.themes.Default(font=FONT, font_mono=MONOSPACE),
        app_kwargs={"middleware": [Middleware(OnlyFromHere)]},
    )
    return address


def serve(subject: Subject, image: Image.Image, *, host: str, port: int) -> None:
    """Serve the page until it is interrupted."""
    page = build(subject, image)
    try:
        print(f"Exploring {subject.name} at {launch(page, host=host, port=port)} (Ctrl-C ends it)")
    except OSError:
        raise ValueError(f"host, port: expected a free port of this machine, got {host}:{port}") from None
    page.block_thread()
