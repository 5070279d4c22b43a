"""The operators as PyTorch sees them: `torch.ops.ppma.*` with fake kernels, gradients and vmap rules.

Each calls the backend that `backends.call` selects at run time, so a compiled or exported graph holds the name of a
backend and not its code. Shapes are the canonical ones of `ppma.ops.layout`.

Eager code reaches the operators through `torch.autograd.Function`, which every transform of `torch.func`
supports; captured graphs hold the operators themselves, whose gradient is registered with PyTorch.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ppma.ops import dense
from ppma.ops.backends import call, excluded, excluding
from ppma.ops.layout import compute_dtype, heads_last, heads_last_empty
from ppma.ops.options import AttentionOptions, BackendName
from ppma.ops.watching import captured, has_tangent, observed

_SOFTMAX_OPTIONS = "str combine, str paths, float scale, str backend, Tensor? valid=None"
_SOFTMAX_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, Tensor log_alpha, Tensor log_beta, {_SOFTMAX_OPTIONS}"
_LINEAR_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor log_alpha, Tensor log_beta, str paths, str backend"
_FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor)"

# Arguments and results as in `ppma.ops.backends.contract.Backend`, with the options spelled out.
_SCHEMAS = {
    "polyline_scan": "(Tensor x, Tensor[] log_decays, str paths, str backend) -> Tensor",
    "polyline_scan_backward": "(Tensor grad, Tensor x, Tensor[] log_decays, str paths, str backend) -> Tensor[]",
    "polyline_attention": f"({_SOFTMAX_ARGUMENTS}, bool save=True) -> (Tensor, Tensor, Tensor)",
    "polyline_attention_backward": "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor log_alpha, Tensor log_beta, "
    f"Tensor out, Tensor stats, Tensor first, {_SOFTMAX_OPTIONS}) -> {_FIVE}",
    "criss_cross_attention": f"({_SOFTMAX_ARGUMENTS}) -> Tensor",
    "criss_cross_attention_backward": f"(Tensor grad, {_SOFTMAX_ARGUMENTS}) -> {_FIVE}",
    "linear_attention": f"({_LINEAR_ARGUMENTS}) -> Tensor",
    "linear_attention_backward": f"(Tensor grad, {_LINEAR_ARGUMENTS}) -> {_FIVE}",
}


def split_arguments(arguments: Sequence[Any]) -> tuple[Any, AttentionOptions, BackendName, Tensor | None]:
    """The tensors, options, backend and `valid` of a softmax attention, from the arguments of its schema."""
    tensors = list(itertools.takewhile(lambda argument: isinstance(argument, Tensor), arguments))
    combine, paths, scale, backend, *defaults = arguments[len(tensors) :]
    valid, save = defaults[0] if defaults else None, defaults[1] if len(defaults) > 1 else True
    return tensors, AttentionOptions(combine, paths, scale, save), backend, valid


def _is_softmax(operator: str) -> bool:
    return operator.startswith(("polyline_attention", "criss_cross_attention"))


def _kernel(operator: str) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        valid = None
        if _is_softmax(operator):
            tensors, options, backend, valid = split_arguments(arguments)
            inputs = [*tensors, options]
        else:
            *inputs, backend = arguments
        if torch.is_autocast_enabled(inputs[0].device.type):
            # Autocast ends here: what is computed in float32 inside must stay float32.
            with torch.autocast(inputs[0].device.type, enabled=False):
                return call(backend, operator, *inputs, valid=valid)
        return call(backend, operator, *inputs, valid=valid)

    return kernel


def _dispatched(operator: str) -> Callable[..., Any]:
    """The kernel as PyTorch's dispatcher has it: its results have the strides that the fake operator promises."""
    if operator != "polyline_attention":
        return _KERNELS[operator]

    def kernel(*arguments: Any) -> Any:
        out, stats, first = _KERNELS[operator](*arguments)
        return out, stats, first.contiguous()  # zeros may be one number in memory

    return kernel


_KERNELS = {name: _kernel(name) for name in _SCHEMAS}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"ppma::{_name}", _schema)
    torch.library.impl(f"ppma::{_name}", "default", _dispatched(_name))


