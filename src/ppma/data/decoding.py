"""Decoding of image files into upright RGB images and label maps."""

import contextlib
import functools
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from ppma.data.errors import BrokenSampleError, LabelFormatError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
MAX_RATIO = 100  # of the sides: resized for a model, a longer image would vanish in one direction or be enormous

_LARGEST_INTEGER = 65535
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_INDEX_MODES = ("1", "L", "P", "I", *_SIXTEEN_BITS)
_LOSSY = ("JPEG", "MPO", "JPEG2000")
_STRETCHED = {"L;2": 85, "L;4": 17}  # Pillow scales 2- and 4-bit grey values to 0..255 by these factors

# The transpositions that make EXIF orientations 2 to 8 upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FIRST_SIDEWAYS = 5  # orientations from this one on swap width and height


Report = Callable[[str], None]


def decode(file: str | Path | BinaryIO, name: str, *, frame: tuple[int, int] | None = None) -> Image.Image:
    """Decode an image to RGB, upright according to EXIF.

    16-bit values are divided by 65535; floating-point values must be in [0, 1]. Transparent images are composited on
    white.

    Args:
        file: a path, or a file opened in binary mode.
        name: name of the file in messages.
        frame: (width, height) of the annotations. If only the stored, unrotated image has this size, it is not
            rotated.

    Raises:
        BrokenSampleError: the file cannot be read as an image.

    Examples:
        >>> import io
        >>> from PIL import Image
        >>> from ppma.data.decoding import decode
        >>> file = io.BytesIO()
        >>> Image.new("L", (4, 3)).save(file, "PNG")
        >>> decode(file, "grey.png").mode
        'RGB'
    """
    with _opened(file, name) as image:
        if max(image.size) > MAX_RATIO * min(image.size):
            raise ValueError(
                f"expected sides in a ratio of at most {MAX_RATIO} to 1, got {image.width} x {image.height}"
            )
        image.load()
        stored, orientation = image.size, _orientation(image)
        upright = stored[::-1] if orientation >= _FIRST_SIDEWAYS else stored
        rgb = _to_rgb(image)
        return rgb if frame == stored != upright else _to_upright(rgb, orientation)


def decode_labels(path: Path) -> np.ndarray:
    """Decode the integers of a label map, (H, W): the stored values, or palette indices.

    Raises:
        BrokenSampleError: the file cannot be read as an image.
        LabelFormatError: the file does not hold one integer for each pixel.
    """
    with _opened(path, str(path)) as image:
        if image.format in _LOSSY:
            raise LabelFormatError(f"{path}: expected a lossless PNG, got {image.format}, which changes labels")
        if image.mode not in _INDEX_MODES:
            raise LabelFormatError(
                f"{path}: expected one label for each pixel (grey values or a palette), got {image.mode} pixels"
            )
        stretched = _STRETCHED.get(_raw_mode(image), 1)
        image.load()
        return np.asarray(_to_upright(image, _orientation(image))) // stretched


def image_size(path: Path, frame: tuple[int, int]) -> tuple[int, int]:
    """The (width, height) of what `decode` returns for the same frame, read from the file's header."""
    with _opened(path, str(path)) as image:
        sideways = image.size != frame and _orientation(image) >= _FIRST_SIDEWAYS
        return image.size[::-1] if sideways else image.size


def image_files(images: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """Expand folders to the images in them, and patterns such as `photos/**/*.jpg` to the images that match.

    Returns:
        The paths, each once; a path that was given need not exist. And a message for each folder and pattern without
        images.
    """
    paths: list[Path] = []
    problems: list[str] = []
    for given in map(Path, images):
        if given.is_dir():
            try:
                inside = sorted(given.iterdir())
            except OSError as error:
                problems.append(f"{given}: {error.strerror}")
                continue
        elif glob.has_magic(str(given)) and not given.exists():
            inside = [Path(name) for name in sorted(glob.glob(str(given), recursive=True))]
        else:
            paths.append(given)
            continue
        found = [path for path in inside if path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()]
        if not found:
            folders = sum(path.is_dir() for path in inside)
            where = "in this folder" if given.is_dir() else "that match"
            problems.append(
                f"{given}: expected images ({', '.join(IMAGE_SUFFIXES)}) {where}, "
                f"found {len(inside) - folders} other files and {folders} folders"
            )
        paths += found
    return list(dict.fromkeys(paths)), problems


def read_images(
    paths: Sequence[Path], problems: Sequence[str] = (), report: Report | None = None
) -> Iterator[tuple[Path, Image.Image]]:
    """Yield each readable image with its path.

    Args:
        paths: the files.
        problems: messages of `image_files`.
        report: called with each of `problems` and a message for each unreadable file; None raises a
            BrokenSampleError instead.
    """

    def report_or_raise(problem: str) -> None:
        if report is None:
            raise BrokenSampleError(problem)
        report(problem)

    for problem in problems:
        report_or_raise(problem)
    for path in paths:
        try:
            image = decode(path, str(path))
        except BrokenSampleError as error:
            report_or_raise(str(error))
        else:
            yield path, image


@contextlib.contextmanager
def _opened(file: str | Path | BinaryIO, name: str) -> Iterator[Image.Image]:
    try:
        if isinstance(file, str | Path) and not os.path.isfile(file):  # opening a pipe would block
            raise BrokenSampleError(f"{name}: {_missing(file)}")
        with Image.open(file, formats=_formats()) as image:
            yield image
    except BrokenSampleError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything for damaged files
        raise BrokenSampleError(f"{name}: {_reason(error)}") from None


def _missing(path: str | Path) -> str:
    if os.path.isdir(path):
        return "expected an image, found a folder"
    if os.path.exists(path):
        return "expected an image, found something other than a regular file"
    if os.path.islink(path):
        return f"a link to {os.readlink(path)}, which does not exist"
    return "no such file"


def _reason(error: Exception) -> str:
    """One line without the path, which the message already has."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or damaged at its beginning"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


@functools.cache
def _formats() -> tuple[str, ...]:
    """All formats of Pillow except EPS, for which it would run Ghostscript."""
    Image.init()
    return tuple(name for name in Image.ID if name != "EPS")


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) to 8; 1 if the EXIF block is damaged."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
        return found if found in _UPRIGHT else 1
    except Exception:  # as in `_opened`
        return 1


def _to_upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("F", "I", *_SIXTEEN_BITS):
        return _to_eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        overlay = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), overlay).convert("RGB")
    return image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey values, or floats in [0, 1], to 0..255; `convert` would clip them."""
    values = np.asarray(image)
    largest = 1 if image.mode == "F" else _LARGEST_INTEGER
    least, most = values.min(), values.max()
    if not (least >= 0 and most <= largest):  # false for NaN
        raise ValueError(f"expected {image.mode} pixels from 0 to {largest}, found {least:g} to {most:g}")
    return Image.fromarray(np.rint(values * (255 / largest)).astype(np.uint8))


def _raw_mode(image: Image.Image) -> Any:
    """Pillow's name for the pixel layout in the file."""
    arguments = image.tile[0][3] if getattr(image, "tile", None) else None  # type: ignore[attr-defined]
    return arguments[0] if isinstance(arguments, tuple) and arguments else arguments
