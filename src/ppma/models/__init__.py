"""Backbones, registered with timm, and weight files."""

from ppma.models import export, flops, variants
from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from ppma.models.config import CONFIGS, BackboneConfig
from ppma.models.inference import optimize_for_inference
from ppma.models.loading import load_checkpoint, save_checkpoint
from ppma.models.retrofitting import RetrofitConfig, load_retrofit, retrofit, save_retrofit

__all__ = [
    "CONFIGS",
    "BackboneConfig",
    "Checkpoint",
    "CheckpointError",
    "PolylineBackbone",
    "RetrofitConfig",
    "export",
    "flops",
    "load_checkpoint",
    "load_retrofit",
    "open_checkpoint",
    "optimize_for_inference",
    "retrofit",
    "save_checkpoint",
    "save_retrofit",
    "variants",
]
