"""One stage of a backbone."""

import torch.nn.functional as F
from timm.models import checkpoint
from torch import Tensor, nn

from ppma.layers.block import PolylineBlock
from ppma.layers.chain import Chain
from ppma.layers.rope import rotary_table
from ppma.layers.stem import Downsample
from ppma.layers.together import run_together
from ppma.models.config import BackboneConfig


class Stage(Chain):
    """Downsampling (except in the first stage), then blocks.

    Args:
        config: of the whole backbone.
        index: of the stage, from 0.
        drop_paths: drop path probability of each block.
    """

    def __init__(self, config: BackboneConfig, index: int, drop_paths: list[float]) -> None:
        super().__init__()
        dim, heads = config.dims[index], config.heads[index]
        self.head_dim = dim // heads
        self.grad_checkpointing = False
        self.downsample = Downsample(config.dims[index - 1], dim) if index else nn.Identity()
        self.blocks = nn.ModuleList(
            PolylineBlock(
                dim,
                heads,
                kind=config.kinds[index],
                mask=config.mask,
                formulation=config.formulation,
                ffn_ratio=config.ffn_ratios[index],
                drop_path=drop_path,
                layer_scale=config.layer_scale[index],
                fixed_decay_span=config.fixed_decay_spans[index],
                decay_start=config.decay_start,
            )
            for drop_path in drop_paths
        )

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, H, W, C) of the stage before to (B, H', W', C') of this one.

        `valid`, a boolean image mask (B, height, width) or None, leaves out tokens without any valid pixel.
        """
        if valid is None:
            together = run_together(self.parts(), x)
            if together is not None:
                return together
        x = self.downsample(x)
        if valid is None:
            together = run_together(self.blocks, x)
            if together is not None:
                return together
        else:
            valid = F.adaptive_max_pool2d(valid[:, None].to(x.dtype), x.shape[1:3])[:, 0] > 0
        rotary = rotary_table(x.shape[1], x.shape[2], self.head_dim, x.device)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                x = checkpoint(block, x, rotary, valid)
            else:
                x = block(x, rotary, valid)
        return x

    def parts(self) -> tuple[nn.Module, ...]:
        """As `Chain.parts`, where no token is left out."""
        return self.downsample, *self.blocks
