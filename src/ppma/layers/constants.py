"""Constant tensors such as rotary tables: computed once, cached outside the state of the model.

As buffers they would lose precision in `model.half()`; built in every forward pass they would cost a device
synchronisation.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KEPT = 32  # results for each function: a few grid sizes for each stage of a model


def cached_constant(build: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the last results of `build`: a tensor or a tuple of tensors, from hashable arguments.

    The cache is not used while a graph is captured: sizes may be symbolic there, and a graph should compute its
    constants from its own sizes.
    """
    kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    @functools.wraps(build)
    def get(*key: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return build(*key)
        if key in kept:
            kept.move_to_end(key)
            return kept[key]
        with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could never train
            value = build(*key)
        if all(type(tensor) is Tensor for tensor in (value if isinstance(value, tuple) else (value,))):
            kept[key] = value  # plain tensors only: a fake tensor must not outlive its mode
            while len(kept) > KEPT:
                kept.popitem(last=False)
        return value

    return get