def _eager(operator: str, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
    """Run an operator: directly if nothing follows PyTorch's dispatcher, else through it."""
    if captured() or observed(*tensors) or _differentiated(tensors):
        return getattr(torch.ops.ppma, operator)(*arguments)
    return _KERNELS[operator](*arguments)


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@torch.library.register_fake("ppma::polyline_scan")
def _(x, log_decays, paths, backend):  # type: ignore[no-untyped-def]
    return _contiguous_like(x)


@torch.library.register_fake("ppma::polyline_scan_backward")
def _(grad, x, log_decays, paths, backend):  # type: ignore[no-untyped-def]
    return [_contiguous_like(tensor) for tensor in (x, *log_decays)]


@torch.library.register_fake("ppma::polyline_attention")
def _(q, k, v, log_alpha, log_beta, combine, paths, scale, backend, valid=None, save=True):  # type: ignore[no-untyped-def]
    softmaxes = AttentionOptions(combine, paths, scale).softmaxes
    dtype = compute_dtype(q.dtype)
    return (
        heads_last_empty(v, v.shape[-1]),
        torch.empty((2 * softmaxes, *q.shape[:-1]), dtype=dtype, device=q.device),
        torch.empty((softmaxes - 1, *v.shape), dtype=dtype, device=q.device),
    )


def _fake_output(q, k, v, *_):  # type: ignore[no-untyped-def]
    return heads_last_empty(v, v.shape[-1])


def _fake_gradients(grad, q, k, v, log_alpha, log_beta, *_):  # type: ignore[no-untyped-def]
    return (
        *(heads_last_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v)),
        _contiguous_like(log_alpha),
        _contiguous_like(log_beta),
    )


for _name in ("criss_cross_attention", "linear_attention"):
    torch.library.register_fake(f"ppma::{_name}", _fake_output)
for _name in ("polyline_attention_backward", "criss_cross_attention_backward", "linear_attention_backward"):
    torch.library.register_fake(f"ppma::{_name}", _fake_gradients)


