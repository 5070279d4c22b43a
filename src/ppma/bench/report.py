"""Benchmark results: tables in Markdown and JSON, and the machine they were measured on."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import ppma
from ppma import allocator
from ppma.ops.backends.native import library

Value = str | int | float

# Make PyTorch, oneDNN and MKL ignore what a CPU has beyond AVX2; our kernels follow PyTorch's capability.
EMULATE_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@dataclass
class Report:
    """A table.

    Attributes:
        title: heading.
        columns: column names.
        rows: one list of values per row.
        notes: paragraphs below the table.
        partial: whether measurements are missing.
    """

    title: str
    columns: Sequence[str]
    rows: list[list[Value]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    partial: bool = False

    def markdown(self) -> str:
        """The table as Markdown."""
        cells = [list(self.columns), *([_text(value) for value in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        numeric = [all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            padded = (
                text.rjust(width) if right else text.ljust(width)
                for text, width, right in zip(row, widths, numeric, strict=True)
            )
            return f"| {' | '.join(padded)} |"

        rule = "|".join("-" * (w + 1) + (":" if right else "-") for w, right in zip(widths, numeric, strict=True))
        table = [line(cells[0]), f"|{rule}|", *map(line, cells[1:])]
        return "\n".join([f"## {self.title}", "", *table, *(["", *self.notes] if self.notes else [])])

    def as_dict(self) -> dict:
        """The report for JSON, with one dictionary per row."""
        rows = [dict(zip(self.columns, (None if x != x else x for x in row), strict=True)) for row in self.rows]  # NaN
        return {**asdict(self), "columns": list(self.columns), "rows": rows}


def _text(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def environment() -> dict[str, Value]:
    """The machine and the software versions."""
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": " ".join(cpu_features()) or "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ppma": ppma.__version__,
        "native": native_isa(),
        "emulated": " ".join(f"{k}={os.environ[k]}" for k in EMULATE_AVX2 if k in os.environ),
        "malloc": " ".join(f"{k}={v}" for k, v in allocator.chosen_by_environment().items()) or "keeps freed memory",
    }


def native_isa() -> str:
    """The instruction set of the native kernels, or why they are unavailable."""
    return library.unsupported_reason() or str(library.isa())


def cpu_features() -> list[str]:
    """The CPU's vector and matrix extensions, as Linux names them; empty where unknown."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()  # x86, Arm
    return [flag for flag in flags if flag.startswith(("avx", "fma", "amx", "f16c", "asimd", "sve", "bf16", "i8mm"))]


def _cpu_name() -> str:
    return f"{_cpuinfo('model name') or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _cpuinfo(name: str) -> str:
    """A field of the first CPU in /proc/cpuinfo, empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == name), "")
