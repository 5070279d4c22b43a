"""Semantic segmentation: UPerNet on data in ADE20K's layout."""

from ppma.tasks.segmentation.model import DecoderConfig, UPerNet, upernet

__all__ = ["DecoderConfig", "UPerNet", "upernet"]
