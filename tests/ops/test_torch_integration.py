"""The operators inside PyTorch: gradcheck, opcheck, compile, export, autocast, vmap."""

import pytest
import torch
from torch.export import Dim

import ppma

SOFTMAX = [
    pytest.param(function, combine, id=f"{function.__name__}-{combine}")
    for function in (ppma.polyline_attention, ppma.criss_cross_attention)
    for combine in ("hadamard", "logit")
]


def inputs(batch=2, heads=2, grid=(3, 4), d=4, dv=3, dtype=torch.float32, requires_grad=False):
    torch.manual_seed(0)
    shape = (batch, heads, *grid)
    tensors = [torch.randn(*shape, d, dtype=dtype) for _ in range(2)] + [torch.randn(*shape, dv, dtype=dtype)]
    tensors += [-torch.rand(shape, dtype=dtype) for _ in range(2)]
    return [tensor.requires_grad_(requires_grad) for tensor in tensors]


def everything(q, k, v, log_alpha, log_beta):
    """All public functions in one expression."""
    out = ppma.polyline_attention(q, k, v, log_alpha, log_beta)
    out = out + ppma.polyline_attention(q, k, v, log_alpha, log_beta, combine="logit", paths="v2h")
    out = out + ppma.criss_cross_attention(q, k, v, log_alpha, log_beta, combine="logit")
    out = out + ppma.linear_attention(q, k, v, log_alpha, log_beta)
    out = out + ppma.polyline_scan(v, log_alpha, log_beta)
    flat = ppma.polyline_mask(log_alpha, log_beta) @ v.flatten(-3, -2)
    return out + flat.view(v.shape)


