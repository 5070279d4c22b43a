"""The figure of a segmented photograph."""

import pytest

from ppma.explore.images import find_image
from ppma.tasks.segmentation.inside import look_figure


def test_look_figure_packaged():
    figure = look_figure("upernet_ppma_nano.pets", find_image("dog"), "pet")
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:3] == ["classes", "decay α (horizontal)", "decay β (vertical)"]
    grids = [axis.images[0].get_array().shape for axis in figure.axes[1:5]]
    assert grids == [(32, 39)] * 4  # 128 x 154 pixels at stride 4
    weights = figure.axes[3].images[0].get_array()
    assert (weights.min(), weights.max()) == (-3, pytest.approx(0, abs=1e-6))


def test_look_figure_unknown_class():
    with pytest.raises(ValueError, match="wanted: expected one of 'pet', 'background', 'border', got 'dog'"):
        look_figure("upernet_ppma_nano.pets", find_image("dog"), "dog")
