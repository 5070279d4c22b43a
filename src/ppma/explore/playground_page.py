"""The grid playground as a part of the page."""

from collections.abc import Callable
from typing import Any, Literal

import gradio as gr
import torch
from PIL import Image

from ppma.explore import playground, style
from ppma.explore.paths import LINES, path_figure

START = (5, 6)
LATEST: Literal["always_last"] = "always_last"  # what happens while a picture is drawn is not lost
_FIGURE: dict[str, Any] = {"show_label": False, "interactive": False, "buttons": []}


def _table(values: torch.Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in values.tolist()]


def draw(
    alpha_rows: list[list[Any]],
    beta_rows: list[list[Any]],
    query: tuple[int, int],
    key: tuple[int, int],
    path: str,
    step: int,
) -> tuple[Image.Image, Image.Image, Image.Image, int]:
    """Paths, masks and one step of the scan for tables as a user left them; the last is the number of steps.

    Args:
        alpha_rows: decays of the horizontal edges.
        beta_rows: decays of the vertical edges.
        query: (i, j).
        key: (k, l), where the scanned x has its only 1.
        path: "v2h" or "h2v".
        step: of the scan; one past the end is the last.
    """
    alpha, beta = playground.parse_decays("alpha", alpha_rows), playground.parse_decays("beta", beta_rows)
    if alpha.shape != beta.shape:
        raise ValueError(f"beta: expected a table of {tuple(alpha.shape)} like alpha, got {tuple(beta.shape)}")
    grid = (alpha.shape[0], alpha.shape[1])
    paths = style.rendered(path_figure(query, key, grid, (alpha, beta)))
    masks = style.rendered(playground.masks_figure(playground.query_masks(alpha, beta, query), query))
    impulse = torch.zeros_like(alpha)
    impulse[key] = 1.0
    steps = playground.scan_steps(impulse, alpha, beta, path)
    chosen = steps[min(step, len(steps) - 1)]
    return paths, masks, style.rendered(playground.step_figure(chosen, largest=1.0)), len(steps)


def playground_page(tell_mistakes: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Lay the playground out in the page that is being built."""
    H, W = START
    alpha, beta = playground.preset_decays("wall", START)
    paths, masks, step_image, count = draw(_table(alpha), _table(beta), (1, 1), (3, 4), "v2h", 0)
    with gr.Row():
        rows = gr.Slider(2, playground.LARGEST, value=H, step=1, label="Rows", elem_id="rows")
        columns = gr.Slider(2, playground.LARGEST, value=W, step=1, label="Columns", elem_id="columns")
        preset = gr.Dropdown(list(playground.PRESETS), value="wall", label="Decays to start from", elem_id="preset")
    with gr.Row():
        tables = [
            gr.Dataframe(
                _table(values),
                type="array",
                datatype="number",
                interactive=True,
                static_columns=[],
                label=label,
                elem_id=name,
            )
            for values, name, label in (
                (alpha, "alpha", "α: edge to the left of each token (first column: outside the grid)"),
                (beta, "beta", "β: edge above each token (first row: outside the grid)"),
            )
        ]
    with gr.Row():
        places = [
            gr.Slider(1, extent, value=value, step=1, label=label, elem_id=label.replace(" ", "-"))
            for label, extent, value in (
                ("query row", H, 2),
                ("query column", W, 2),
                ("key row", H, 4),
                ("key column", W, 5),
            )
        ]
    with gr.Row():
        path_image = gr.Image(paths, **_FIGURE, elem_id="paths", scale=2)
        with gr.Column(scale=3):
            gr.Markdown("**The mask of the query**: what each key gives to it.")
            mask_image = gr.Image(masks, **_FIGURE, elem_id="masks")
    gr.Markdown("**The mask times x in O(N)**, x being 1 at the key: the result is what the key gives to each token.")
    with gr.Row():
        with gr.Column(scale=1, min_width=240):
            path = gr.Radio([(name.upper(), name) for name in LINES], value="v2h", label="Path", elem_id="path")
            step = gr.Slider(0, count - 1, value=0, step=1, label="Step of the scan", elem_id="step")
            with gr.Row():
                back = gr.Button("Back", size="sm", elem_id="back")
                forth = gr.Button("Next step", size="sm", elem_id="next")
        scan_image = gr.Image(step_image, **_FIGURE, elem_id="scan", scale=2)

    shown = [path_image, mask_image, scan_image, step]

    @tell_mistakes
    def redraw(*values: Any) -> tuple[Any, ...]:
        a, b, query_row, query_column, key_row, key_column, path, step = values
        *images, count = draw(
            a, b, (query_row - 1, query_column - 1), (key_row - 1, key_column - 1), path, max(int(step), 0)
        )
        return *images, gr.Slider(maximum=count - 1, value=min(max(int(step), 0), count - 1))

    def restart(rows: int, columns: int, preset: str) -> tuple[Any, ...]:
        alpha, beta = playground.preset_decays(preset, (rows, columns))
        limits = [gr.Slider(maximum=extent, value=2) for extent in (rows, columns)]
        far = [gr.Slider(maximum=extent, value=extent) for extent in (rows, columns)]
        return _table(alpha), _table(beta), *limits, *far

    inputs = [*tables, *places, path, step]
    for control in (rows, columns):
        control.release(restart, [rows, columns, preset], [*tables, *places]).then(redraw, inputs, shown)
    preset.input(restart, [rows, columns, preset], [*tables, *places]).then(redraw, inputs, shown)
    for table in tables:
        table.input(redraw, inputs, shown, trigger_mode=LATEST)
    for place in (*places, step):
        place.release(redraw, inputs, shown, trigger_mode=LATEST)
    path.input(redraw, inputs, shown, trigger_mode=LATEST)
    for button, by in ((back, -1), (forth, 1)):
        button.click(lambda value, by=by: value + by, [step], [step]).then(redraw, inputs, shown)
