"""The tables of docs/performance.md from result files of `ppma bench targets`, one for each column."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppma.bench.targets import DENSE_SIZES, Result

BEGIN, END = "<!-- bench targets: generated -->", "<!-- end of bench targets -->"
MISSING = "–"

# Row of PPMA-T, key of the result, what it says, the target.
TARGETS = (
    ("inference-8", "over_plain", "inference, batch 8, over plain PyTorch", "≥ 2.3"),
    ("inference-1", "over_plain", "inference, batch 1, over plain PyTorch", "≥ 2.4"),
    ("train-8", "over_plain", "training step over plain PyTorch", "≥ 1.8"),
    ("inference-8", "over_floor", "inference over the floor", "≥ 0.95"),
    ("inference-8", "over_none", 'inference over `mask="none"`', "≥ 0.97"),
    ("train-8", "over_none", 'training over `mask="none"`', "≥ 0.97"),
    ("inference-8", "over_raw", "`optimize_for_inference` over the raw model", "≥ 1.15"),
    ("inference-8", "memory_of_plain", "inference, memory of plain PyTorch's", "≤ 0.3"),
    ("train-8", "memory_of_plain", "training, memory of plain PyTorch's", "≤ 0.59"),
)
MODELS = ("rmt_tiny", "ppma_small", "rmt_small", "ppma_base", "rmt_base", "ppma_nano-32", "ppma_nano-64")


def load(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ValueError: it is not one.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a result file of `ppma bench targets`: {error}") from None
    if not isinstance(document, dict) or not {"environment", "rows"} <= document.keys():
        raise ValueError(f"{path}: expected a result file of `ppma bench targets`, found other contents")
    return document


def tables(documents: Sequence[Mapping[str, Any]]) -> str:
    """The tables in Markdown, with one column for each result file; rows that no file has are left out."""
    heads = _headings([document["environment"] for document in documents])
    results: list[Mapping[str, Result]] = [document["rows"] for document in documents]

    def table(first: Sequence[str], rows: Sequence[tuple[Sequence[str], Callable[[Mapping[str, Result]], str]]]) -> str:
        lines = [f"| {' | '.join([*first, *heads])} |", f"|{' --- |' * len(first)}{' ---: |' * len(heads)}"]
        cells = [(words, [cell(result) for result in results]) for words, cell in rows]
        measured = [(words, values) for words, values in cells if any(c.isdigit() for c in "".join(values))]
        lines += [f"| {' | '.join([*words, *values])} |" for words, values in measured]
        return "\n".join(lines) if measured else "Not measured."

    def tiny(what: str, key: str) -> Callable[[Mapping[str, Result]], str]:
        return lambda rows: " / ".join(_value(rows, f"ppma_tiny/{f}/{what}", key) for f in ("paper", "release"))

    def model(name: str) -> Callable[[Mapping[str, Result]], str]:
        batch = 64 if "nano" in name else 8
        parts = (f"inference-{batch}", "inference-1", f"train-{batch}")
        return lambda rows: " / ".join(_value(rows, f"{name}/{what}", "over_plain") for what in parts)

    def dense(size: tuple[int, int], key: str) -> Callable[[Mapping[str, Result]], str]:
        return lambda rows: _value(rows, f"dense/{size[0]}x{size[1]}", key)

    dense_keys = {
        "ms": "ms",
        "over_plain": "over plain PyTorch",
        "peak_mb": "peak MB",
        "memory_exponent": "memory exponent",
    }
    sections = [
        "#### PPMA-T, 224 x 224: paper / release formulation",
        table(["", "target"], [((title, target), tiny(what, key)) for what, key, title, target in TARGETS]),
        "#### Other models over plain PyTorch: inference in batches / single images / training",
        table(["model"], [((f"`{name}`",), model(name)) for name in MODELS]),
        "#### Features of one large image, PPMA-T",
        table(
            ["image", ""],
            [
                ((f"{size[0]} x {size[1]}", text), dense(size, key))
                for size in DENSE_SIZES
                for key, text in dense_keys.items()
            ],
        ),
        *(_described(head, document["environment"]) for head, document in zip(heads, documents, strict=True)),
    ]
    return "\n\n".join(sections)


def _headings(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """The instruction sets, behind the vendor of the CPU where two columns would be called the same."""
    names = [_instruction_set(environment) for environment in environments]
    if len(set(names)) == len(names):
        return names
    vendors = [str(environment["cpu"]).split()[0].removesuffix("(R)") for environment in environments]
    return [f"{vendor}, {name}" for vendor, name in zip(vendors, names, strict=True)]


def _instruction_set(environment: Mapping[str, Any]) -> str:
    name = {"avx512": "AVX-512", "avx2": "AVX2"}.get(environment["native"], str(environment["native"]))
    return f"{name}, emulated" if environment.get("emulated") else name


def _described(heading: str, environment: Mapping[str, Any]) -> str:
    how = ""
    if environment.get("emulated"):
        how = f", on a CPU with more by `{environment['emulated']}`"
    return f"{heading}: {environment['cpu']}, {environment['threads']} threads, torch {environment['torch']}{how}."


def _value(rows: Mapping[str, Result], name: str, key: str) -> str:
    value = rows.get(name, {}).get(key)
    if value is None:
        return MISSING
    if key in ("ms", "peak_mb"):
        return f"{value:,.0f}"
    spread = rows[name].get(key.replace("over_", "spread_")) if key.startswith("over_") else None
    return f"{value:.2f}" if spread is None else f"{value:.2f} ± {spread:.2f}"


def insert(page: Path, text: str) -> None:
    """Replace what is between the markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    content = page.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(content):
        raise ValueError(f"{page}: expected the markers {BEGIN} and {END}, found none")
    page.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", content, count=1), encoding="utf-8")
