"""Polyline attention on a video: tokens in time, height and width, and a mask with decays along all three.

Three handwritten digits overlap in 6 frames of 16 x 16 pixels; one of them drifts, the others are static. The task is
to predict for each token (2 x 2 pixels of a frame) whether it shows the drifting digit, which a single frame does not
reveal. The model is a small video transformer with linear attention, `((q k^T) * mask) v`, and the 3D polyline path
mask: each token has three decays, and the mask between two tokens is the product of the decays along a path that
follows one axis after the other. By Theorem 3 of the paper this is one `ppma.polyline_scan_nd` of the outer products of
keys and values, O(N) for N tokens.

`python examples/video_3d.py` trains the same model with and without the mask and prints how well each finds the
drifting digit in videos of held-out digits. It takes about a minute on two CPU cores.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppma
from ppma.data.arrays import digit_arrays

FRAMES, SIDE, PATCH, DIGIT = 6, 16, 2, 8
GRID = (FRAMES, SIDE // PATCH, SIDE // PATCH)
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))  # pixels down and right, each frame


def linear_attention_3d(q: Tensor, k: Tensor, v: Tensor, log_decays: Sequence[Tensor] | None) -> Tensor:
    """A weighted mean of v with weights `(q k^T) * mask`, without an N x N matrix.

    Args:
        q: (B, heads, T, H, W, d), > 0.
        k: (B, heads, T, H, W, d), > 0.
        v: (B, heads, T, H, W, dv).
        log_decays: one (B, heads, T, H, W) for time, height and width, <= 0; None for no mask.

    Returns:
        (B, heads, T, H, W, dv).
    """
    v = torch.cat((v, torch.ones_like(v[..., :1])), -1)  # the last channel sums the weights
    outer = (k[..., :, None] * v[..., None, :]).flatten(-2)
    mixed = outer.sum((2, 3, 4), keepdim=True) if log_decays is None else ppma.polyline_scan_nd(outer, log_decays)
    out = (q[..., :, None] * mixed.unflatten(-1, (k.shape[-1], -1))).sum(-2)
    return out[..., :-1] / out[..., -1:]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, masked: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.decay = nn.Linear(dim, 3 * heads) if masked else None
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T, H, W, dim) to the same shape."""
        tokens = self.norm1(x)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).movedim((-3, -2), (0, 2))
        log_decays = None
        if self.decay is not None:  # three per token and head
            log_decays = list(-F.softplus(self.decay(tokens)).unflatten(-1, (3, self.heads)).movedim((-2, -1), (0, 2)))
        out = linear_attention_3d(F.elu(q) + 1, F.elu(k) + 1, v, log_decays)
        x = x + self.proj(out.movedim(1, -2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class VideoTransformer(nn.Module):
    def __init__(self, masked: bool, dim: int = 24, heads: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, dim)
        self.positions = nn.ParameterList(
            nn.Parameter(0.1 * torch.randn([size if axis == own else 1 for own in range(3)] + [dim]))
            for axis, size in enumerate(GRID)
        )
        self.blocks = nn.Sequential(*(Block(dim, heads, masked) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1)

    def forward(self, video: Tensor) -> Tensor:
        """Videos (B, T, 16, 16) to one logit per token, (B, T, 8, 8): > 0 where something moves."""
        tokens = self.embed(patches(video)) + sum(self.positions)
        return self.head(self.norm(self.blocks(tokens))).squeeze(-1)


def patches(video: Tensor) -> Tensor:
    """Split into tokens of 2 x 2 pixels, (..., 16, 16) to (..., 8, 8, 4)."""
    return video.unflatten(-1, (-1, PATCH)).unflatten(-3, (-1, PATCH)).movedim(-3, -2).flatten(-2)


def make_videos(digits: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Videos (count, T, 16, 16) in 0..1 of digits (n, 8, 8), and where the drifting one is, (count, T, 8, 8)."""
    chosen = digits[torch.randint(len(digits), (count, 3), generator=generator)]
    planes = F.pad(chosen, (0, SIDE - DIGIT, 0, SIDE - DIGIT))
    places = torch.randint(SIDE, (count, 3, 2), generator=generator).tolist()
    steps = torch.randint(len(STEPS), (count,), generator=generator).tolist()
    still, moving = torch.empty(count, 1, SIDE, SIDE), torch.empty(count, FRAMES, SIDE, SIDE)
    for video in range(count):
        # Digits wrap around at the borders.
        first, *others = (plane.roll(place, (0, 1)) for plane, place in zip(planes[video], places[video], strict=True))
        still[video] = torch.maximum(*others)
        down, right = STEPS[steps[video]]
        for time in range(FRAMES):
            moving[video, time] = first.roll((time * down, time * right), (0, 1))
    return torch.maximum(still, moving), (patches(moving).mean(-1) > 0.25).float()


class Result(NamedTuple):
    losses: list[float]
    overlap: float  # intersection over union of predicted and true tokens


def train(masked: bool, steps: int, batch: int, test: int) -> Result:
    """Train one model and evaluate it on videos of held-out digits."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    digits = torch.from_numpy(digit_arrays()[0]).float() / 255
    model = VideoTransformer(masked)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    losses = []
    for _ in range(steps):
        video, moves = make_videos(digits[300:], batch, generator)
        loss = F.binary_cross_entropy_with_logits(model(video), moves)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    video, moves = make_videos(digits[:300], test, generator)
    with torch.no_grad():
        found = model(video) > 0
    both, either = (found & moves.bool()).sum(), (found | moves.bool()).sum()
    return Result(losses, (both / either).item())


def main(arguments: Sequence[str] | None = None) -> dict[bool, Result]:
    """Train with and without the mask; returns the result of each."""
    parser = argparse.ArgumentParser(description="3D polyline attention on toy videos")
    parser.add_argument("--steps", type=int, default=200, help="training steps per model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="videos per step (default: %(default)s)")
    parser.add_argument("--test", type=int, default=100, help="videos to evaluate on (default: %(default)s)")
    options = parser.parse_args(arguments)
    results = {}
    for masked in (True, False):
        results[masked] = train(masked, options.steps, options.batch, options.test)
        losses, overlap = results[masked]
        last = sum(losses[-10:]) / len(losses[-10:])
        name = "3D polyline mask" if masked else "no mask"
        print(
            f"{name:16}  loss {losses[0]:.3f} -> {last:.3f}  overlap with the drifting digit {overlap:.1%}", flush=True
        )
    return results


if __name__ == "__main__":
    main()
