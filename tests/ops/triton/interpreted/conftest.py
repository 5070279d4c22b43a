"""Runs the kernels in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/ops/triton/interpreted/check_*.py`.

The interpreter spends most of its time on two things that change no result: it patches the language again for every
call of a device function, and it applies a scan's operator element by element. Both are shortened here. Its products
are replaced by ones whose bits do not depend on the CPU.
"""

import os

import numpy as np
import pytest
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _call_device_function(self, *args, **kwargs):
    module = id(self.fn.__globals__)
    if module not in _prepared:
        _prepared.add(module)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def _dot_in_order(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Sums each product in ascending order; `a @ b` and its transpose, computed from the transposes, are the same bits.

    NumPy's product promises neither: on some CPUs its library sums `k @ q^T` in another order than `q @ k^T`, and the
    backward pass would recompute other scores than the forward pass, which no kernel is to blame for.
    """
    result = np.zeros(d.data.shape, d.data.dtype)
    for k in range(a.data.shape[-1]):
        result += a.data[..., :, k : k + 1].astype(result.dtype) * b.data[..., k : k + 1, :].astype(result.dtype)
    return interpreter.TensorHandle(result + d.data, d.dtype.scalar)


def _scan_by_slices(self, inputs):
    lines = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in inputs]
    results = [np.empty_like(line) for line in lines]
    state = None
    for position in range(lines[0].shape[0]):
        item = [
            self.to_tensor(np.ascontiguousarray(line[position]), tensor.dtype)
            for line, tensor in zip(lines, inputs, strict=True)
        ]
        state = item if state is None else self.combine_fn.fn(*state, *item)
        for result, value in zip(results, state, strict=True):
            result[position] = value.handle.data
    return [
        self.to_tensor(np.ascontiguousarray(np.moveaxis(result, 0, self.axis)), tensor.dtype)
        for result, tensor in zip(results, inputs, strict=True)
    ]


_prepared: set[int] = set()
_slow_scan = interpreter.ScanOps.generic_scan
if INTERPRETED:
    interpreter.InterpretedFunction.__call__ = _call_device_function
    interpreter.ScanOps.generic_scan = _scan_by_slices
    interpreter.InterpreterBuilder.create_dot = _dot_in_order


@pytest.fixture
def triton_scan(monkeypatch):
    """The interpreter's own scan."""
    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", _slow_scan)
