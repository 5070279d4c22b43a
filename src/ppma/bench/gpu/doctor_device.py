"""Checks of what only a device has: streams, graphs, memory, the compiler, other ranks, time."""

import sys
import time
from functools import partial
from typing import Any

import timm
import torch
from triton.runtime.jit import JITFunction

import ppma
import ppma.models
from ppma.bench.gpu import doctor_ddp, measure
from ppma.bench.gpu.doctor_context import Doctor, SkippedError, run
from ppma.bench.gpu.prediction import Stage
from ppma.bench.gpu.report import resource_report
from ppma.bench.gpu.targets import MULTIPROCESSORS, device_target
from ppma.bench.report import Report
from ppma.ops.rotary import rotary_split


def check_other_device(doctor: Doctor) -> str:
    """Tensors on another GPU than the current one, cuda:1 while cuda:0 is current."""
    doctor.needs_gpu()
    if torch.cuda.device_count() < 2:
        raise SkippedError("there is one GPU")
    other = 0 if torch.cuda.current_device() else 1
    tensors = doctor.inputs((14, 14))
    expected = run("polyline_attention", tensors, "auto")
    out = run("polyline_attention", [tensor.to(f"cuda:{other}") for tensor in tensors], "auto")
    assert out.device.index == other
    assert out.to(expected.device).equal(expected)
    return f"same bits on cuda:{other}"


