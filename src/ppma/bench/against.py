"""Compare with another implementation: `ppma bench against FILE.py:callable`."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import ppma
from ppma.bench.ops import CRISS_CROSS, FULL, Shape
from ppma.bench.report import Report
from ppma.measure.timing import interleave

OPERATORS: dict[str, list[Shape]] = {"polyline_attention": FULL, "criss_cross_attention": CRISS_CROSS}


def load(spec: str) -> Callable:
    """Load the callable `FILE.py:name`.

    Raises:
        ValueError: the file or the name does not exist, or the file raises an error.
    """
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file() or Path(path).suffix != ".py":
        raise ValueError(f"against: expected FILE.py:callable with an existing file, got {spec!r}")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    with foreign_errors(f"against: {path}"):
        module_spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"against: expected a callable {name!r} in {path}, got {found!r}")
    return found


@contextlib.contextmanager
def foreign_errors(what: str) -> Iterator[None]:
    """Turn an error of code that is not ours into a ValueError that names its source."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error}") from error


def compare_models(other: Callable, model: str, *, batch: int, size: int, rounds: int) -> Report:
    """Compare inference of a model with another one.

    Args:
        other: builds a module that takes images (B, 3, H, W).
        model: a registered name.
        batch: images per step.
        size: height and width of the images.
        rounds: interleaved rounds.
    """
    import timm

    images = torch.randn(batch, 3, size, size)
    with foreign_errors("against: the other model"), torch.inference_mode():
        theirs = other().eval()
        theirs(images)
    built = {"ours": ppma.optimize_for_inference(timm.create_model(model)), "theirs": theirs}

    def inference(network: torch.nn.Module) -> Callable[[], object]:
        def run() -> object:
            with torch.inference_mode():
                return network(images)

        return run

    timings = interleave({n: inference(m) for n, m in built.items()}, rounds=rounds, label=f"against {model}")
    report = Report(f"{model} against another model, inference", ["ours / theirs", "ours ms", "theirs ms"])
    medians = (1e3 * timings.median(name) for name in ("ours", "theirs"))
    report.rows.append([timings.speed("ours", "theirs"), *medians])
    return report


def compare_operator(other: Callable, operator: str, *, rounds: int, **options: str) -> Report:
    """Compare an operator with another implementation on the shapes of the PPMA models.

    Args:
        other: called as `other(q, k, v, log_alpha, log_beta, **options)`.
        operator: a name of `OPERATORS`.
        rounds: interleaved rounds.
        options: keyword arguments of both.
    """
    ours = getattr(ppma, operator)
    report = Report(
        f"{operator} against another implementation",
        ["shape", "ours / theirs", "ours ms", "theirs ms", "largest difference"],
    )
    for shape in OPERATORS[operator]:
        tensors = shape.tensors()
        expected = ours(*tensors, **options)
        with foreign_errors("against: the other operator"):
            difference = (expected - other(*tensors, **options)).abs().max().item()
        contenders = {
            name: functools.partial(function, *tensors, **options)
            for name, function in {"ours": ours, "theirs": other}.items()
        }
        timings = interleave(contenders, rounds=rounds, label=f"against {shape}")
        medians = (1e3 * timings.median(name) for name in ("ours", "theirs"))
        report.rows.append([str(shape), timings.speed("ours", "theirs"), *medians, f"{difference:.1e}"])
    return report
