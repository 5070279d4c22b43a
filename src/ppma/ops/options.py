"""The options of the operators."""

from typing import Literal, NamedTuple, get_args

Combine = Literal["hadamard", "logit"]
Path = Literal["v2h", "h2v"]
Paths = Literal["v2h", "h2v", "2d"]
NdPaths = Literal["forward", "reverse", "both"]
BackendName = Literal["auto", "reference", "torch", "native", "triton"]

COMBINES: tuple[Combine, ...] = get_args(Combine)
BACKEND_NAMES: tuple[BackendName, ...] = get_args(BackendName)
# The grid axes are (H, W): scanning the first axis, the columns, first is V2H.
ND_PATHS: dict[Paths, NdPaths] = {"v2h": "forward", "h2v": "reverse", "2d": "both"}


def split_paths(paths: Paths) -> tuple[Path, ...]:
    """The single paths of a 2D mask."""
    return ("v2h", "h2v") if paths == "2d" else (paths,)


def axis_orders(paths: NdPaths, axes: int) -> list[list[int]]:
    """The axes that each path of an n-dimensional mask scans, in order."""
    forward = list(range(axes))
    reverse = forward[::-1]
    return {"forward": [forward], "reverse": [reverse], "both": [forward, reverse]}[paths]


class AttentionOptions(NamedTuple):
    """How a softmax attention is masked.

    Attributes:
        combine: "hadamard" multiplies the softmax by the mask and sums the paths; "logit" adds the log mask inside one
            softmax for each path and averages the paths.
        paths: "v2h", "h2v" or "2d".
        scale: factor on the scores.
        save: the backward pass will need `stats` and `first` of the full attention; else their contents are undefined.
    """

    combine: Combine
    paths: Paths
    scale: float
    save: bool = True

    @property
    def softmaxes(self) -> int:
        """The number of softmaxes for each query."""
        return 2 if self.combine == "logit" and self.paths == "2d" else 1

    @property
    def path_weight(self) -> float:
        """The weight of a path in the output."""
        return 1 / self.softmaxes
