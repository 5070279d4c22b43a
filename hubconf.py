"""`torch.hub.load(repository, "ppma_tiny")`: the models registered with timm, with timm's arguments.

torch.hub does not install packages: timm must be installed. The C++ kernels are not built; without them the models run
in plain PyTorch on a CPU.
"""

import functools
import pathlib
import sys

dependencies = ["torch", "timm"]

_SOURCE = str(pathlib.Path(__file__).parent / "src")
if _SOURCE not in sys.path:
    sys.path.insert(0, _SOURCE)

import timm  # noqa: E402

from ppma.models import CONFIGS  # noqa: E402


def _entry_point(name: str):
    create = functools.partial(timm.create_model, name)
    create.__doc__ = f"`timm.create_model({name!r}, **kwargs)`: num_classes, pretrained, features_only, mask, ..."
    return create


globals().update({name: _entry_point(name) for name in CONFIGS})
