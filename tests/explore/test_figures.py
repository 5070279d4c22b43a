import torch

from ppma import masks
from ppma.explore import figures


def test_the_gallery_draws_what_is_computed():
    decays = figures.edge_decays(12)
    expected = figures.masks_of_query(*decays, (4, 5))
    drawn = [axis.images[0].get_array() for axis in figures.mask_gallery(12, (4, 5)).axes[:-1]]
    for values, array in zip(expected.values(), drawn, strict=True):
        torch.testing.assert_close(torch.as_tensor(array.data), values)
    dense = masks.polyline(*decays).dense().exp().mean(0)
    torch.testing.assert_close(expected["2D polyline"].flatten(), dense[4 * 12 + 5])
