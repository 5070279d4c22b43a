"""Inference and training throughput of models: PPMA with and without its mask, RMT, and any timm model."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import timm
import torch
import torch.nn.functional as F

import ppma
from ppma.bench.against import foreign_errors
from ppma.bench.report import Report, Value
from ppma.measure.memory import peak
from ppma.measure.timing import Timings, interleave
from ppma.models import CONFIGS
from ppma.ops import backends
from ppma.progress import track

Publish = Callable[[Report], None]

PAPER_BATCH = 64
# The paper's throughput table (appendix): images/s of the authors' code on an A800 GPU, batch 64, 224 x 224.
PAPER_IMAGES_PER_SECOND = {
    "ppma_tiny": 1034,
    "rmt_tiny": 1650,
    "ppma_small": 612,
    "rmt_small": 876,
    "ppma_base": 362,
    "rmt_base": 457,
}


@dataclass(frozen=True)
class Variant:
    """A model and how it is run.

    Attributes:
        model: a name that timm knows.
        mode: "inference" or "train".
        options: keyword arguments of `timm.create_model`.
        batch: images per step.
        size: height and width of the images.
        excluded: backends that are not used.
        optimized: inference of our models: apply `ppma.optimize_for_inference`.
    """

    model: str
    mode: str = "inference"
    options: dict = field(default_factory=dict)
    batch: int = 8
    size: int = 224
    excluded: tuple[str, ...] = ()
    optimized: bool = True

    def step(self) -> Callable[[], object]:
        """Build the model and return a function that runs one step."""
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
            ours = self.model in CONFIGS
            model = ppma.optimize_for_inference(model) if ours and self.optimized else model.eval()

        def run() -> object:
            with torch.inference_mode():
                return model(images)

        return run

    def _training(self, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # as `ppma train` has it

        def run() -> object:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return run


def compare(variants: Mapping[str, Variant], *, rounds: int, label: str, publish: Publish | None = None) -> Report:
    """Time variants in turns, compare each with the first, and measure the peak memory of a step (Linux).

    Args:
        variants: by name.
        rounds: interleaved rounds.
        label: title of the table.
        publish: called after each round with the table up to then.
    """
    base = next(iter(variants))
    columns = ["model", f"speed of {base} over it", "images/s", "ms", "peak MB of a step"]

    def report(timings: Timings, peaks: Mapping[str, float]) -> Report:
        rows: list[list[Value]] = []
        for name, variant in variants.items():
            seconds, peak_megabytes = timings.median(name), peaks.get(name, float("nan"))
            rows.append([name, timings.speed(base, name), variant.batch / seconds, 1e3 * seconds, peak_megabytes])
        return Report(label, columns, rows)

    timings = _time(variants, rounds, label, lambda timings: report(timings, {}), publish)
    return report(timings, {name: _try_peak(variants[name]) for name in track(variants, f"{label}, memory")})


def _time(
    variants: Mapping[str, Variant],
    rounds: int,
    label: str,
    partial: Callable[[Timings], Report],
    publish: Publish | None,
) -> Timings:
    """Build and time the variants, publishing a partial report after each round."""

    def on_round(timings: Timings) -> None:
        if publish is not None:
            done = len(next(iter(timings.seconds.values())))
            publish(replace(partial(timings), partial=True, notes=[f"Partial result: {done} of {rounds} rounds."]))

    steps = {name: _checked_step(variant) for name, variant in variants.items()}
    return interleave(steps, rounds=rounds, label=label, on_round=on_round)


def _checked_step(variant: Variant) -> Callable[[], object]:
    """The step of a variant; a model that is not ours runs once, since it may not support the image size."""
    if variant.model in CONFIGS:
        return variant.step()
    with foreign_errors(f"--model {variant.model}"):
        step = variant.step()
        step()
    return step


def step_of(spec: dict) -> Callable[[], object]:
    """The step of a variant given as a dictionary, for the process that measures its memory."""
    return Variant(**spec).step()


def _try_peak(variant: Variant) -> float:
    with contextlib.suppress(OSError):
        return peak("ppma.bench.models:step_of", asdict(variant), warm=True) / 1e6
    return float("nan")


def suite(
    model: str = "ppma_tiny", *, batch: int = 8, size: int = 224, rounds: int = 9, publish: Publish | None = None
) -> Iterator[Report]:
    """Inference and training of a PPMA model in both formulations: with and without its mask, as RMT, in plain PyTorch.

    Args:
        model: a PPMA model; RMT has the same blocks and its own mask.
        batch: images per step.
        size: height and width of the images.
        rounds: interleaved rounds.
        publish: called after each round with the table up to then.
    """
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
            yield compare(variants, rounds=rounds, label=label, publish=publish)


def baselines(
    models: Sequence[str], *, batch: int = 8, size: int = 224, rounds: int = 9, publish: Publish | None = None
) -> Iterator[Report]:
    """Inference and training of any timm models, ours included, compared with the first; arguments as in `suite`."""
    for mode in ("inference", "train"):
        variants = {name: Variant(name, mode, batch=batch, size=size) for name in models}
        report = compare(variants, rounds=rounds, label=f"{mode}, batch {batch}, {size} x {size}", publish=publish)
        if mode == "inference":
            report.notes.append("Models of ppma run after `ppma.optimize_for_inference`, others as timm builds them.")
        yield report


def paper_table(
    *, batch: int = PAPER_BATCH, size: int = 224, rounds: int = 9, publish: Publish | None = None
) -> Iterator[Report]:
    """The paper's throughput table: figures measured here and the paper's; arguments as in `suite`."""
    label = f"the paper's throughput table: inference, release formulation, batch {batch}, {size} x {size}"
    columns = ["model", "images/s", "speed over RMT", "paper: images/s", "paper: speed over RMT"]
    note = 'Columns named "paper" are the paper\'s own figures: A800 GPU, batch 64, 224 x 224.'
    options = {"formulation": "release"}
    variants = {name: Variant(name, "inference", options, batch, size) for name in PAPER_IMAGES_PER_SECOND}

    def report(timings: Timings) -> Report:
        rows: list[list[Value]] = []
        for name, published in PAPER_IMAGES_PER_SECOND.items():
            rmt = name.replace("ppma", "rmt")
            ratio = published / PAPER_IMAGES_PER_SECOND[rmt]
            rows.append([name, batch / timings.median(name), timings.speed(name, rmt), published, ratio])
        return Report(label, columns, rows, [note])

    yield report(_time(variants, rounds, label, report, publish))
