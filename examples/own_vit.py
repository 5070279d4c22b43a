"""A plain ViT with a class token and polyline path masked attention, trained for a hundred steps on digits.

Each pixel of the bundled 8 x 8 handwritten digits is a token. `python examples/own_vit.py` takes seconds on a CPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppma.data.arrays import digit_arrays
from ppma.layers import PolylineAttention

GRID = (8, 8)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = PolylineAttention(dim, heads, mask="2d")  # was: nn.MultiheadAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens), grid=GRID)  # the class token precedes the grid
        return tokens + self.mlp(self.norm2(tokens))


class ViT(nn.Module):
    def __init__(self, classes: int, dim: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(1, dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, GRID[0] * GRID[1], dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Images (B, 8, 8) to class scores."""
        tokens = self.embed(image.flatten(1)[..., None]) * self.positions
        tokens = torch.cat((self.class_token.expand(len(image), -1, -1), tokens), 1)
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


def main(steps: int = 100, batch: int = 32) -> float:
    """Train; returns the accuracy on held-out digits."""
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in digit_arrays())
    images, labels = images.float() / images.max(), labels.long()
    order = torch.randperm(len(images))
    train, test = order[300:], order[:300]
    model = ViT(classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        chosen = train[torch.randint(len(train), (batch,))]
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(-1) == labels[test]).float().mean().item()
    print(f"accuracy on held-out digits: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
