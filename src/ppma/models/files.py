"""Weight files: our own format, and reading other people's without running what they pickled.

Our format is a safetensors file whose metadata holds the configuration, so that one file makes a model. A file may be
damaged or hostile: what it says about sizes is checked against the file itself before memory is spent on it.
"""

import contextlib
import json
import pickletools
import reprlib
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ppma.atomic import write_atomically
from ppma.models.config import BackboneConfig
from ppma.models.safetensors_header import sort_metadata

WEIGHTS_NAME = "model.safetensors"
BACKBONE_KEY = "ppma_backbone"  # in the file of a larger model: how the names of its backbone's weights begin
MMSEGMENTATION_CLASSIFIER = "decode_head.conv_seg.weight"  # by which its segmentation models are known
_MMDETECTION_HEADS = ("rpn_head.", "roi_head.", "bbox_head.", "mask_head.")  # likewise its detectors
EXTRA_STATE = "_extra_state"  # PyTorch's name for what a module's state holds beside tensors of its own
_CONFIG_KEY = "ppma_config"
_LONGEST_JSON = 16 << 20  # the names of a million classes
_LONGEST_PICKLE = 64 << 20  # tensors lie outside it; a checkpoint of PPMA-B with its optimizer has 1 MB
_LONGEST_MESSAGE = 1500
_NAMED = 5  # how many keys a message lists
_SHARED = 4  # how often the weights of one state may use the same memory
_PICKLES = (
    5  # in a file of before PyTorch 1.6: magic number, version, system, contents, names of the tensors that follow
)
_MOST_FRESH = 1 << 28  # weights that may start anew where a file need not fit: a head of a million classes
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Model = TypeVar("Model", bound=nn.Module)


class CheckpointError(ValueError):
    """A weight file that cannot be used; the message says why, in one line whatever the file's names and texts hold."""

    def __init__(self, message: str) -> None:
        line = "".join(character if character.isprintable() else " " for character in message[: 2 * _LONGEST_MESSAGE])
        super().__init__(line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} ...")


class _Inert:
    """Stands in for the objects that training programs store beside weights; holds and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# Classes and functions that appear in honest training checkpoints: arguments, logs, numpy values.
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
# What a dictionary of dense tensors and plain values is made of. PyTorch would also build sparse, quantised and meta
# tensors, and buffers as large as a file asks for.
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
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch.save began before PyTorch 1.6


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: expected a weight file, got a folder")
    if not path.is_file():
        raise FileNotFoundError(f"path: expected a weight file, found none at {path}")
    return path


def _unreadable(path: Path, reason: object) -> CheckpointError:
    first = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
    return CheckpointError(f"{path}: not a weight file, or one that is cut short or damaged ({first[:300]})")


def is_safetensors(path: str | Path) -> bool:
    """Whether a file is in the format of safetensors, by its name or else by how it begins."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return True
    try:
        with open(path, "rb") as file:
            start = file.read(9)
            return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size
    except OSError:
        return False


def read_torch(path: str | Path) -> Any:
    """What a file of `torch.save` holds, dense tensors and plain containers only.

    Raises:
        CheckpointError: it is damaged, or holds objects that could only be loaded by running code.
    """
    path = _existing(path)
    inert: list[Any] = [(_Inert, name) for name in _REPLACED]
    try:
        _check_globals(path, _pickled(path))
        with torch.serialization.safe_globals(inert), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of storages and versions: nothing that a user could act on
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise _unreadable(path, error) from None


def _pickled(path: Path) -> bytes:
    """The pickles of a file of `torch.save`, after a check that its parts are as large as they claim to be."""
    with open(path, "rb") as file:
        start = file.read(len(_LEGACY_MAGIC))
        if not start:
            raise _unreadable(path, "it is empty")
        if not start.startswith(b"PK"):
            if not start.startswith(b"\x80"):
                raise CheckpointError(
                    f"{path}: not a weight file: expected one of torch.save or of safetensors, got a file that starts "
                    f"with {start!r}"
                )
            return start + file.read(_LONGEST_PICKLE)  # tensors follow, which nobody reads as a pickle
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        claimed, held = sum(member.file_size for member in members), path.stat().st_size
        if claimed > held or any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointError(
                f"{path}: refused, because its parts would take {claimed:,} bytes and the file has {held:,}; "
                "torch.save compresses nothing"
            )
        if (damaged := archive.testzip()) is not None:
            raise _unreadable(path, f"the checksum of {damaged} is wrong")
        pickled = [member for member in members if member.filename.endswith("data.pkl")]
        if len(pickled) != 1 or pickled[0].file_size > _LONGEST_PICKLE:
            raise _unreadable(path, "expected one data.pkl of at most 64 MB in the archive")
        return archive.read(pickled[0])


