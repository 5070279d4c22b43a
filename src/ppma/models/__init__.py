"""Backbones, registered with timm, and weight files."""

from ppma.models import flops, variants
from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from ppma.models.config import CONFIGS, BackboneConfig
from ppma.models.inference import optimize_for_inference
from ppma.models.loading import load_checkpoint, save_checkpoint

__all__ = [
    "CONFIGS",
    "BackboneConfig",
    "Checkpoint",
    "CheckpointError",
    "PolylineBackbone",
    "flops",
    "load_checkpoint",
    "open_checkpoint",
    "optimize_for_inference",
    "save_checkpoint",
    "variants",
]
