"""Tensors that follow from numbers alone, such as rotary tables: computed once, kept outside the model's state.

As buffers they would be cast by `model.half()` and lose what they are made of; built in every forward they would cost
a device synchronisation.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KEPT = 32  # results for each function: a few grid sizes for each stage of a model


def cached_constant(build: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the last results of `build`, whose arguments are hashable and whose result is a tensor or a tuple of them.

    While a graph is traced nothing is kept or reused: sizes may be symbolic there, and a graph should compute its
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