def check_stream_and_graph(doctor: Doctor) -> str:
    """A side stream, and capture and replay of a CUDA graph."""
    doctor.needs_gpu()
    tensors = doctor.inputs((14, 14))
    expected = run("polyline_attention", tensors, "auto")
    stream = torch.cuda.Stream(doctor.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = run("polyline_attention", tensors, "auto")
    stream.synchronize()
    assert aside.equal(expected), "another result on a side stream"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run("polyline_attention", tensors, "auto")
    tensors[2].mul_(2)
    graph.replay()
    torch.cuda.synchronize(doctor.device)
    torch.testing.assert_close(captured, 2 * expected)
    return "stream, capture and replay"


def check_large(doctor: Doctor) -> str:
    """More than 2^31 elements in one tensor, and in one image."""
    doctor.needs_gpu()
    heads, side, d = 8, 128, 128
    batch = 2**31 // (heads * side * side * d) + 1
    free, _ = torch.cuda.mem_get_info(doctor.device)
    if free < 12 * 2**31:
        raise SkippedError(f"needs 24 GB of free memory, has {free >> 30}")
    x = torch.randn(batch, heads, side, side, d, device=doctor.device, dtype=torch.float16)
    decay = -torch.rand(batch, heads, side, side, device=doctor.device)
    out = ppma.polyline_scan(x, decay, decay)
    expected = ppma.polyline_scan(x[-1:], decay[-1:], decay[-1:])
    assert out[-1:].equal(expected), "the last image differs"
    count = x.numel()
    del x, out, decay
    return f"{count:,} elements, {_check_large_image(doctor):,} in one image"


def _check_large_image(doctor: Doctor) -> int:
    """Rotary embeddings and criss-cross attention of a packed projection with offsets beyond 32 bits."""
    heads, side, d = 16, 1024, 48
    packed = torch.randn(1, side * side, 3 * heads * d, device=doctor.device, dtype=torch.float16)
    assert packed.numel() > 2**31
    angles = torch.rand(side * side, d // 2, device=doctor.device)
    cos, sin = angles.cos(), angles.sin()
    last = rotary_split(packed[:, -1:].clone(), heads, cos[-1:], sin[-1:])
    rotated = rotary_split(packed, heads, cos, sin, overwrite=True)
    for one, other in zip(rotated, last, strict=True):
        assert one[:, -1:].equal(other), "rotary_split: the last token differs"
    q, k, v = (part.transpose(1, 2).unflatten(2, (side, side)) for part in rotated)
    decays = [-torch.rand(1, heads, side, side, device=doctor.device) for _ in "ab"]
    out = ppma.criss_cross_attention(q, k, v, *decays)
    expected = ppma.criss_cross_attention(*(tensor[:, -1:].contiguous() for tensor in (q, k, v, *decays)))
    assert out[:, -1:].equal(expected), "criss_cross_attention: the last head differs"
    return packed.numel()


def check_compile(doctor: Doctor) -> str:
    """torch.compile of a whole graph, with gradients; on a GPU with CUDA graphs too."""
    modes: list[dict[str, Any]] = [{"backend": "aot_eager"}]
    if not doctor.dry:
        modes += [{}, {"mode": "reduce-overhead"}]
    tensors = [tensor.detach().requires_grad_() for tensor in doctor.inputs((2, 3) if doctor.dry else (14, 14))]
    function = partial(ppma.polyline_attention, backend=doctor.backend)
    expected = torch.autograd.grad(function(*tensors).sum(), tensors)
    for mode in modes:
        compiled = torch.compile(function, fullgraph=True, **mode)
        for _ in range(1 if doctor.dry else 4):  # CUDA graphs are recorded after a first run, then replayed
            for one, other in zip(torch.autograd.grad(compiled(*tensors).sum(), tensors), expected, strict=True):
                torch.testing.assert_close(one, other)
    return ", ".join(str(mode or "inductor") for mode in modes)


def compiled_kernels() -> int:
    """How many variants of the kernels Triton holds, compiled or loaded from disk."""
    modules = [module for name, module in sys.modules.items() if name.startswith("ppma.ops.backends.triton.")]
    kernels = {
        id(value): value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)
    }
    return sum(len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values())


def check_image_sizes(doctor: Doctor) -> str:
    """Another image size compiles nothing, in training and inference; how long both take the first time."""
    doctor.needs_gpu()
    model = timm.create_model("ppma_tiny").to(doctor.device)
    found = []
    for size in (224, 256):
        start = time.perf_counter()
        for backward in (True, False):
            ppma.warmup(model.train(backward), [(size, size)], dtype=torch.bfloat16)
        torch.cuda.synchronize(doctor.device)
        found.append((compiled_kernels(), time.perf_counter() - start))
    (kernels, first), (more, second) = found
    assert more == kernels, f"256 x 256 compiled {more - kernels} kernels after 224 x 224"
    return f"224: {kernels} kernels, {first:.1f} s; 256: none more, {second:.1f} s"


def check_ddp(doctor: Doctor) -> str:
    """Two ranks of DistributedDataParallel have the gradients of the whole batch."""
    if not doctor.dry and torch.cuda.device_count() < 2:
        raise SkippedError("there is one GPU")
    doctor_ddp.run(doctor.dry)
    return "2 ranks"


def check_occupancy(doctor: Doctor) -> str:
    """Registers, spills and occupancy of every kernel, as compiled for this GPU."""
    doctor.needs_gpu()
    target = device_target(doctor.device)
    if target not in MULTIPROCESSORS:
        raise SkippedError(f"expected one of {', '.join(MULTIPROCESSORS)}, got {target}")
    report, spilled = resource_report([target], 32, "bfloat16")
    doctor.reports.append(report)
    assert not spilled, "a kernel spills; see the table below"
    return "in the table below, nothing spills"


def check_timings(doctor: Doctor) -> str:
    """Timings with a mask, of the same kernels without one and of PyTorch's attention."""
    if doctor.dry:
        stages = [Stage(1, 2, 1, 16, full) for full in (True, False)]
        doctor.reports += [
            measure.operator_report(stage, "hadamard", doctor.device, rounds=1, batch=1, shortest=0.0)
            for stage in stages
        ]
        return "tables below, of the interpreter: they test the code alone"
    doctor.reports += measure.run(str(doctor.device))
    return "in the tables below"


def check_profile(doctor: Doctor) -> str:
    """A profile of one training step."""
    model = timm.create_model("ppma_tiny", depths=(1, 1, 1, 1) if doctor.dry else (2, 2, 8, 2)).to(doctor.device)
    images = torch.randn(1 if doctor.dry else 64, 3, *(2 * [64 if doctor.dry else 224]), device=doctor.device)
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (not doctor.dry)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not doctor.dry)

    def step() -> None:
        with torch.autocast(doctor.device.type, torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if not doctor.dry:
        step()  # compiles
    with torch.profiler.profile(activities=kinds) as profile:
        step()
    attribute = "self_cpu_time_total" if doctor.dry else "self_device_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, attribute))
    report = Report("Profile of one training step", ["operation", "calls", "us"])
    report.rows += [[event.key[:80], event.count, float(getattr(event, attribute))] for event in events[:25]]
    doctor.reports.append(report)
    return "in the table below"
