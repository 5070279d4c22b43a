"""Whole models: inference and training steps, masked beside unmasked beside RMT, native beside plain PyTorch."""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import timm
import torch
import torch.nn.functional as F

import ppma
from ppma.bench.report import Report
from ppma.measure.memory import peak
from ppma.measure.timing import interleave
from ppma.ops import backends


@dataclass(frozen=True)
class Variant:
    """A model and what is done with it."""

    model: str
    mode: str = "inference"  # or "train"
    options: dict = field(default_factory=dict)
    batch: int = 8
    size: int = 224
    excluded: tuple[str, ...] = ()  # backends to do without
    optimized: bool = True  # inference: folded by `ppma.optimize_for_inference`

    def step(self) -> Callable[[], object]:
        """Build the model; the result runs one step."""
        torch.manual_seed(0)
        model = timm.create_model(self.model, **self.options)
        images = torch.randn(self.batch, 3, self.size, self.size)
        labels = torch.randint(0, 1000, (self.batch,))
        run = self._training(model, images, labels) if self.mode == "train" else self._inference(model, images)

        def step() -> object:
            with backends.excluding(*self.excluded):
                return run()

        return step

    def _inference(self, model: torch.nn.Module, images: torch.Tensor) -> Callable[[], object]:
        with backends.excluding(*self.excluded):
            model = ppma.optimize_for_inference(model) if self.optimized else model.eval()

        def run() -> object:
            with torch.inference_mode():
                return model(images)

        return run

    def _training(self, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def run() -> object:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss

        return run


def compare(variants: dict[str, Variant], *, rounds: int, label: str, memory: bool = True) -> Report:
    """Time the variants in turns; the first is what the others are compared with."""
    timings = interleave({name: v.step() for name, v in variants.items()}, rounds=rounds, label=label)
    base = next(iter(variants))
    columns = ["model", f"speed of {base} over it", "images/s", "ms"]
    report = Report(label, columns + (["peak MB of a step"] if memory else []))
    for name, variant in variants.items():
        seconds = timings.median(name)
        row: list = [name, timings.speed(base, name), variant.batch / seconds, 1e3 * seconds]
        if memory:
            row.append(_try_peak(variant))
        report.rows.append(row)
    return report


def step_of(spec: dict) -> Callable[[], object]:
    """The step of a variant given as a dictionary, for a process that measures its memory."""
    return Variant(**spec).step()


def _try_peak(variant: Variant) -> float:
    with contextlib.suppress(OSError):
        return peak("ppma.bench.models:step_of", asdict(variant), warm=True) / 1e6
    return float("nan")


def suite(model: str = "ppma_tiny", *, batch: int = 8, size: int = 224, rounds: int = 9) -> list[Report]:
    """Inference and training step of one size, in both formulations.

    Args:
        model: a PPMA model's name; the same blocks with RMT's mask stand beside it.
        batch: images in a step.
        size: height and width of the images.
        rounds: interleaved rounds.
    """
    reports = []
    rmt = model.replace("ppma", "rmt")
    for mode in ("inference", "train"):
        for formulation in ("paper", "release"):
            ours = Variant(model, mode, {"formulation": formulation}, batch, size)
            variants = {
                model: ours,
                'mask="none"': replace(ours, options={"formulation": formulation, "mask": "none"}),
                rmt: replace(ours, options={"formulation": "release", "mask": "rmt"}),
                "plain PyTorch": replace(ours, excluded=("native",)),
            }
            label = f"{mode}, {formulation} formulation, batch {batch}, {size} x {size}"
            reports.append(compare(variants, rounds=rounds, label=label))
    return reports
