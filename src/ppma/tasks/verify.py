"""Verification of published weights, for `ppma weights --verify`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ppma.models import CONFIGS, CheckpointError, open_checkpoint
from ppma.models.published import PUBLISHED, PublishedWeights, local_file
from ppma.models.timm_config import variant_name
from ppma.ops import checks
from ppma.progress import Progress
from ppma.tasks.registry import task_class

_SIDE = 96
_TOLERANCE = 1e-6  # of the output's norm; float64 kernels of different CPUs differ by about 1e-12


@dataclass(frozen=True)
class Verification:
    """A published model that was loaded and run.

    Attributes:
        path: of its file.
        shape: of its output.
        checksum: of its output.
        norm: of its output, the scale for differences of checksums.
        expected: the recorded checksum, None if there is none.
    """

    path: Path
    shape: tuple[int, ...]
    checksum: float
    norm: float
    expected: float | None

    @property
    def passed(self) -> bool:
        """Whether the checksum agrees with the recorded one, if there is one."""
        return self.expected is None or abs(self.checksum - self.expected) <= _TOLERANCE * self.norm


@torch.no_grad()
def verify(name: str) -> Verification:
    """Load published weights, check every name and shape, and compute a checksum of the model's output.

    Args:
        name: a key of `ppma.models.published.PUBLISHED`.

    Raises:
        CheckpointError: the file is of another model than the listed one, or does not fit.
        ConnectionError: it cannot be downloaded.
    """
    checks.one_of("NAME", name, PUBLISHED)
    entry = PUBLISHED[name]
    path = local_file(name)  # shows its own progress
    with Progress(f"verifying {name}"):
        return _verify(name, entry, path)


def _verify(name: str, entry: PublishedWeights, path: Path) -> Verification:
    checkpoint = open_checkpoint(path)
    # Dense models of a variant may have another stride than its classifier.
    backbone = checkpoint.backbone_weights()[0].replace(stem_stride=CONFIGS[entry.backbone].stem_stride)
    found = checkpoint.task, variant_name(backbone)
    if found != (entry.task, entry.backbone):
        raise CheckpointError(
            f"{name}: expected {entry.task} with {entry.backbone}, got {' with '.join(map(str, found))}"
        )
    output = task_class(checkpoint.task).probe(checkpoint, synthetic_image())
    flat = output.flatten()
    checksum = (flat * torch.arange(flat.numel(), dtype=flat.dtype).cos()).sum()
    return Verification(checkpoint.path, tuple(output.shape), checksum.item(), flat.norm().item(), entry.checksum)


def synthetic_image() -> Tensor:
    """Waves, (1, 3, 96, 96) in float64; no random generator, so that every machine has the same image."""
    rows, columns = (torch.arange(_SIDE, dtype=torch.float64) for _ in range(2))
    waves = [torch.sin((k + 1) * rows / 17)[:, None] + torch.cos((k + 2) * columns / 13) for k in range(3)]
    return torch.stack(waves)[None]
