"""A small model that keeps its grid: masked attention between pixels, without stem and downsampling."""

from typing import Any

from torch import Tensor, nn

from ppma.layers.block import NORM_EPS
from ppma.models.checkpoints import Checkpoint, CheckpointError
from ppma.models.checkpoints.weights import build
from ppma.models.config import BackboneConfig
from ppma.models.stage import Stage
from ppma.ops import checks

GRID = BackboneConfig(
    depths=(2,),
    dims=(32,),
    heads=(2,),
    kinds=("full",),
    ffn_ratios=(2.0,),
    layer_scale=(None,),
    fixed_decay_spans=(4.0,),
)
_FIELDS = ("depths", "dims", "heads", "kinds", "ffn_ratios", "mask", "formulation", "decay_start", "fixed_decay_spans")


def grid_config(channels: int, classes: int, **changes: Any) -> BackboneConfig:
    """The configuration of a `GridModel`: one stage, of which `changes` are fields.

    Raises:
        ValueError: a field is unknown, has no meaning here or is out of range; the message names it.
    """
    for name in changes:
        checks.one_of("model argument", name, _FIELDS)
    config = GRID.replace(**changes, in_chans=channels, num_classes=classes, head_width=None)
    if len(config.depths) != 1:
        raise ValueError(f"depths: expected one entry, for the only stage, got {list(config.depths)}")
    return config


class GridModel(nn.Module):
    """A linear layer, blocks of masked attention, a norm and a linear layer, all on the grid of the input.

    Args:
        config: of `grid_config`.

    Examples:
        >>> import torch
        >>> from ppma.models.grid import GridModel, grid_config
        >>> model = GridModel(grid_config(channels=5, classes=4, mask="v2h"))
        >>> model(torch.randn(2, 5, 8, 6)).shape
        torch.Size([2, 4, 8, 6])
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config, dim = config, config.dims[0]
        self.embed = nn.Linear(config.in_chans, dim)
        self.stage = Stage(config, 0, [0.0] * config.depths[0])
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, H, W) to the scores of every pixel, (B, classes, H, W)."""
        tokens = self.stage(self.embed(images.permute(0, 2, 3, 1)))
        return self.head(self.norm(tokens)).permute(0, 3, 1, 2)


def load_grid(checkpoint: Checkpoint) -> GridModel:
    """Load a model of the regions task, in evaluation mode."""
    config = checkpoint.backbone
    if checkpoint.task != "regions" or config is None:
        raise CheckpointError(f"{checkpoint.path}: expected a model of the regions task, got {checkpoint.task}")
    return build(lambda: GridModel(config), checkpoint.contents, source=str(checkpoint.path)).eval()
