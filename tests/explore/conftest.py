"""A small model with everything in it: criss-cross and full attention, several heads."""

import pytest
import torch

from ppma.explore import subject


@pytest.fixture(scope="session")
def nano():
    """ppma_nano whose decays depend on the image, as after training (they start constant)."""
    opened = subject.from_name("ppma_nano")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in opened.model.named_parameters():
            if name.endswith("decay.weight"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return opened


@pytest.fixture(scope="session")
def image():
    """A prepared image, (3, 32, 32)."""
    return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))
