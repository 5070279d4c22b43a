"""Files of `torch.save`, read without executing pickled code."""

import pickletools
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from ppma.models.checkpoints.weights import CheckpointError, unreadable

_LONGEST_PICKLE = 64 << 20  # without tensors; a checkpoint of PPMA-B with its optimizer has 1 MB
_PICKLES = 5  # in a file from before PyTorch 1.6: magic number, version, system, contents, tensor names


class _Inert:
    """Replaces the objects that training programs store next to weights; empty, whatever it is built from."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# Classes and functions that appear in ordinary training checkpoints: arguments, logs, numpy values.
_REPLACED = (
    "argparse.Namespace",
    "mmengine.config.config.ConfigDict",
    "mmengine.logging.history_buffer.HistoryBuffer",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
)
# All that a dictionary of dense tensors and plain values needs. PyTorch would also build sparse, quantised and meta
# tensors, and buffers of any size that a file asks for.
_TENSORS = (
    "__builtin__.set",
    "_codecs.encode",
    "builtins.set",
    "collections.Counter",
    "collections.OrderedDict",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch.Size",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
)
_OTHER_TENSORS = ("sparse", "_rebuild_qtensor", "_rebuild_meta", "_rebuild_nested", "_rebuild_wrapper")
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # start of files from before PyTorch 1.6


def read_torch(file: IO[bytes], path: Path) -> Any:
    """Read an open file of `torch.save`: dense tensors and plain containers only.

    Args:
        file: positioned at its start.
        path: of the file, for messages.

    Raises:
        CheckpointError: it is damaged, or could only be loaded by executing pickled code.
    """
    inert: list[Any] = [(_Inert, name) for name in _REPLACED]
    try:
        _check_globals(path, _pickled(file, path))
        file.seek(0)
        with torch.serialization.safe_globals(inert), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about storages and versions, which a user cannot change
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise unreadable(path, error) from None


def _pickled(file: IO[bytes], path: Path) -> bytes:
    """The pickles of a file of `torch.save`, whose parts are checked to be no larger than the file."""
    start = file.read(len(_LEGACY_MAGIC))
    if not start:
        raise unreadable(path, "it is empty")
    if not start.startswith(b"PK"):
        if not start.startswith(b"\x80"):
            raise CheckpointError(
                f"{path}: not a weight file: expected torch.save or safetensors, got a file that starts with {start!r}"
            )
        return start + file.read(_LONGEST_PICKLE)  # the tensors that follow are not read as pickles
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        claimed, held = sum(member.file_size for member in members), path.stat().st_size
        if claimed > held or any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointError(
                f"{path}: expected uncompressed parts of at most {held:,} bytes, the size of the file, got {claimed:,}"
            )
        if (damaged := archive.testzip()) is not None:
            raise unreadable(path, f"wrong checksum of {damaged}")
        pickled = [member for member in members if member.filename.endswith("data.pkl")]
        if len(pickled) != 1 or pickled[0].file_size > _LONGEST_PICKLE:
            raise unreadable(path, "expected one data.pkl of at most 64 MB in the archive")
        return archive.read(pickled[0])


def _check_globals(path: Path, content: bytes) -> None:
    """Raise a CheckpointError if a pickle names anything but what builds dense tensors."""
    for name in _globals(content):
        known = name in _TENSORS or name in _REPLACED or _is_element_type(name)
        if any(kind in name for kind in _OTHER_TENSORS):
            raise CheckpointError(f"{path}: expected dense tensors, got {name}")
        if not known:
            raise CheckpointError(
                f"{path}: refused, because it holds more than tensors and loading that could run code. Load it where "
                f'you trust it and save its weights alone: torch.save({{"model": state_dict}}, ...). '
                f"It names: {name[:100]}"
            )


def _is_element_type(name: str) -> bool:
    """Whether a name is one such as torch.FloatStorage or torch.float32."""
    module, _, leaf = name.rpartition(".")
    return module == "torch" and (leaf.endswith("Storage") or isinstance(getattr(torch, leaf, None), torch.dtype))


def _globals(content: bytes) -> Iterator[str]:
    """The names that a file's pickles import; a file from before PyTorch 1.6 has several pickles in a row."""
    for _ in range(_PICKLES if content.startswith(_LEGACY_MAGIC) else 1):
        words: list[str] = []  # STACK_GLOBAL takes its two names from preceding strings
        length = 0
        for opcode, argument, position in pickletools.genops(content):
            if opcode.name in ("GLOBAL", "INST"):
                yield str(argument).replace(" ", ".")
            elif opcode.name == "STACK_GLOBAL":
                yield ".".join(words[-2:])
            elif isinstance(argument, str):
                words.append(argument)
            length = (position or 0) + 1
        content = content[length:]
