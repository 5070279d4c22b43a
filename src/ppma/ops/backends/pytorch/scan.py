"""O(N) scans: the product of a line's decay matrix with x is a forward and a backward recurrence."""

import torch
from torch import Tensor

from ppma.ops.layout import compute_dtype
from ppma.ops.options import NdPaths, axis_orders


def _lines(x: Tensor, axis: int) -> Tensor:
    """(B, heads, *grid, C) -> (lines before, n, lines after, C) with the line along grid axis `axis`."""
    shape = x.shape
    before = shape[: axis + 2].numel()
    after = shape[axis + 3 : -1].numel()
    return x.reshape(before, shape[axis + 2], after, shape[-1])


def _accumulate(x: Tensor, decay: Tensor, reverse: bool) -> Tensor:
    """f[j] = decay[j] f[j-1] + x[j], or backwards r[j] = decay[j+1] r[j+1] + x[j]; no logarithm, no division."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    n = x.shape[1]
    if reverse:
        out[:, -1] = x[:, -1]
        for j in range(n - 2, -1, -1):
            torch.addcmul(x[:, j], decay[:, j + 1], out[:, j + 1], out=out[:, j])
    else:
        out[:, 0] = x[:, 0]
        for j in range(1, n):
            torch.addcmul(x[:, j], decay[:, j], out[:, j - 1], out=out[:, j])
    return out


def _line_scan(x: Tensor, decay: Tensor, axis: int) -> Tensor:
    """The decay matrices of all lines along `axis`, times x."""
    lines, decay = _lines(x, axis), _lines(decay, axis)
    out = _accumulate(lines, decay, reverse=False)
    out += _accumulate(lines, decay, reverse=True)
    return out.sub_(lines).view(x.shape)


def _line_scan_backward(grad: Tensor, x: Tensor, decay: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the log-decay.

    With both recurrences of x and of grad, d decay[m] = f_x[m-1] r_grad[m] + f_grad[m-1] r_x[m]: right at decays of
    0 and 1.
    """
    lines, grad_lines, decay_lines = _lines(x, axis), _lines(grad, axis), _lines(decay, axis)
    grad_forward = _accumulate(grad_lines, decay_lines, reverse=False)
    grad_backward = _accumulate(grad_lines, decay_lines, reverse=True)
    grad_decay = torch.zeros_like(decay_lines)
    grad_decay[:, 1:] = (
        _accumulate(lines, decay_lines, reverse=False)[:, :-1] * grad_backward[:, 1:]
        + grad_forward[:, :-1] * _accumulate(lines, decay_lines, reverse=True)[:, 1:]
    ).sum(-1, keepdim=True)
    grad_x = grad_forward.add_(grad_backward).sub_(grad_lines).view(x.shape)
    grad_decay[:, 1:] *= decay_lines[:, 1:]  # the edge outside the line may hold anything, and stays 0 here
    return grad_x, grad_decay.view(decay.shape)


def polyline_scan(x: Tensor, log_decays: list[Tensor], paths: NdPaths) -> Tensor:
    """`x` (B, heads, *grid, C), log_decays (B, heads, *grid) each -> like x."""
    dtype = compute_dtype(x.dtype)
    decays = [log_decay.exp().to(dtype).unsqueeze(-1) for log_decay in log_decays]
    total: Tensor | None = None
    for order in axis_orders(paths, len(decays)):
        y = x.to(dtype)
        for axis in order:
            y = _line_scan(y, decays[axis], axis)
        total = y if total is None else total.add_(y)
    assert total is not None
    return total.to(x.dtype)


def polyline_scan_backward(grad: Tensor, x: Tensor, log_decays: list[Tensor], paths: NdPaths) -> list[Tensor]:
    """Gradients of x and of each log-decay, recomputing the intermediate scans."""
    dtype = compute_dtype(x.dtype)
    decays = [log_decay.exp().to(dtype).unsqueeze(-1) for log_decay in log_decays]
    grad_x = torch.zeros(x.shape, dtype=dtype, device=x.device)
    grad_decays = [torch.zeros_like(decay) for decay in decays]
    for order in axis_orders(paths, len(decays)):
        inputs = [x.to(dtype)]
        for axis in order[:-1]:
            inputs.append(_line_scan(inputs[-1], decays[axis], axis))
        grad_y = grad.to(dtype)
        for axis in reversed(order):
            grad_y, grad_decay = _line_scan_backward(grad_y, inputs.pop(), decays[axis], axis)
            grad_decays[axis] += grad_decay
        grad_x += grad_y
    return [
        grad_x.to(x.dtype),
        *(g.squeeze(-1).to(log_decay.dtype) for g, log_decay in zip(grad_decays, log_decays, strict=True)),
    ]
