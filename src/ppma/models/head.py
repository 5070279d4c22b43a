"""The classifier head."""

from torch import Tensor, nn

from ppma.layers.convolution import ChannelLastBatchNorm, linear


class ClassifierHead(nn.Module):
    """Linear, batch norm, SiLU, global average pool, linear.

    Args:
        dim: channels of the last stage.
        width: output channels of the first linear layer; None leaves out the first three layers.
        num_classes: number of classes; 0 returns the input of the classifier.
        global_pool: "avg", or "" for no pooling.
        drop_rate: dropout before the classifier.
    """

    def __init__(self, dim: int, width: int | None, num_classes: int, global_pool: str, drop_rate: float) -> None:
        super().__init__()
        self.num_features = width or dim
        self.widen = (
            nn.Identity()
            if width is None
            else nn.Sequential(linear(dim, width), ChannelLastBatchNorm(width), nn.SiLU())
        )
        self.drop = nn.Dropout(drop_rate)
        self.reset(num_classes, global_pool)

    def reset(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, and the pooling unless None."""
        if global_pool is not None:
            self.global_pool = global_pool
        self.fc = linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, H, W, dim) to (B, num_classes), or (B, H, W, num_classes) without pooling."""
        x = self.widen(x)
        if self.global_pool == "avg":
            x = x.mean((1, 2))
        x = self.drop(x)
        return x if pre_logits else self.fc(x)