def _check_globals(path: Path, content: bytes) -> None:
    """Refuse what a pickle could call beside the functions that make dense tensors."""
    for name in _globals(content):
        known = name in _TENSORS or name in _REPLACED or _is_element_type(name)
        if any(kind in name for kind in _OTHER_TENSORS):
            raise CheckpointError(f"{path}: expected dense tensors, got others ({name})")
        if not known:
            raise CheckpointError(
                f"{path}: refused, because it holds more than tensors and loading that could run code. Load it where "
                f'you trust it and save its weights alone: torch.save({{"model": state_dict}}, ...). '
                f"It names: {name[:100]}"
            )


def _is_element_type(name: str) -> bool:
    """Such as torch.FloatStorage, or torch.float32."""
    module, _, leaf = name.rpartition(".")
    return module == "torch" and (leaf.endswith("Storage") or isinstance(getattr(torch, leaf, None), torch.dtype))


def _globals(content: bytes) -> Iterator[str]:
    """The names that a file's pickles look up; a file from before PyTorch 1.6 has several, one after the other."""
    for _ in range(_PICKLES if content.startswith(_LEGACY_MAGIC) else 1):
        words: list[str] = []  # STACK_GLOBAL takes its two names from the texts before it
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


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    path = _existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # SafetensorError, OSError, and what PyTorch raises for a type it does not have
        raise _unreadable(path, error) from None


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file, without its tensors."""
    path = _existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def json_in(metadata: Mapping[str, str], key: str, source: str) -> dict[str, Any]:
    """The mapping that a file's metadata hold as JSON under a key."""
    return _mapping(metadata[key], f"{source}: {key}")


def _mapping(text: str, source: str) -> dict[str, Any]:
    if len(text) > _LONGEST_JSON:
        raise CheckpointError(f"{source}: expected at most {_LONGEST_JSON:,} characters, got {len(text):,}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: expected JSON, got {reprlib.repr(text)} ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}: expected a mapping, got {type(values).__name__}")
    return values


def config_in(metadata: Mapping[str, str], source: str) -> BackboneConfig | None:
    """The configuration in a file's metadata, None for a file that is not of our format."""
    if _CONFIG_KEY not in metadata:
        return None
    return _config(json_in(metadata, _CONFIG_KEY, source), f"{source}: {_CONFIG_KEY}")


def _config(values: Mapping[str, Any], source: str) -> BackboneConfig:
    try:
        return BackboneConfig.from_dict(values)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def encode_config(config: BackboneConfig) -> Tensor:
    """A configuration as bytes (n,), uint8: weight files hold tensors and nothing else."""
    return torch.tensor(list(json.dumps(config.to_dict()).encode()), dtype=torch.uint8)


