"""User images, with size limits, and the bundled sample images."""

import io
from pathlib import Path

from PIL import Image

from ppma.data.decoding import decode
from ppma.data.errors import BrokenSampleError
from ppma.ops import checks

SAMPLES = Path(__file__).parent / "samples"
MAX_BYTES = 10_000_000
MAX_PIXELS = 40_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # other Pillow formats run external programs or scripts
MAX_RATIO = 10  # aspect ratio; resizing a longer image to the model's size would make it huge


def sample_names() -> tuple[str, ...]:
    """Names of the sample images."""
    return tuple(sorted(path.stem for path in SAMPLES.iterdir() if path.suffix in (".png", ".jpg")))


def sample_path(name: str) -> Path:
    """The file of a sample image."""
    checks.one_of("sample", name, sample_names())
    return next(SAMPLES.glob(f"{name}.*"))


def read_image(path: str | Path) -> Image.Image:
    """Read an image file as RGB.

    Raises:
        ValueError: the file is too large or not an image; the message is for the user.
    """
    path = Path(path)
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError:  # the name is too long, or a folder is not accessible
        size = None
    if size is None:
        names = ", ".join(sample_names())
        raise ValueError(f"image: expected a file or a sample ({names}), found none at {str(path)[:200]}")
    if size > MAX_BYTES:
        raise ValueError(f"image: expected at most {MAX_BYTES / 1e6:g} MB, {path.name} has {size / 1e6:.1f} MB")
    return decode_image(path.read_bytes(), path.name)


def decode_image(content: bytes, name: str) -> Image.Image:
    """Decode the bytes of an image file as RGB; `name` is for messages.

    Raises:
        ValueError: the image is too large or cannot be read; the message is for the user.
    """
    file = io.BytesIO(content)
    try:
        with Image.open(file, formats=FORMATS) as header:  # reads no pixels yet
            width, height = header.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise ValueError(f"image: expected a picture ({', '.join(FORMATS)}), {name} cannot be read as one") from None
    if width * height > MAX_PIXELS:
        raise ValueError(f"image: expected at most {MAX_PIXELS / 1e6:g} megapixels, {name} has {width} x {height}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"image: expected sides in a ratio of at most {MAX_RATIO} to 1, {name} has {width} x {height}")
    try:
        return decode(io.BytesIO(content), name)
    except BrokenSampleError as error:
        raise ValueError(f"image: damaged or cut short: {error}") from None


def find_image(name: str | Path) -> Image.Image:
    """Open a sample image by name, or an image file."""
    return read_image(sample_path(str(name)) if str(name) in sample_names() else name)