@dataclass(frozen=True)
class _Call:
    """An operator with its options: what `_Operator` and `_Gradient` need beside the tensors.

    Deliberately no tuple: `torch.func` would take that apart.

    Attributes:
        operator: its name in `torch.ops.ppma`.
        options: what follows the tensors in its schema.
        padded: the last of the tensors is `valid`.
        save: of the full attention, keep what the backward pass needs.
        excluded: backends not to use; kept because the backward pass may run on another thread.
    """

    operator: str
    options: tuple[Any, ...]
    padded: bool = False
    save: bool = True
    excluded: frozenset[str] = field(default_factory=excluded)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = self._arguments(tensors)
        if not self.save and self.operator == "polyline_attention":
            arguments += [False] if self.padded else [None, False]
        result = _eager(self.operator, tensors, arguments)
        return result if isinstance(result, tuple) else (result,)

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        with excluding(*self.excluded) if self.excluded else contextlib.nullcontext():
            arguments = [grad, *self._arguments(saved)]
            return tuple(_eager(f"{self.operator}_backward", (grad, *saved), arguments))

    def dense(self, *tensors: Tensor, valid: Sequence[Tensor] = ()) -> Tensor:
        """The same function of plain tensor operations, which can be differentiated further; `valid` is not."""
        arguments = self._arguments((*tensors, *valid))
        if _is_softmax(self.operator):
            given, options, _, padding = split_arguments(arguments)
            result = getattr(dense, self.operator)(*given, options, padding)
        else:
            result = getattr(dense, self.operator)(*arguments[:-1])
        out = result[0] if isinstance(result, tuple) else result
        return out.contiguous() if self.operator == "polyline_scan" else heads_last(out)

    def split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The tensors without `valid`, and `valid` if there is one."""
        end = len(tensors) - self.padded
        return tensors[:end], tensors[end:]

    def _arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """In the order of the schema."""
        if self.operator == "polyline_scan":
            return [tensors[0], list(tensors[1:]), *self.options]
        plain, valid = self.split(tensors)
        return [*plain, *self.options, *valid]


def _batch_axis(operator: str, position: int) -> int:
    """The batch axis of output `position` of an operator: it is the second of `stats` and `first`."""
    return 1 if operator == "polyline_attention" and position > 0 else 0


def _saved_batch_axis(operator: str, position: int) -> int:
    """The same of input `position` of a backward operator: grad, q, k, v, decays, out, `stats`, `first`, `valid`."""
    return 1 if operator == "polyline_attention" and position in (7, 8) else 0


def _mapped(
    run: Callable[..., tuple[Tensor, ...]],
    size: int,
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    input_axis: Callable[[int], int],
    output_axis: Callable[[int], int],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Merge the mapped axis of every tensor into its batch axis, run, and split the results."""
    folded = []
    for position, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        axis = input_axis(position)
        tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(tensor.movedim(0, axis).flatten(axis, axis + 1))
    outputs = run(*folded)
    axes = tuple(output_axis(position) for position in range(len(outputs)))
    return tuple(
        out.unflatten(axis, (size, out.shape[axis] // size)) for out, axis in zip(outputs, axes, strict=True)
    ), axes


# Its declared type has a third result, which there is only with has_aux=True.
_vjp = cast(Callable[..., tuple[Any, Callable[..., Any]]], torch.func.vjp)


def _jvp(function: Callable[..., Any], primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Any:
    """Jacobian times tangents, by reverse mode alone, because forward mode cannot be nested inside itself.

    The pullback is linear in its cotangent, and its own pullback is the Jacobian.
    """
    outputs, pullback = _vjp(function, *primals)
    zeros = torch.utils._pytree.tree_map(torch.zeros_like, outputs)
    _, transposed = _vjp(pullback, zeros)
    given = tuple(torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True))
    return transposed(given)[0]


class _Operator(torch.autograd.Function):
    """Runs an operator, and its backward operator for the gradient."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.forward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        plain, valid = ctx.call.split(tensors)
        ctx.inputs = len(plain)
        ctx.save_for_backward(*plain, *(output if ctx.call.operator == "polyline_attention" else ()), *valid)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> Any:
        unused = (None,) * ctx.call.padded
        if grad is None:
            return (None,) * (ctx.inputs + 1) + unused
        saved = ctx.saved_tensors  # once: checkpointing unpacks them a single time
        if not _differentiated((grad, *saved)):
            return None, *ctx.call.backward(grad, *saved), *unused
        return None, *_Gradient.apply(ctx.call, ctx.inputs, grad, *saved), *unused

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        plain, valid = ctx.call.split(ctx.saved_tensors)
        tangent = _jvp(partial(ctx.call.dense, valid=valid), plain, tangents[: ctx.inputs])
        return (tangent, None, None) if ctx.call.operator == "polyline_attention" else (tangent,)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: Tensor) -> Any:
        run = partial(_Operator.apply, call)
        axis = partial(_batch_axis, call.operator)
        return _mapped(run, info.batch_size, tensors, in_dims[1:], lambda _: 0, axis)


class _Gradient(torch.autograd.Function):
    """Runs a backward operator. Its own derivatives are those of the dense form."""

    @staticmethod
    def forward(call: _Call, inputs: int, grad: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        return call.backward(grad, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, count, grad, *saved = inputs
        ctx.unused = len(saved) - count
        kept = (grad, *saved[:count], *ctx.call.split(saved)[1])
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        plain, valid = ctx.call.split(ctx.saved_tensors)
        _, pullback = _vjp(_dense_gradients(ctx.call, valid), *plain)
        return None, None, *pullback(cotangents), *(None,) * ctx.unused

    @staticmethod
    def jvp(ctx: Any, _call: None, _inputs: None, *tangents: Tensor | None) -> Any:
        # The tangents of what the forward pass saved beside its inputs follow from those of the inputs.
        used = tangents[: len(tangents) - ctx.unused]
        plain, valid = ctx.call.split(ctx.saved_tensors)
        return _jvp(_dense_gradients(ctx.call, valid), plain, used)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, inputs: int, *tensors: Tensor) -> Any:
        run = partial(_Gradient.apply, call, inputs)
        axis = partial(_saved_batch_axis, call.operator)
        return _mapped(run, info.batch_size, tensors, in_dims[2:], axis, lambda _: 0)


def _dense_gradients(call: _Call, valid: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def gradients(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _vjp(partial(call.dense, valid=valid), *tensors)[1](grad)

    return gradients


def _setup(operator: str, ctx: Any, inputs: Any, output: Any) -> None:
    """For captured graphs."""
    tensors, others = inputs[:5], inputs[5:]
    valid = tuple(value for value in others if isinstance(value, Tensor))
    options = tuple(value for value in others if isinstance(value, str | float))
    ctx.call, ctx.unused = _Call(operator, options, bool(valid), excluded=frozenset()), (None,) * len(others)
    outputs = output if isinstance(output, tuple) else ()
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *outputs, *valid)


def _gradient(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> Any:
    gradients = (None,) * 5 if grad is None else ctx.call.backward(grad, *ctx.saved_tensors)
    return *gradients, *ctx.unused


def _scan_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, log_decays, *ctx.options = inputs
    ctx.save_for_backward(x, *log_decays)


def _scan_gradient(ctx: Any, grad: Tensor) -> Any:
    x, *log_decays = ctx.saved_tensors
    grad_x, *grad_decays = torch.ops.ppma.polyline_scan_backward(grad, x, log_decays, *ctx.options)
    return grad_x, grad_decays, None, None


def _no_second_derivative(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "ppma: second derivatives are not available in captured graphs or of torch.ops.ppma.*; "
        "the public functions have them in eager mode"
    )


torch.library.register_autograd("ppma::polyline_scan", _scan_gradient, setup_context=_scan_setup)
for _name in ("polyline_attention", "criss_cross_attention", "linear_attention"):
    torch.library.register_autograd(f"ppma::{_name}", _gradient, setup_context=partial(_setup, _name))
for _name in ("polyline_scan", "polyline_attention", "criss_cross_attention", "linear_attention"):
    torch.library.register_autograd(f"ppma::{_name}_backward", _no_second_derivative)


def _vmap_rule(operator: str, backward: bool) -> Callable[..., Any]:
    """For captured graphs."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        flat: list[tuple[Any, Any]] = []
        for value, dim in zip(arguments, in_dims, strict=True):
            flat += zip(value, dim, strict=True) if isinstance(value, list) else [(value, dim)]
        tensors, dims = zip(*[(value, dim) for value, dim in flat if isinstance(value, Tensor)], strict=True)
        options = tuple(value for value, _ in flat if isinstance(value, str | float))
        padded = _is_softmax(operator) and any(isinstance(value, Tensor) for value in arguments[-2:])
        call = _Call(operator, options, padded)
        first, last = partial(_batch_axis, operator), partial(_saved_batch_axis, operator)
        if backward:
            outputs, axes = _mapped(call.backward, info.batch_size, tensors, dims, last, lambda _: 0)
            return (list(outputs), list(axes)) if operator == "polyline_scan" else (outputs, axes)
        outputs, axes = _mapped(call.forward, info.batch_size, tensors, dims, lambda _: 0, first)
        return (outputs, axes) if operator == "polyline_attention" else (outputs[0], axes[0])

    return rule


for _name in ("polyline_scan", "polyline_attention", "criss_cross_attention", "linear_attention"):
    torch.library.register_vmap(f"ppma::{_name}", _vmap_rule(_name, backward=False))
    torch.library.register_vmap(f"ppma::{_name}_backward", _vmap_rule(_name, backward=True))


def run(operator: str, tensors: Sequence[Tensor], *options: Any, valid: Tensor | None = None) -> Tensor:
    """Call an operator of `torch.ops.ppma`, differentiable in every way in eager code.

    Args:
        operator: "polyline_scan", "polyline_attention", "criss_cross_attention" or "linear_attention".
        tensors: its tensors; for "polyline_scan" x and then the log-decays.
        options: what follows the tensors in the operator's schema.
        valid: boolean (B, H, W), for the softmax attentions.

    Returns:
        Its (first) output.
    """
    padded = valid is not None
    if valid is not None:
        tensors = (*tensors, valid)
    if torch.compiler.is_compiling():
        return _Call(operator, options, padded, excluded=frozenset()).forward(*tensors)[0]
    differentiated = _differentiated(tensors)
    call = _Call(operator, options, padded, save=differentiated)
    plain = torch.jit.is_tracing() or not differentiated
    return (call.forward(*tensors) if plain else _Operator.apply(call, *tensors))[0]


def _differentiated(tensors: Sequence[Tensor]) -> bool:
    """Whether a derivative may be needed, or a transform of `torch.func` is active."""
    return (
        torch._C._are_functorch_transforms_active()
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        or has_tangent(tensors)
    )
