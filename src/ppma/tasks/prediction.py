"""What every task's `predict` shares: options, and the folder of result files."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ppma.atomic import write_atomically
from ppma.data.decoding import IMAGE_SUFFIXES
from ppma.outputs import png_bytes


@dataclass(frozen=True)
class PredictOptions:
    """The options of `predict` that every task has.

    Attributes:
        out: folder for the result files; None to write none.
        overwrite: replace result files of an earlier call.
        device: "cpu", "cuda", "cuda:1", ...; None for the GPU if there is one.
    """

    out: str | None = None
    overwrite: bool = False
    device: str | None = None


class ResultFolder:
    """The folder of result files; without one nothing is written.

    The names are checked before there is anything to write. Images of one stem (a/1.jpg, b/1.png) get the stems 1 and
    1_2.

    Args:
        out: path of the folder, or None.
        paths: the images, all different.
        suffixes: ends of the files of each image, such as "_overlay.png".
        names: the files about all images.
        overwrite: allow such files in the folder, and replace them.

    Attributes:
        path: of the folder, or None.

    Raises:
        ValueError: the folder cannot be written, or has such files.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as out:
        ...     folder = ResultFolder(out, [Path("a/1.jpg"), Path("b/1.png")], ["_overlay.png"])
        ...     [folder.target(Path(name), "_overlay.png").name for name in ("a/1.jpg", "b/1.png")]
        ['1_overlay.png', '1_2_overlay.png']
    """

    def __init__(
        self,
        out: str | None,
        paths: Sequence[Path] = (),
        suffixes: Sequence[str] = (),
        names: Sequence[str] = (),
        *,
        overwrite: bool = False,
    ) -> None:
        self.path = None if out is None else Path(out)
        self._stems = _different_stems(paths)
        if self.path is None:
            return
        if self.path.suffix.lower() in IMAGE_SUFFIXES and not self.path.is_dir():
            raise ValueError(f"out: expected a folder, got the name of an image, {self.path}")
        images = {path.resolve() for path in paths}
        for name in [*names, *(stem + suffix for stem in self._stems.values() for suffix in suffixes)]:
            if (self.path / name).resolve() in images:
                raise ValueError(f"out: expected a folder in which {name} is not one of the images, got {self.path}")
            if not overwrite and (self.path / name).exists():
                raise ValueError(f"out: expected a folder without {name}, got {self.path}; --overwrite replaces it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(f"out: {self.path}: {error.strerror}") from None

    def target(self, path: Path, suffix: str) -> Path | None:
        """The file of an image with this end; None without a folder."""
        return None if self.path is None else self.path / f"{self._stems[path]}{suffix}"

    def write_image(self, path: Path, suffix: str, picture: Image.Image) -> str:
        """Write a picture about the image `path` and return the path of the file; there must be a folder."""
        target = self.target(path, suffix)
        assert target is not None
        write_atomically(target, png_bytes(picture))
        return str(target)

    def write(self, name: str, content: bytes) -> None:
        """Write a file about all images, if there is a folder."""
        if self.path is not None:
            write_atomically(self.path / name, content)


def _different_stems(paths: Sequence[Path]) -> dict[Path, str]:
    """A stem for each path, different on file systems that ignore case too."""
    stems: dict[Path, str] = {}
    taken: set[str] = set()
    for path in paths:
        stem, number = path.stem, 1
        while stem.casefold() in taken:
            number += 1
            stem = f"{path.stem}_{number}"
        taken.add(stem.casefold())
        stems[path] = stem
    return stems
