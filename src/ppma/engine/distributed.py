"""One process, or several under torchrun (gloo on CPUs, NCCL on GPUs)."""

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """One process of a run.

    Attributes:
        rank: index of this process.
        size: number of processes.
        device: where this process computes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
            values = values / self.size
        return values

    def gather(self, value: Any) -> list[Any]:
        """Gather a picklable value from every process, in every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Send the main process's value to every process."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def broadcast_parameters(self, model: nn.Module) -> None:
        """Send the main process's parameters and buffers to every process."""
        if self.size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)


def select_device(name: str | None) -> torch.device:
    """The device of this name; None for the GPU if there is one.

    Examples:
        >>> select_device("cpu")
        device(type='cpu')
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"device: expected one that PyTorch can use, such as cpu, got {name!r} ({reason})") from None
    return device


@contextlib.contextmanager
def world(device: str | None = None) -> Iterator[World]:
    """Join the process group if torchrun started this process, and leave it at the end.

    Args:
        device: where a process alone computes, see `select_device`; under torchrun each has its own GPU.

    Examples:
        >>> with world() as alone:
        ...     alone.size, alone.main
        (1, True)
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device=select_device(device))
        return
    if device is not None:
        raise ValueError(f"device: expected none under torchrun, where each process has its own, got {device!r}")
    gpu = torch.cuda.is_available()
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else CPU
    if gpu:
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), own)
    finally:
        dist.destroy_process_group()


class _SumOverProcesses(torch.autograd.Function):
    """Differentiable all-reduce: every process's loss depends on every summand, so the gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with the statistics of all processes on CPUs, which `nn.SyncBatchNorm` does not support.

    The variance is computed in a second pass, for accuracy in float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        wide = x if x.dtype == torch.float64 else x.float()
        entries = wide.new_full((1,), wide.numel() / wide.shape[1])
        total = _SumOverProcesses.apply(torch.cat((wide.sum((0, 2, 3)), entries)))
        mean, count = total[:-1] / total[-1], total[-1]
        centred = wide - mean[:, None, None]
        variance = _SumOverProcesses.apply(centred.square().sum((0, 2, 3))) / count
        self._track(mean.detach(), variance.detach(), count.detach())
        out = centred * (variance + self.eps).rsqrt()[:, None, None]
        if self.weight is not None:
            out = out * self.weight[:, None, None] + self.bias[:, None, None]
        return out.to(x.dtype)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def synchronise_batch_norm(model: nn.Module, device: torch.device, skip: Collection[str] = ()) -> nn.Module:
    """Replace the 2D batch norms of a model by synchronised ones: PyTorch's on CUDA, `SyncBatchNorm2d` elsewhere.

    Unlike `nn.SyncBatchNorm.convert_sync_batchnorm`, this keeps the `forward` of subclasses.

    Args:
        model: modified in place, unless it is a batch norm itself.
        device: device of the training.
        skip: names of direct submodules that keep their batch norms.
    """
    if isinstance(model, nn.BatchNorm2d):
        return _synchronised(model, nn.SyncBatchNorm if device.type == "cuda" else SyncBatchNorm2d)
    for name, child in model.named_children():
        if name not in skip:
            setattr(model, name, synchronise_batch_norm(child, device))
    return model


def _synchronised(norm: nn.BatchNorm2d, base: type[nn.Module]) -> nn.Module:
    kind = type(norm)
    # A subclass calls super().forward; placed after it in the MRO, the synchronised norm receives that call.
    made = base if kind is nn.BatchNorm2d else type(f"Sync{kind.__name__}", (kind, base), {})
    replaced = made(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
        setattr(replaced, name, tensor)
    return replaced.train(norm.training)
