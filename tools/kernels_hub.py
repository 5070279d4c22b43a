"""Lay the operators out as a repository of the Hugging Face `kernels` hub.

    python tools/kernels_hub.py build/kernels-hub

The hub loads a kernel from any path, several versions in one process: imports become relative, and the operators get a
namespace of their own in `torch.ops`. One copy for each backend, because dependencies are declared for each. The Triton
kernels are the fast ones there; the C++ kernels, which are compiled when ppma is installed, are left out.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

OPS = Path(__file__).parents[1] / "src" / "ppma" / "ops"
NAME, VERSION = "ppma", 1
BACKENDS = ("cpu", "cuda", "rocm")


def sources() -> dict[Path, str]:
    """The modules of `ppma.ops` by their path in it, without the C++ backend, importable from anywhere."""
    files = [path for path in sorted(OPS.rglob("*.py")) if "native" not in path.relative_to(OPS).parts]
    return {path.relative_to(OPS): make_relative(path.read_text(), path.relative_to(OPS)) for path in files}


def make_relative(code: str, path: Path) -> str:
    """Rewrite `from ppma.ops.x import y` for the module at `path`."""
    dots = "." * len(path.parts)
    return re.sub(r"^( *from )ppma\.ops\.?( ?)", lambda found: f"{found[1]}{dots}{found[2]}", code, flags=re.MULTILINE)


def write(target: Path) -> str:
    """Write the repository.

    Args:
        target: its folder; one that exists is replaced.

    Returns:
        The digest of the sources, part of the operators' namespace in `torch.ops`.
    """
    modules = sources()
    digest = hashlib.sha256("".join(modules.values()).encode()).hexdigest()[:7]
    shutil.rmtree(target, ignore_errors=True)
    for backend in BACKENDS:
        variant, namespace = target / "build" / f"torch-{backend}", f"_{NAME}_{backend}_{digest}"
        for path, code in modules.items():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            code = re.sub(r"\bppma::", f"{namespace}::", code)
            (variant / path).write_text(re.sub(r"\btorch\.ops\.ppma\b", f"torch.ops.{namespace}", code))
        metadata = {
            "name": NAME,
            "id": namespace,
            "version": VERSION,
            "license": "apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (target / "README.md").write_text(
        "---\nlibrary_name: kernels\nlicense: apache-2.0\n---\n\n"
        "Attention masked along the polyline paths of a 2D grid (Zhao et al., NeurIPS 2025): the operators of ppma, "
        "with Triton kernels for CUDA and ROCm and plain PyTorch elsewhere.\n"
    )
    return digest


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/kernels_hub.py FOLDER")
    print(write(Path(sys.argv[1])))