def decode_config(encoded: object, source: str) -> BackboneConfig:
    """The inverse; the bytes may have become numbers of another type where a whole state was cast."""
    if not isinstance(encoded, Tensor) or encoded.ndim != 1 or encoded.is_meta or encoded.numel() > _LONGEST_JSON:
        raise CheckpointError(f"{source}: expected the bytes of a configuration, got {reprlib.repr(encoded)}")
    try:
        text = bytes(encoded.round().to(torch.uint8).tolist() if encoded.is_floating_point() else encoded.tolist())
        return _config(_mapping(text.decode(), source), source)
    except (ValueError, TypeError, RuntimeError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{source}: {error}") from None


def task_key(task: str) -> str:
    """Where a file's metadata say what belongs to a task."""
    return f"ppma_{task}"


def larger_model(path: str | Path) -> str | None:
    """Whether a file holds a "segmentation" or a "detection" model around its backbone, None if neither."""
    if is_safetensors(path):
        metadata = read_metadata(path)
        return next((task for task in ("detection", "segmentation") if task_key(task) in metadata), None)
    contents = read_torch(path)
    state = contents.get("state_dict") if isinstance(contents, Mapping) else None
    names = [name for name in state if isinstance(name, str)] if isinstance(state, Mapping) else []
    if MMSEGMENTATION_CLASSIFIER in names:
        return "segmentation"
    return "detection" if any(name.startswith(_MMDETECTION_HEADS) for name in names) else None


def backbone_part(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights of the backbone, in its own names; all of them unless the file is that of a larger model."""
    prefix = metadata.get(BACKBONE_KEY, "")
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def read_native(path: str | Path) -> tuple[dict[str, Tensor], BackboneConfig]:
    """Weights and configuration of a file in our format."""
    state, metadata = read_safetensors(path)
    config = config_in(metadata, str(path))
    if config is None:
        raise CheckpointError(f"{path}: expected a configuration ({_CONFIG_KEY}) in the file's metadata, found none")
    return state, config


def write_native(
    path: str | Path, state: Mapping[str, Tensor], config: BackboneConfig, extra: Mapping[str, str] | None = None
) -> None:
    """Write our format, with `extra` metadata; a file of that name is replaced only when the new one is complete."""
    metadata = {"format": "pt", _CONFIG_KEY: json.dumps(config.to_dict()), **(extra or {})}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_atomically(Path(path), sort_metadata(safetensors.torch.save(tensors, metadata)))


def check_tensors(state: Mapping[Any, Any], *, source: str) -> None:
    """Refuse names and tensors that no weight can have, before their values are looked at."""
    storages: dict[int, int] = {}
    total = 0
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{source}: expected names of weights, got {reprlib.repr(name)}")
        where = f"{source}: {name[:200]}"
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where}: expected a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise CheckpointError(f"{where}: expected a dense tensor, got {tensor.layout}, {tensor.dtype}")
        if tensor.is_meta:
            raise CheckpointError(f"{where}: expected values, got a tensor on the meta device, which has none")
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # a few bytes expanded into a shape of any size
            raise CheckpointError(
                f"{where}: expected {tensor.nbytes:,} bytes for the shape {tuple(tensor.shape)}, "
                f"got {tensor.untyped_storage().nbytes():,}"
            )
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        total += tensor.nbytes
    if total > _SHARED * sum(storages.values()):
        raise CheckpointError(f"{source}: expected {total:,} bytes of weights, got {sum(storages.values()):,}")


def _check_values(name: str, tensor: Tensor, own: Tensor, source: str) -> None:
    """Weights are finite numbers of a floating-point type; counters are whole numbers."""
    if own.is_floating_point():
        if tensor.dtype not in _FLOATING:
            raise CheckpointError(f"{source}: {name}: expected floating-point weights, got {tensor.dtype}")
        # in the type they are loaded as: 1e300 is a number in float64 and infinite in float32
        if not torch.isfinite(tensor.to(own.dtype)).all():
            raise CheckpointError(f"{source}: {name}: expected finite weights, got NaN or infinity")
    elif tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise CheckpointError(f"{source}: {name}: expected {own.dtype}, got {tensor.dtype}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def without_extra_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights alone."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(EXTRA_STATE)}


def fitting(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], *, source: str, strict: bool = True
) -> dict[str, Tensor]:
    """The weights that fit a model; each is checked.

    Args:
        own: the model's own `state_dict()`, which may be on the meta device.
        state: weights by name.
        source: named in messages.
        strict: whether names or shapes that do not fit are a CheckpointError; else they are left out with a warning,
            but if much of the model is missing it is still an error.
    """
    state, own = without_extra_state(state), without_extra_state(own)
    check_tensors(state, source=source)
    problems = {
        "missing": sorted(own.keys() - state.keys()),
        "unexpected": sorted(state.keys() - own.keys()),
        "mis-shaped": sorted(
            f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
            for name in own.keys() & state.keys()
            if own[name].shape != state[name].shape
        ),
    }
    found = {name: state[name] for name in own if name in state and state[name].shape == own[name].shape}
    text = "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names)
    fresh = sum(tensor.numel() for name, tensor in own.items() if name not in found)
    if text and (strict or 2 * len(found) < len(own) or fresh > _MOST_FRESH):
        raise CheckpointError(f"{source}: the weights do not fit the model. {text}")
    if text:
        warnings.warn(f"{source}: loaded without what does not fit. {text}", stacklevel=4)
    for name, tensor in found.items():
        _check_values(name, tensor, own[name], source)
    return found


def load_weights(model: nn.Module, state: Mapping[str, Tensor], *, source: str, strict: bool = True) -> None:
    """Load weights into a model; arguments as in `fitting`."""
    model.load_state_dict(fitting(model.state_dict(), state, source=source, strict=strict), strict=False)


def build(make: Callable[[], Model], state: Mapping[str, Tensor], *, source: str, strict: bool = True) -> Model:
    """A model with these weights, in evaluation mode.

    What to build comes from the file too, and may be of any size: it is first built on the meta device, without memory,
    and compared with the weights.

    Args:
        make: builds the model.
        state: weights by name.
        source: named in messages.
        strict: as in `fitting`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        try:
            shadow = make()
        except (RuntimeError, OverflowError) as error:  # more elements than a tensor can have
            raise CheckpointError(f"{source}: cannot be built: {str(error).splitlines()[0]}") from None
    found = fitting(shadow.state_dict(), state, source=source, strict=strict)
    model = make()
    model.load_state_dict(found, strict=False)
    return model.eval()


def check_size(config: BackboneConfig, state: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse a configuration with more blocks than the file has tensors; building them would take forever."""
    if sum(config.depths) > len(state):
        raise CheckpointError(f"{source}: expected weights of {sum(config.depths)} blocks, got {len(state)} tensors")
