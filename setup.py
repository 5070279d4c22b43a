"""Builds the native CPU kernels: C++17 with a plain C ABI, one shared library for each instruction set.

The sources see neither torch nor Python, so they compile in seconds in any build environment, and one build serves
every Python and every torch. Without a C++ compiler the package installs all the same, and says so in the build log
(`pip install --verbose`), in `ppma doctor` and in a warning on first use. PPMA_REQUIRE_NATIVE=1 makes it an error.
"""

import gzip
import io
import os
import platform
import shlex
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

NATIVE = Path("src/ppma/ops/backends/native")
SOURCES = sorted(str(path) for path in NATIVE.glob("csrc/*.cpp"))
PRELUDE = NATIVE / "csrc/prelude.h"
HEADERS = sorted(str(path) for path in NATIVE.glob("csrc/*.h"))

# One library for each instead of one for all: the linker would merge equal inline functions of translation units
# compiled for different instruction sets, and code for the newer one could run on a CPU that lacks it.
INSTRUCTION_SETS = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS["portable"] = ["-O1"]  # for CPUs of before 2013: more would add to the time of every installation
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma"]
    INSTRUCTION_SETS["avx512"] = ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma"]

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
# Contraction to fused multiply-add is the only liberty taken. -ffast-math would make the linker add code that flushes
# denormal numbers in the whole process.
COMPILE = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast", "-Wall"]


class BuildKernels(build_ext):
    """Compiles and links with the C++ compiler itself: nothing here is a Python extension module."""

    def build_extensions(self):
        self.failed = {}
        self.parallel = len(self.extensions)
        super().build_extensions()
        if not self.failed:
            return
        names = ", ".join(name for name in INSTRUCTION_SETS if name in self.failed)
        error = next(iter(self.failed.values()))
        if os.environ.get("PPMA_REQUIRE_NATIVE", "0") == "1":
            raise SystemExit(f"PPMA_REQUIRE_NATIVE=1, and the CPU kernels were not built for {names}: {error}")
        self.warn(
            f"THE CPU KERNELS WERE NOT BUILT for {names} ({error}). Without any, ppma runs in plain PyTorch, which is "
            "slower. Install a C++17 compiler (or name one in CXX), then ppma again with --no-cache-dir."
        )

    def get_ext_filename(self, fullname):
        *package, name = fullname.split(".")
        return os.path.join(*package, f"{name}.so")

    def build_extension(self, ext):
        flags = [*COMPILE, *INSTRUCTION_SETS[ext.name.rpartition("_")[2]]]
        flags += shlex.split(os.environ.get("PPMA_NATIVE_FLAGS", ""))
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp) / ext.name
        for folder in (target.parent, objects):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            flags += self._openmp(objects)
            flags += self._precompiled(flags, objects)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiled = list(pool.map(lambda source: self._compile(flags, source, objects), SOURCES))
            self._run([*flags, "-shared", *compiled, "-o", str(target)])
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)  # of an earlier build
            self.failed[ext.name.rpartition("_")[2]] = error

    def _openmp(self, folder):
        """The flag for OpenMP if the compiler has it; without it the kernels run on one thread."""
        probe = folder / "openmp.cpp"
        probe.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n")
        command = [*COMPILER, "-fopenmp", str(probe), "-o", str(probe.with_suffix(""))]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return ["-fopenmp"]
        self.warn("the compiler has no OpenMP: the CPU kernels will run on one thread")
        return []

    def _precompiled(self, flags, folder):
        """Flags that include the system headers precompiled, which is a third of the work; none where that fails."""
        copy = folder / PRELUDE.name
        copy.write_bytes(PRELUDE.read_bytes())
        command = [*COMPILER, *flags, "-x", "c++-header", str(copy), "-o", f"{copy}.gch"]
        return ["-include", str(copy)] if subprocess.run(command, capture_output=True).returncode == 0 else []

    def _compile(self, flags, source, folder):
        compiled = str(folder / f"{Path(source).stem}.o")
        self._run([*flags, "-c", source, "-o", compiled])
        return compiled

    def _run(self, arguments):
        command = [*COMPILER, *arguments]
        self.announce(shlex.join(command), level=2)
        subprocess.run(command, check=True)


class PlatformWheel(bdist_wheel):
    """The libraries depend on the platform and on no Python ABI."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class ReproducibleSdist(sdist):
    """With SOURCE_DATE_EPOCH, the same bytes for the same sources; wheels honour it without help."""

    def make_archive(self, *arguments, **options):
        path = Path(super().make_archive(*arguments, **options))
        if "SOURCE_DATE_EPOCH" not in os.environ or path.suffix != ".gz":
            return str(path)
        with tarfile.open(path) as archive:
            members = [(entry, archive.extractfile(entry)) for entry in archive if entry.isfile()]
            contents = {entry.name: (entry, stream.read()) for entry, stream in members}
        epoch = int(os.environ["SOURCE_DATE_EPOCH"])
        with (
            path.open("wb") as stream,
            gzip.GzipFile("", "wb", fileobj=stream, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for _, (entry, data) in sorted(contents.items()):
                plain = tarfile.TarInfo(entry.name)
                plain.size, plain.mtime, plain.mode = len(data), epoch, 0o755 if entry.mode & 0o100 else 0o644
                archive.addfile(plain, io.BytesIO(data))
        return str(path)


setup(
    ext_modules=[
        Extension(f"ppma.ops.backends.native.libppma_{name}", SOURCES, depends=HEADERS, optional=True)
        for name in INSTRUCTION_SETS
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel, "sdist": ReproducibleSdist},
)
