"""The sdist and the wheel: complete, reproducible, working in an environment with nothing but their dependencies.

Nothing is downloaded: the packages of the running environment are linked into new ones, those alone that ppma requires.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EPOCH = "1700000000"
BUILD = "import setuptools.build_meta as build, sys; print(getattr(build, sys.argv[1])(sys.argv[2]))"
LIBRARIES = {"portable", "avx2", "avx512"} if os.uname().machine == "x86_64" else {"portable"}


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
    return {**kept, **changes}


def run(*command, ok=True, cwd="/", **changes):
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment(**changes), capture_output=True, text=True
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(what, source, target, **changes):
    target.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-c", BUILD, f"build_{what}", target, cwd=source, SOURCE_DATE_EPOCH=EPOCH, **changes)
    return max((path for path in target.iterdir() if path.is_file()), key=lambda path: path.stat().st_mtime)


def copy_sources(folder):
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shipping")


@pytest.fixture(scope="module")
def sdist(folder):
    (folder / "first").mkdir()
    return build("sdist", copy_sources(folder / "first"), folder / "dist")


def unpack(sdist, folder):
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def wheel(sdist, folder):
    return build("wheel", unpack(sdist, folder / "unpacked"), folder / "dist", PPMA_REQUIRE_NATIVE="1")


def closure(requirements):
    """The installed distributions that these need."""
    found, waiting = {}, [(requirement, "") for requirement in requirements]
    while waiting:
        line, extra = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        new = requirement.name not in found
        dist = found.setdefault(requirement.name, metadata.distribution(requirement.name))
        for extra in requirement.extras or ([""] if new else []):
            waiting += [(line, extra) for line in dist.requires or ()]
    found.pop("ppma", None)
    return found.values()


def make_environment(folder, *requirements):
    """A virtual environment with pip and links to what `requirements` need."""
    venv.create(folder, with_pip=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for path in packages.iterdir():  # Python 3.11 brings a setuptools that is too old
        if path.is_dir() and not path.name.startswith("pip"):
            shutil.rmtree(path)
    for dist in closure(requirements):
        for top in {file.parts[0] for file in dist.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if (packages / top).exists():
                continue
            if top.endswith("-info"):  # uv does not follow links to find what is installed
                shutil.copytree(dist.locate_file(top), packages / top)
            else:
                (packages / top).symlink_to(dist.locate_file(top))
    return folder / "bin"


@pytest.fixture(scope="module")
def light(folder, wheel):
    """The wheel installed without extras."""
    programs = make_environment(folder / "light", *metadata.requires("ppma"))
    run(programs / "pip", "install", "--no-index", wheel)  # resolves: a missing requirement fails
    return programs


def test_wheel_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and not {"csrc", "__pycache__"} & set(path.parts) and ".egg-info" not in str(path)
    }
    built = {f"ppma/ops/backends/native/libppma_{name}.so" for name in LIBRARIES}
    assert {name for name in names if ".dist-info" not in name} == data | built
    assert "-py3-none-" in wheel.name


def test_builds_reproducible(sdist, wheel, tmp_path):
    """Two folders, two times, the same bytes."""
    (tmp_path / "second").mkdir()
    again = build("sdist", copy_sources(tmp_path / "second"), tmp_path)
    assert again.read_bytes() == sdist.read_bytes()
    assert build("wheel", tmp_path / "second", tmp_path).read_bytes() == wheel.read_bytes()


def test_light_installation(light, tmp_path):
    said = run(light / "ppma", "doctor")
    assert str(light.parent) in said.splitlines()[0]
    assert " in use (" in said
    assert "[export]      missing: pip install 'onnx>=1.17'" in said
    assert "ppma_nano" in run(light / "ppma", "info")
    assert len(run(light / "ppma", "recipes").splitlines()) > 40
    code = "import ppma, timm; print(timm.create_model('ppma_nano', pretrained=True).num_classes)"
    assert run(light / "python", "-c", code, HF_HUB_OFFLINE="1") == "10\n"
    figure = run(light / "ppma", "figure", "masks", "--out", tmp_path / "masks.png", ok=False)
    assert figure == "ppma figure: needs the package 'matplotlib': pip install 'matplotlib>=3.8'\n"


def test_demo(folder, wheel, tmp_path):
    programs = make_environment(folder / "train", "ppma[train]")
    run(programs / "pip", "install", "--no-index", wheel)
    said = run(programs / "ppma", "demo", "--out", tmp_path / "demo", "epochs=1", cwd=tmp_path)
    assert "accuracy" in said
    assert (tmp_path / "demo" / "inside.png").exists()


def test_installation_without_compiler(sdist, folder):
    programs = make_environment(folder / "bare", *metadata.requires("ppma"))
    options = ("install", "--no-index", "--no-build-isolation", "--verbose", sdist)
    nowhere = {"PATH": str(programs)}
    assert "CPU kernels were not built" in run(programs / "pip", *options, ok=False, PPMA_REQUIRE_NATIVE="1", **nowhere)
    assert "THE CPU KERNELS WERE NOT BUILT for portable" in run(programs / "pip", *options, **nowhere)
    said = run(programs / "ppma", "doctor", **nowhere)
    assert "CPU kernels   not built" in said
    assert "C++ compiler  none ('c++' is not on the path)" in said
    code = "import torch, ppma; x = torch.zeros(2, 2, 1); [ppma.polyline_scan(x, x[..., 0], x[..., 0]) for _ in 'ab']"
    assert run(programs / "python", "-c", code, **nowhere).count("RuntimeWarning: ppma runs in plain PyTorch") == 1


def test_installation_with_uv(sdist, folder):
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    programs = make_environment(folder / "uv", *metadata.requires("ppma"))
    options = ("--python", programs / "python", "--no-build-isolation", "--no-index", "--no-cache")
    run(uv, "pip", "install", *options, sdist, CXX="false")
    assert "operator calls (27 torch) match" in run(programs / "ppma", "doctor", CXX="false")
