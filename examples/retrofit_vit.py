"""Masked attention in a trained timm ViT: the same function at first, then decays are learned.

A small ViT is trained on the bundled 8 x 8 handwritten digits, in place of a pretrained model to download; for your own
start from `timm.create_model("vit_small_patch14_reg4_dinov2", pretrained=True, dynamic_img_size=True)`.
`python examples/retrofit_vit.py` takes seconds on a CPU.
"""

import tempfile
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppma
from ppma.data.arrays import digit_arrays

SIZES = {"patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 3}


def digits() -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8) and labels (N,), in random order."""
    images, labels = (torch.from_numpy(array) for array in digit_arrays())
    order = torch.randperm(len(images))
    return ((images.float() - 5) / 6)[order, None], labels.long()[order]  # mean 5, standard deviation 6


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int, lr: float, decay_lr: float = 0.0) -> None:
    """AdamW, with a learning rate of its own for the decay heads: they start from nothing, the rest is trained."""
    heads = [parameter for name, parameter in model.named_parameters() if ".decay." in name]
    rest = [parameter for name, parameter in model.named_parameters() if ".decay." not in name]
    groups = [{"params": rest}, {"params": heads, "lr": decay_lr, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def report(title: str, model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Print and return the loss."""
    logits = model(images)
    loss = F.cross_entropy(logits, labels).item()
    print(f"{title:28} loss {loss:.4f}  accuracy {(logits.argmax(-1) == labels).float().mean():.1%}")
    return loss


def main(pretraining: int = 150, steps: int = 60) -> dict[str, float]:
    """Train, retrofit, fine-tune, save and load; returns the loss on held-out digits after each."""
    torch.manual_seed(0)
    images, labels = digits()
    held_out, training = (images[:300], labels[:300]), (images[300:], labels[300:])
    vit = timm.create_model("vit_tiny_patch16_224", img_size=8, in_chans=1, num_classes=10, global_pool="avg", **SIZES)
    train(vit, *training, pretraining, lr=3e-3)
    losses = {"trained": report("trained ViT", vit, *held_out)}

    ppma.retrofit(vit)  # mask="2d", combine="logit", all log-decays 0
    losses["retrofitted"] = report("retrofitted, not yet tuned", vit, *held_out)
    train(vit, *training, steps, lr=5e-4, decay_lr=5e-3)
    losses["tuned"] = report(f"after {steps} steps", vit, *held_out)
    rates = torch.stack([block.attn.decay.rate for block in vit.blocks])
    print(f"{(rates > 0).float().mean():.0%} of the decay rates are positive, the largest is {rates.max():.3f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vit.safetensors")
        ppma.save_retrofit(vit, path, **SIZES)  # not needed for a model of standard sizes
        losses["loaded"] = report("saved and loaded", ppma.load_retrofit(path), *held_out)
    return losses


if __name__ == "__main__":
    main()
