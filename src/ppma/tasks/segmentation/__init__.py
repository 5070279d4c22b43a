"""Semantic segmentation: UPerNet on images with label maps."""

from ppma.tasks.segmentation.model import DecoderConfig, UPerNet, upernet

__all__ = ["DecoderConfig", "UPerNet", "upernet"]
