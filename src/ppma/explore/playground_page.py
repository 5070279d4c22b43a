"""The grid playground: a tab of the explorer's page."""

from collections.abc import Callable
from typing import Any, Literal

import gradio as gr
import torch
from PIL import Image

from ppma.explore import playground, requests, style
from ppma.explore.paths import LINES, path_figure

START = (5, 6)
SMALLEST = 2
LAST_STEP = 4 * playground.LARGEST + 2  # of the longest scan
LATEST: Literal["always_last"] = "always_last"  # the last event during a redraw is kept
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
    """Render paths, masks and one scan step for the user's tables; also returns the number of steps.

    Args:
        alpha_rows: decays of the horizontal edges.
        beta_rows: decays of the vertical edges.
        query: (i, j).
        key: (k, l); the input of the scan is 1 there and 0 elsewhere.
        path: "v2h" or "h2v".
        step: 0-based scan step; clamped to the last one.
    """
    alpha, beta = playground.parse_decays("alpha", alpha_rows), playground.parse_decays("beta", beta_rows)
    if alpha.shape != beta.shape:
        raise ValueError(f"beta: expected a table of {tuple(alpha.shape)} like alpha, got {tuple(beta.shape)}")
    grid = (alpha.shape[0], alpha.shape[1])
    paths = style.render(path_figure(query, key, grid, (alpha, beta)))
    masks = style.render(playground.masks_figure(playground.query_masks(alpha, beta, query), query))
    impulse = torch.zeros_like(alpha)
    impulse[key] = 1.0
    steps = playground.scan_steps(impulse, alpha, beta, path)
    chosen = steps[min(step, len(steps) - 1)]
    return paths, masks, style.render(playground.step_figure(chosen, largest=1.0)), len(steps)


def playground_page(show_errors: Callable[[Callable[..., Any]], Callable[..., Any]], event: dict[str, Any]) -> None:
    """Add the playground to the page under construction.

    Args:
        show_errors: decorator that shows a ValueError on the page.
        event: options of every event, with `preprocess=False`: values are validated here.
    """
    H, W = START
    alpha, beta = playground.preset_decays("wall", START)
    paths, masks, step_image, count = draw(_table(alpha), _table(beta), (1, 1), (3, 4), "v2h", 0)
    with gr.Row():
        rows = gr.Slider(SMALLEST, playground.LARGEST, value=H, step=1, label="Rows", elem_id="rows")
        columns = gr.Slider(SMALLEST, playground.LARGEST, value=W, step=1, label="Columns", elem_id="columns")
        preset = gr.Dropdown(list(playground.PRESETS), value="wall", label="Initial decays", elem_id="preset")
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
            gr.Markdown("**The mask of the query**: the weight of each key.")
            mask_image = gr.Image(masks, **_FIGURE, elem_id="masks")
    gr.Markdown("**The mask times x in O(N)**, with x = 1 at the key: the result is the key's weight for each token.")
    with gr.Row():
        with gr.Column(scale=1, min_width=240):
            path = gr.Radio([(name.upper(), name) for name in LINES], value="v2h", label="Path", elem_id="path")
            step = gr.Slider(0, count - 1, value=0, step=1, label="Step of the scan", elem_id="step")
            with gr.Row():
                back = gr.Button("Back", size="sm", elem_id="back")
                forth = gr.Button("Next step", size="sm", elem_id="next")
        scan_image = gr.Image(step_image, **_FIGURE, elem_id="scan", scale=2)

    shown = [path_image, mask_image, scan_image, step]

    @show_errors
    def redraw(alpha: Any, beta: Any, *values: Any) -> tuple[Any, ...]:
        *tokens, path, step = values
        names = ("query row", "query column", "key row", "key column")
        rows = [requests.integer(name, value, 1, playground.LARGEST) for name, value in zip(names, tokens, strict=True)]
        query, key = (rows[0] - 1, rows[1] - 1), (rows[2] - 1, rows[3] - 1)
        step = requests.integer("step", step, 0, LAST_STEP)
        path = requests.choice("path", path, tuple(LINES))
        *images, count = draw(alpha["data"], beta["data"], query, key, path, step)
        return *images, gr.Slider(maximum=count - 1, value=min(step, count - 1))

    @show_errors
    def restart(rows: Any, columns: Any, preset: Any) -> tuple[Any, ...]:
        height = requests.integer("rows", rows, SMALLEST, playground.LARGEST)
        width = requests.integer("columns", columns, SMALLEST, playground.LARGEST)
        grid = (height, width)
        alpha, beta = playground.preset_decays(requests.choice("preset", preset, playground.PRESETS), grid)
        limits = [gr.Slider(maximum=extent, value=2) for extent in grid]
        far = [gr.Slider(maximum=extent, value=extent) for extent in grid]
        return _table(alpha), _table(beta), *limits, *far

    def move(by: int) -> Callable[..., Any]:
        @show_errors
        def moved(step: Any) -> int:
            return min(max(requests.integer("step", step, 0, LAST_STEP) + by, 0), LAST_STEP)

        return moved

    inputs = [*tables, *places, path, step]
    for control in (rows, columns):
        control.release(restart, [rows, columns, preset], [*tables, *places], **event).then(
            redraw, inputs, shown, **event
        )
    preset.input(restart, [rows, columns, preset], [*tables, *places], **event).then(redraw, inputs, shown, **event)
    for table in tables:
        table.input(redraw, inputs, shown, trigger_mode=LATEST, **event)
    for place in (*places, step):
        place.release(redraw, inputs, shown, trigger_mode=LATEST, **event)
    path.input(redraw, inputs, shown, trigger_mode=LATEST, **event)
    for button, by in ((back, -1), (forth, 1)):
        button.click(move(by), [step], [step], **event).then(redraw, inputs, shown, **event)
