"""Every row of the performance page in one run: `ppma bench targets`.

A row compares one model with its baselines in interleaved rounds. Results are stored row by row, so an interrupted run
continues where it stopped.
"""

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import timm
import torch

from ppma.bench import floor
from ppma.bench.models import Variant
from ppma.measure.costs import exponent
from ppma.measure.memory import peak
from ppma.measure.timing import interleave

Result = dict[str, float]

# The same model without our kernels, without a mask, not optimised; and its matrix products alone.
PLAIN, NONE, RAW, FLOOR = "plain", "none", "raw", "floor"
DENSE_SIZES = ((800, 1333), (512, 2048))


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: of the row, "model/what" with "/formulation" in between for PPMA-T.
        variant: what is measured.
        baselines: names of `NONE`, `FLOOR`, `RAW` and `PLAIN`. They take their turns in this order, next to the variant
            those whose ratio is judged by hundredths: the machine changes its speed from one second to the next.
        rounds: interleaved rounds.
        memory: also measure the peak memory of a step, and of plain PyTorch's (Linux).
        quick: part of a quick run.
    """

    name: str
    variant: Variant
    baselines: tuple[str, ...] = (PLAIN,)
    rounds: int = 5
    memory: bool = False
    quick: bool = False

    def measure(self) -> Result:
        """Seconds of a step, and ratios to the baselines; above 1 this variant is faster, or needs more memory."""
        ours = self.variant
        others = {
            PLAIN: replace(ours, excluded=("native",)),
            NONE: replace(ours, options={**ours.options, "mask": "none"}),
            RAW: replace(ours, optimized=False),
        }
        steps = {"ours": ours.step()}
        for name in self.baselines:
            steps[name] = _floor(ours) if name == FLOOR else others[name].step()
        timings = interleave(steps, rounds=self.rounds, label=self.name)
        result = {"ms": 1e3 * timings.median("ours"), "images_per_second": ours.batch / timings.median("ours")}
        for name in self.baselines:
            result |= {f"over_{name}": timings.speed("ours", name), f"spread_{name}": timings.spread("ours", name)}
        if self.memory:
            with contextlib.suppress(OSError):  # not on Linux
                mine, plain = (peak("ppma.bench.models:step_of", asdict(v), warm=True) for v in (ours, others[PLAIN]))
                result |= {"peak_mb": mine / 1e6, "memory_of_plain": mine / plain}
        return result


@dataclass(frozen=True)
class DenseRow:
    """Features of PPMA-T for one large image, as detection and segmentation compute them.

    Attributes:
        name: of the row.
        size: (height, width) of the image.
        quick: part of a quick run.
    """

    name: str
    size: tuple[int, int]
    quick: bool = False

    def measure(self) -> Result:
        """Time over plain PyTorch, peak memory, and its exponent over the pixels from half the height and width."""
        steps = {"ours": dense_step(*self.size), "plain": dense_step(*self.size, "native")}
        timings = interleave(steps, rounds=3, label=self.name)
        result = {
            "ms": 1e3 * timings.median("ours"),
            "over_plain": timings.speed("ours", "plain"),
            "spread_plain": timings.spread("ours", "plain"),
        }
        half = (self.size[0] // 2, self.size[1] // 2)
        with contextlib.suppress(OSError):  # not on Linux
            small, large = (peak("ppma.bench.targets:dense_step", *size, warm=True) for size in (half, self.size))
            result |= {"peak_mb": large / 1e6, "memory_exponent": exponent((1, 2), (small, large))}
        return result


def dense_step(height: int, width: int, *excluded: str) -> Callable[[], object]:
    """A function that computes the features of one image of this size.

    Args:
        height: of the image.
        width: of the image.
        excluded: backends not to use.
    """
    from ppma import optimize_for_inference
    from ppma.ops import backends

    torch.manual_seed(0)
    with backends.excluding(*excluded):
        model = optimize_for_inference(timm.create_model("ppma_tiny", num_classes=0, global_pool=""))
    image = torch.randn(1, 3, height, width)

    def run() -> object:
        with torch.inference_mode(), backends.excluding(*excluded):
            return model(image)

    return run


def _floor(variant: Variant) -> Callable[[], None]:
    torch.manual_seed(0)
    model = timm.create_model(variant.model, **variant.options).eval()
    return floor.run_all(floor.record(model, torch.randn(variant.batch, 3, variant.size, variant.size)))


@functools.cache
def rows() -> dict[str, Row | DenseRow]:
    """All rows by name, the quick ones first."""
    found: list[Row | DenseRow] = []
    for formulation in ("paper", "release"):
        tiny = functools.partial(Variant, "ppma_tiny", options={"formulation": formulation})
        found += [
            Row(
                f"ppma_tiny/{formulation}/inference-8",
                tiny(),
                (NONE, FLOOR, RAW, PLAIN),
                31,
                memory=True,
                quick=True,
            ),
            Row(f"ppma_tiny/{formulation}/inference-1", tiny(batch=1), (NONE, RAW, PLAIN), 31, quick=True),
            Row(f"ppma_tiny/{formulation}/train-8", tiny(mode="train"), (NONE, PLAIN), 21, memory=True, quick=True),
        ]
    for size in (32, 64):
        nano = functools.partial(Variant, "ppma_nano", size=size)
        found += [
            Row(f"ppma_nano-{size}/inference-64", nano(batch=64), (RAW, PLAIN), 15, quick=size == 32),
            Row(f"ppma_nano-{size}/inference-1", nano(batch=1), (RAW, PLAIN), 31, quick=size == 32),
            Row(f"ppma_nano-{size}/train-64", nano(mode="train", batch=64), (PLAIN,), 9, quick=size == 32),
        ]
    for name in ("rmt_tiny", "ppma_small", "rmt_small", "ppma_base", "rmt_base"):
        other = functools.partial(Variant, name)
        found += [
            Row(f"{name}/inference-8", other(), (RAW, PLAIN), 5),
            Row(f"{name}/inference-1", other(batch=1), (RAW, PLAIN), 9),
            Row(f"{name}/train-8", other(mode="train"), (PLAIN,), 3),
        ]
    found += [DenseRow(f"dense/{height}x{width}", (height, width)) for height, width in DENSE_SIZES]
    return {row.name: row for row in sorted(found, key=lambda row: not row.quick)}


def selected(only: Sequence[str] = (), quick: bool = False) -> list[str]:
    """Names of the rows to measure.

    Args:
        only: patterns such as "ppma_tiny/*" or parts of names; all rows if empty.
        quick: only the rows of PPMA-T at batch 1 and 8 and of ppma_nano at 32 pixels.

    Raises:
        ValueError: a pattern matches no row.

    Examples:
        >>> from ppma.bench.targets import selected
        >>> selected(["nano-32/*-1"])
        ['ppma_nano-32/inference-1']
    """
    names = [name for name, row in rows().items() if row.quick or not quick]
    chosen = []
    for pattern in only:
        matching = [name for name in names if fnmatch.fnmatchcase(name, f"*{pattern}*")]
        if not matching:
            raise ValueError(f"--only: expected a part of one of {', '.join(names)}, got {pattern!r}")
        chosen += matching
    return [name for name in names if name in chosen] if only else names


def measure(names: Sequence[str], done: dict[str, Result]) -> Iterator[tuple[str, Result]]:
    """Measure the rows that are not in `done`, and yield each with its name."""
    for name in names:
        if name not in done:
            yield name, rows()[name].measure()


def summary(name: str, result: Result) -> str:
    """One line for the terminal."""
    words = [f"{result['ms']:.1f} ms"]
    for key, value in result.items():
        if key.startswith("over_"):
            baseline = key.removeprefix("over_")
            words.append(f"{value:.2f} ± {result.get(f'spread_{baseline}', 0.0):.2f}x {baseline}")
    if "peak_mb" in result:
        words.append(f"peak {result['peak_mb']:.0f} MB")
    if "memory_of_plain" in result:
        words.append(f"{result['memory_of_plain']:.2f} of plain PyTorch's")
    if "memory_exponent" in result:
        words.append(f"memory grows as pixels^{result['memory_exponent']:.2f}")
    return f"{name}: {', '.join(words)}"
