"""The released model, written out from its description with plain functions on the authors' state dict.

Slow, and independent of everything under `ppma`: masks are products along paths taken edge by edge, attentions are
dense. It also makes random weights in the authors' layout, which stand in for their files.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Architecture:
    depths: tuple[int, ...]
    dims: tuple[int, ...]
    heads: tuple[int, ...]
    ratios: tuple[int, ...]
    full: tuple[bool, ...]
    scaled: tuple[bool, ...] = (False, False, False, False)
    mask: str = "2d"
    spans: tuple[int, ...] = (4, 4, 6, 6)


TINY = Architecture((2, 2, 8, 2), (64, 128, 256, 512), (4, 4, 8, 16), (3, 3, 3, 3), (False, False, True, True))
SMALL = Architecture((3, 4, 18, 4), (64, 128, 256, 512), (4, 4, 8, 16), (4, 4, 3, 3), (False, False, False, True))
BASE = Architecture(
    (4, 8, 25, 8),
    (80, 160, 320, 512),
    (5, 5, 10, 16),
    (4, 4, 3, 3),
    (False, False, False, True),
    (False, False, True, True),
    spans=(5, 5, 6, 6),
)


def random_weights(arch: Architecture, *, classes: int = 1000, task: str = "classification", seed: int = 0) -> dict:
    """Random weights in the authors' layout, such that every part of the network matters to the output."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    def linear(name: str, fan_in: int, fan_out: int, bias: bool = True, gain: float = 1.0) -> None:
        state[f"{name}.weight"] = normal(fan_out, fan_in, std=gain * fan_in**-0.5)
        if bias:
            state[f"{name}.bias"] = normal(fan_out, std=0.1)

    def conv(name: str, fan_in: int, fan_out: int, kernel: int, gain: float = 1.0) -> None:
        std = gain * (fan_in * kernel * kernel) ** -0.5
        state[f"{name}.weight"] = normal(fan_out, fan_in, kernel, kernel, std=std)
        state[f"{name}.bias"] = normal(fan_out, std=0.1)

    def layer_norm(name: str, dim: int) -> None:
        state[f"{name}.weight"] = 1 + normal(dim, std=0.1)
        state[f"{name}.bias"] = normal(dim, std=0.1)

    def batch_norm(name: str, dim: int) -> None:
        layer_norm(name, dim)
        state[f"{name}.running_mean"] = normal(dim, std=0.1)
        state[f"{name}.running_var"] = 1 + torch.rand(dim, generator=generator)
        state[f"{name}.num_batches_tracked"] = torch.tensor(7)

    first, half = arch.dims[0], arch.dims[0] // 2
    for index, (fan_in, fan_out) in enumerate(((3, half), (half, half), (half, first), (first, first))):
        conv(f"patch_embed.proj.{3 * index}", fan_in, fan_out, 3)
        batch_norm(f"patch_embed.proj.{3 * index + 1}", fan_out)
    for s, (depth, dim, heads, ratio) in enumerate(zip(arch.depths, arch.dims, arch.heads, arch.ratios, strict=True)):
        head_dim = dim // heads
        angle = 1.0 / (10000 ** torch.linspace(0, 1, head_dim // 2))
        state[f"layers.{s}.Relpos.angle"] = angle.repeat_interleave(2)
        if arch.mask == "rmt":
            state[f"layers.{s}.Relpos.decay"] = fixed_log_decay(heads, arch.spans[s])
        for b in range(depth):
            name = f"layers.{s}.blocks.{b}"
            conv(f"{name}.pos.conv", 1, dim, 3, gain=0.2)
            layer_norm(f"{name}.retention_layer_norm", dim)
            for which in ("q_proj", "k_proj", "v_proj"):
                linear(f"{name}.retention.{which}", dim, dim)
            linear(f"{name}.retention.out_proj", dim, dim, gain=0.2)  # else the residual sum grows with the depth
            conv(f"{name}.retention.lepe.conv", 1, dim, 5)
            if arch.mask == "2d":
                linear(f"{name}.retention.path_embed.dt_linear", head_dim, 2, bias=False)
                state[f"{name}.retention.path_embed.dt_bias"] = normal(heads, std=1.0) - 2
                state[f"{name}.retention.path_embed.A_log"] = normal(heads, std=0.3)
            layer_norm(f"{name}.final_layer_norm", dim)
            linear(f"{name}.ffn.fc1", dim, ratio * dim)
            linear(f"{name}.ffn.fc2", ratio * dim, dim, gain=0.2)
            conv(f"{name}.ffn.dwconv.conv", 1, ratio * dim, 3)
            if arch.scaled[s]:
                state[f"{name}.gamma_1"] = normal(1, 1, 1, dim, std=0.5)
                state[f"{name}.gamma_2"] = normal(1, 1, 1, dim, std=0.5)
        if s < 3:
            conv(f"layers.{s}.downsample.reduction", dim, arch.dims[s + 1], 3)
            batch_norm(f"layers.{s}.downsample.norm", arch.dims[s + 1])
    if task == "classification":
        linear("proj", arch.dims[-1], 1024)
        batch_norm("norm", 1024)
        linear("head", 1024, classes)
    else:
        for s, dim in enumerate(arch.dims):
            layer_norm(f"outnorm{s}", dim)
    return state


def fixed_log_decay(heads: int, span: float) -> Tensor:
    return torch.tensor([math.log(1 - 2 ** -(2 + span * h / heads)) for h in range(heads)])


class ReleasedModel:
    """The forward pass, in the dtype of the weights, evaluation mode."""

    def __init__(self, state: dict[str, Tensor], arch: Architecture) -> None:
        self.state, self.arch = state, arch

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.state[f"{name}.weight"].T
        return y + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else y

    def conv(self, name: str, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        """On (B, H, W, C)."""
        weight = self.state[f"{name}.weight"]
        y = F.conv2d(
            x.permute(0, 3, 1, 2),
            weight,
            self.state[f"{name}.bias"],
            stride=stride,
            padding=weight.shape[-1] // 2,
            groups=groups,
        )
        return y.permute(0, 2, 3, 1)

    def batch_norm(self, name: str, x: Tensor) -> Tensor:
        mean, var = self.state[f"{name}.running_mean"], self.state[f"{name}.running_var"]
        return (x - mean) / torch.sqrt(var + 1e-5) * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def layer_norm(self, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + eps) * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def rotate(self, stage: int, x: Tensor) -> Tensor:
        """X (B, heads, H, W, d), by the raster index."""
        H, W, d = x.shape[-3:]
        # Positions and angles are multiplied in float32, as in the release, whatever the precision of the rest.
        angle = self.state[f"layers.{stage}.Relpos.angle"].float()
        theta = (torch.arange(H * W, dtype=torch.float32)[:, None] * angle).view(H, W, d)
        turned = torch.empty_like(x)
        turned[..., 0::2], turned[..., 1::2] = -x[..., 1::2], x[..., 0::2]
        return x * theta.cos().to(x) + turned * theta.sin().to(x)

    def log_decays(self, stage: int, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, heads, H, W) each, for x (B, H, W, C)."""
        B, H, W, C = x.shape
        heads = self.arch.heads[stage]
        if self.arch.mask == "rmt":
            decay = self.state[f"layers.{stage}.Relpos.decay"].to(x)[None, :, None, None].expand(B, heads, H, W)
            return decay, decay
        if self.arch.mask == "none":
            return x.new_zeros(B, heads, H, W), x.new_zeros(B, heads, H, W)
        per_head = x.view(B, H, W, heads, C // heads).permute(0, 3, 1, 2, 4)
        logits = self.linear(f"{name}.path_embed.dt_linear", per_head)
        bias = self.state[f"{name}.path_embed.dt_bias"].view(1, heads, 1, 1, 1)
        rate = self.state[f"{name}.path_embed.A_log"].exp().view(1, heads, 1, 1, 1)
        log_decay = -rate * torch.log1p(torch.exp(logits + bias))
        return log_decay[..., 0], log_decay[..., 1]

    @staticmethod
    def line_mask(log_decay: Tensor) -> Tensor:
        """Log mask within a line: (..., n) to (..., n, n), the sum of the edges between two positions."""
        n = log_decay.shape[-1]
        mask = torch.zeros(*log_decay.shape, n, dtype=log_decay.dtype)
        for a in range(n):
            for b in range(n):
                mask[..., a, b] = log_decay[..., min(a, b) + 1 : max(a, b) + 1].sum(-1)
        return mask

    def attention(self, stage: int, name: str, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        heads = self.arch.heads[stage]
        d = C // heads

        def split(t: Tensor) -> Tensor:
            return t.view(B, H, W, heads, d).permute(0, 3, 1, 2, 4)

        q = self.rotate(stage, split(self.linear(f"{name}.q_proj", x)))
        k = self.rotate(stage, split(self.linear(f"{name}.k_proj", x) * d**-0.5))
        values = self.linear(f"{name}.v_proj", x)
        v = split(values)
        log_alpha, log_beta = self.log_decays(stage, name, x)
        rows = self.line_mask(log_alpha)  # (B, heads, H, W, W)
        columns = self.line_mask(log_beta.transpose(-1, -2))  # (B, heads, W, H, H)
        attend = self.full if self.arch.full[stage] else self.criss_cross
        out = attend(q, k, v, rows, columns).permute(0, 2, 3, 1, 4).reshape(B, H, W, C)
        out = out + self.conv(f"{name}.lepe.conv", values, groups=C)
        return self.linear(f"{name}.out_proj", out)

    def full(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        H, W = q.shape[2:4]
        scores = q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2)
        # [i, j, k, l] = row(i)[j, l] + col(l)[i, k]
        v2h = rows[:, :, :, :, None, :] + columns.permute(0, 1, 3, 4, 2)[:, :, :, None, :, :]
        v2h = v2h.reshape(scores.shape)
        paths = [v2h, v2h.transpose(-1, -2)] if self.arch.mask == "2d" else [v2h]
        outs = [torch.softmax(scores + path, -1) @ v.flatten(2, 3) for path in paths]
        return (sum(outs) / len(outs)).view(*v.shape[:2], H, W, -1)

    def criss_cross(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        def swap(t: Tensor) -> Tensor:
            return t.transpose(2, 3)

        row_map = torch.softmax(q @ k.transpose(-1, -2) + rows, -1)
        column_map = torch.softmax(swap(q) @ swap(k).transpose(-1, -2) + columns, -1)
        h2v = swap(column_map @ swap(row_map @ v))
        if self.arch.mask != "2d":
            return h2v
        return 0.5 * (h2v + row_map @ swap(column_map @ swap(v)))

    def block(self, stage: int, name: str, x: Tensor) -> Tensor:
        gamma_1, gamma_2 = self.state.get(f"{name}.gamma_1", 1), self.state.get(f"{name}.gamma_2", 1)
        x = x + self.conv(f"{name}.pos.conv", x, groups=x.shape[-1])
        normed = self.layer_norm(f"{name}.retention_layer_norm", x)
        x = x + gamma_1 * self.attention(stage, f"{name}.retention", normed)
        hidden = F.gelu(self.linear(f"{name}.ffn.fc1", self.layer_norm(f"{name}.final_layer_norm", x)))
        hidden = hidden + self.conv(f"{name}.ffn.dwconv.conv", hidden, groups=hidden.shape[-1])
        return x + gamma_2 * self.linear(f"{name}.ffn.fc2", hidden)

    def stages(self, image: Tensor) -> list[Tensor]:
        """The features of the four stages, before the downsample, (B, H, W, C)."""
        x = image.permute(0, 2, 3, 1)
        for index, stride in ((0, 2), (3, 1), (6, 2), (9, 1)):
            if index:
                x = F.gelu(x)
            x = self.batch_norm(f"patch_embed.proj.{index + 1}", self.conv(f"patch_embed.proj.{index}", x, stride))
        features = []
        for stage, depth in enumerate(self.arch.depths):
            for b in range(depth):
                x = self.block(stage, f"layers.{stage}.blocks.{b}", x)
            features.append(x)
            if stage < 3:
                name = f"layers.{stage}.downsample"
                x = self.batch_norm(f"{name}.norm", self.conv(f"{name}.reduction", x, 2))
        return features

    def normed_features(self, image: Tensor) -> list[Tensor]:
        """The features of a detection or segmentation backbone, (B, C, H, W)."""
        features = self.stages(image)
        return [self.layer_norm(f"outnorm{s}", x, eps=1e-5).permute(0, 3, 1, 2) for s, x in enumerate(features)]

    def logits(self, image: Tensor) -> Tensor:
        x = self.batch_norm("norm", self.linear("proj", self.stages(image)[-1]))
        return self.linear("head", (x * torch.sigmoid(x)).mean((1, 2)))
