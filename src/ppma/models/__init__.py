"""The backbones of the paper, registered with timm, and their weight files."""

from ppma.models import flops, variants
from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoint import load_checkpoint, save_checkpoint
from ppma.models.config import CONFIGS, BackboneConfig
from ppma.models.files import CheckpointError
from ppma.models.inference import optimize_for_inference

__all__ = [
    "CONFIGS",
    "BackboneConfig",
    "CheckpointError",
    "PolylineBackbone",
    "flops",
    "load_checkpoint",
    "optimize_for_inference",
    "save_checkpoint",
    "variants",
]
