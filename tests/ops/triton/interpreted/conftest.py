"""Runs the kernels in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/ops/triton/interpreted/check_*.py`.

The interpreter spends most of its time on two things that change no result: it patches the language again for every
call of a device function, and it applies a scan's operator element by element. Both are shortened here.
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


@pytest.fixture
def triton_scan(monkeypatch):
    """The interpreter's own scan."""
    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", _slow_scan)
