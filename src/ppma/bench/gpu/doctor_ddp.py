"""Two ranks of DistributedDataParallel against one process: a module of its own, which every rank imports."""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ppma.layers import PolylineAttention

RANKS = 2


def _layer(dry: bool) -> nn.Module:
    torch.manual_seed(0)
    return PolylineAttention(32, heads=2, rope=True, backend="triton" if dry else "auto")


def _images() -> Tensor:
    return torch.randn(RANKS, 2, 3, 32, generator=torch.Generator().manual_seed(1))


def _gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module(x).square().mean().backward()
    return [parameter.grad.cpu() for parameter in module.parameters() if parameter.grad is not None]


def _rank(rank: int, port: int, dry: bool) -> None:
    device = torch.device("cpu") if dry else torch.device("cuda", rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo" if dry else "nccl", init_method=address, rank=rank, world_size=RANKS)
    try:
        model = DistributedDataParallel(_layer(dry).to(device), device_ids=None if dry else [rank])
        found = _gradients(model, _images()[rank : rank + 1].to(device))
        expected = _gradients(_layer(dry).to(device), _images().to(device))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    finally:
        dist.destroy_process_group()


def run(dry: bool) -> None:
    """Compare the gradients of two ranks with those of the whole batch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, (port, dry), RANKS)