def test_gradcheck_softmax_attentions():
    for function in (ppma.polyline_attention, ppma.criss_cross_attention):
        for combine in ("hadamard", "logit"):
            tensors = inputs(batch=1, grid=(2, 3), d=2, dv=2, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(lambda *t, f=function, c=combine: f(*t, combine=c), tensors)


def test_gradcheck_linear_attentions():
    tensors = inputs(batch=1, grid=(2, 3), d=2, dv=2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ppma.linear_attention, tensors)
    assert torch.autograd.gradcheck(ppma.decomposed_attention, tensors)


@pytest.mark.parametrize("log", [False, True])
def test_gradcheck_masks(log):
    *_, log_alpha, log_beta = inputs(batch=1, grid=(3, 2), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ppma.polyline_mask(a, b, log=log), (log_alpha, log_beta))
    assert torch.autograd.gradcheck(lambda a, b: ppma.polyline_mask_nd([a, b], log=log), (log_alpha, log_beta))


def test_gradcheck_scans():
    _, _, x, log_alpha, log_beta = inputs(batch=1, grid=(3, 2), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ppma.polyline_scan, (x, log_alpha, log_beta))
    assert torch.autograd.gradcheck(lambda x, a, b: ppma.polyline_scan_nd(x, [a, b]), (x, log_alpha, log_beta))


def test_gradients_decay_1():
    """Ties: finite differences around log-decays of exactly 0 agree with the positional signs."""
    q, k, v, log_alpha, log_beta = inputs(batch=1, grid=(2, 3), d=2, dv=2, dtype=torch.float64)
    decays = [torch.zeros_like(t).requires_grad_() for t in (log_alpha, log_beta)]
    for function in (ppma.polyline_attention, ppma.criss_cross_attention, ppma.linear_attention):
        assert torch.autograd.gradcheck(lambda a, b, f=function: f(q, k, v, a, b), decays)
    assert torch.autograd.gradcheck(ppma.polyline_mask, decays)


@pytest.mark.parametrize("paths", ["v2h", "2d"])
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_opcheck_softmax_attentions(combine, paths):
    q, k, v, log_alpha, log_beta = inputs(requires_grad=True)
    # A view whose heads are not the second axis in memory, as a fused projection gives it.
    q = torch.randn(2, 3, 4, 2, 4).movedim(3, 1).requires_grad_()
    args = (q, k, v, log_alpha, log_beta)
    torch.library.opcheck(torch.ops.ppma.polyline_attention.default, (*args, combine, paths, 0.5, "torch"))
    torch.library.opcheck(torch.ops.ppma.criss_cross_attention.default, (*args, combine, paths, 0.5, "torch"))
    tensors = [t.detach() for t in args]
    saved = torch.ops.ppma.polyline_attention(*tensors, combine, paths, 0.5, "torch")
    grad = torch.randn_like(saved[0])
    torch.library.opcheck(
        torch.ops.ppma.polyline_attention_backward.default, (grad, *tensors, *saved, combine, paths, 0.5, "torch")
    )
    torch.library.opcheck(
        torch.ops.ppma.criss_cross_attention_backward.default, (grad, *tensors, combine, paths, 0.5, "torch")
    )


def test_opcheck_scan_and_linear():
    q, k, v, log_alpha, log_beta = inputs(requires_grad=True)
    torch.library.opcheck(torch.ops.ppma.linear_attention.default, (q, k, v, log_alpha, log_beta, "2d", "torch"))
    torch.library.opcheck(torch.ops.ppma.polyline_scan.default, (v, [log_beta, log_alpha], "both", "torch"))
    tensors = [t.detach() for t in (q, k, v, log_alpha, log_beta)]
    torch.library.opcheck(
        torch.ops.ppma.linear_attention_backward.default, (torch.randn_like(v), *tensors, "2d", "torch")
    )
    torch.library.opcheck(
        torch.ops.ppma.polyline_scan_backward.default, (torch.randn_like(v), tensors[2], tensors[3:], "both", "torch")
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_one_graph(dynamic):
    eager, compiled = inputs(requires_grad=True), inputs(requires_grad=True)
    out = torch.compile(everything, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*compiled)
    torch.testing.assert_close(out, everything(*eager))
    out.sum().backward()
    everything(*eager).sum().backward()
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_compile_inductor():
    eager, compiled = inputs(requires_grad=True), inputs(requires_grad=True)
    out = torch.compile(everything, fullgraph=True)(*compiled)
    torch.testing.assert_close(out, everything(*eager))
    out.sum().backward()
    everything(*eager).sum().backward()
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_export_dynamic_grid():
    class Everything(torch.nn.Module):
        def forward(self, q, k, v, log_alpha, log_beta):
            return everything(q, k, v, log_alpha, log_beta)

    axes = {0: Dim("batch", min=1), 2: Dim("height", min=2), 3: Dim("width", min=2)}
    program = torch.export.export(Everything(), tuple(inputs()), dynamic_shapes=(axes,) * 5)
    for grid in [(3, 4), (7, 5), (2, 2)]:
        tensors = inputs(batch=3, grid=grid)
        torch.testing.assert_close(program.module()(*tensors), everything(*tensors))


@pytest.mark.parametrize(("function", "combine"), SOFTMAX)
def test_autocast(function, combine):
    q, k, v, log_alpha, log_beta = inputs(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = function(q, k, v, log_alpha, log_beta, combine=combine)
    assert out.dtype == torch.bfloat16
    half = [t.detach().bfloat16() for t in (q, k, v)]
    assert torch.equal(out, function(*half, log_alpha, log_beta, combine=combine))
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    assert log_alpha.grad.dtype == torch.float32


def test_vmap_any_axis():
    tensors = inputs(batch=3)
    looped = torch.stack([everything(*[t[i] for t in tensors]) for i in range(3)])
    torch.testing.assert_close(torch.func.vmap(everything)(*tensors), looped)
    torch.testing.assert_close(
        torch.func.vmap(everything, in_dims=(1, None, None, 1, None), out_dims=1)(
            tensors[0], tensors[1][:, 0], tensors[2][:, 0], tensors[3], tensors[4][:, 0]
        )[:, 1],
        everything(tensors[0][:, 1], tensors[1][:, 0], tensors[2][:, 0], tensors[3][:, 1], tensors[4][:, 0]),
    )


def test_vmap_gradients():
    tensors = inputs(batch=3, requires_grad=True)
    torch.func.vmap(everything)(*tensors).sum().backward()
    plain = inputs(batch=3, requires_grad=True)
    everything(*plain).sum().backward()
    for a, b in zip(tensors, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
