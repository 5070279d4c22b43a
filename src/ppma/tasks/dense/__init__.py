"""Shared by detection and segmentation: backbones with four feature maps, weight files, cost, drawings."""
