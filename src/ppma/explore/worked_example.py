"""The paper's 4 x 4 example as text: one path, the mask of one query, and the cost of multiplying by the mask."""

import torch
from torch import Tensor

from ppma.explore.paths import path_tokens
from ppma.measure import costs
from ppma.ops import polyline_mask, polyline_scan, reference

SIDE = 4


def example_decays() -> tuple[Tensor, Tensor]:
    """Alpha and beta of the example, (4, 4) each: weak decay except for one column and one row of strong edges."""
    alpha = torch.full((SIDE, SIDE), 0.9, dtype=torch.float64)
    beta = torch.full((SIDE, SIDE), 0.8, dtype=torch.float64)
    alpha[:, 2] = 0.3
    beta[3, :] = 0.5
    return alpha, beta


def draw_path(query: tuple[int, int], key: tuple[int, int]) -> str:
    """Draw the V2H path on the grid: Q query, K key, * tokens in between."""
    on_path = path_tokens(query, key, "v2h")
    marks = {query: "Q", key: "K"}
    return "\n".join(
        "  " + " ".join(marks.get((r, c), "*" if (r, c) in on_path else ".") for c in range(SIDE)) for r in range(SIDE)
    )


def draw_grid(values: Tensor) -> str:
    """Format a (4, 4) tensor as aligned numbers."""
    return "\n".join("  " + " ".join(f"{value:.3f}" for value in row) for row in values.tolist())


def worked_example() -> str:
    """The complete example."""
    alpha, beta = example_decays()
    query, key = (0, 0), (3, 3)
    row, column = reference.path_v2h(alpha, beta, query, key)
    weights = [*row.tolist(), *column.tolist()]
    mask = polyline_mask(alpha.log(), beta.log(), paths="v2h")
    both = polyline_mask(alpha.log(), beta.log())
    x = torch.arange(SIDE * SIDE, dtype=torch.float64).view(SIDE, SIDE, 1)
    scanned = polyline_scan(x, alpha.log(), beta.log())
    dense = (both @ x.flatten(0, 1)).view_as(scanned)
    return "\n".join(
        [
            "The V2H path from key (4,4) to query (1,1): along the key's column, then along the query's row.",
            draw_path(query, key),
            "",
            "  a12 a13 a14 b24 b34 b44 = " + " x ".join(f"{w:g}" for w in weights) + f" = {mask[0, -1]:.5f}",
            "",
            "The mask of query (1,1), V2H + H2V (alpha drops at column 3, beta at row 4):",
            draw_grid(both[0].view(SIDE, SIDE)),
            "",
            f"Mask times x = 0 .. 15, dense and by scans, differ by at most {(scanned - dense).abs().max():.1e}.",
            "",
            "Multiplications counted while each method runs:",
            costs.table(),
        ]
    )
