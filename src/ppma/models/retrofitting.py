"""Masked attention in a pretrained ViT of timm: `retrofit`, and files that rebuild the result."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ppma import config as configs
from ppma import masks
from ppma.layers.attention import ATTENTION_KINDS
from ppma.layers.retrofit import RETROFIT_DECAYS, GridRecorder, RetrofitAttention, unsupported_reason
from ppma.models.checkpoints import CheckpointError, open_checkpoint
from ppma.models.checkpoints.metadata import mapping, task_key
from ppma.models.checkpoints.weights import build, load_weights
from ppma.models.checkpoints.writer import write_safetensors
from ppma.ops import checks
from ppma.ops.options import COMBINES, Combine

Vit = TypeVar("Vit", bound=nn.Module)
MASKS = tuple(name for name, kind in masks.KINDS.items() if kind.learned)
_KEY = task_key("retrofit")
_AGREEMENT = 1e-3  # relative; the same weights on the same device differ by rounding only


@dataclasses.dataclass(frozen=True)
class RetrofitConfig:
    """The arguments of `retrofit`.

    Attributes:
        mask: "cross", "hilbert", "v2h", "2d" or "shared".
        kind: "full", "criss_cross", "linear" or "decomposed".
        combine: "logit" or "hadamard".
        decay: "zero", "relu" or "softplus".
        blocks: indices of the blocks with masked attention; None for all.
    """

    mask: str = "2d"
    kind: str = "full"
    combine: Combine = "logit"
    decay: str = "zero"
    blocks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks.one_of("mask", self.mask, MASKS)
        checks.one_of("kind", self.kind, ATTENTION_KINDS)
        checks.one_of("combine", self.combine, COMBINES)
        checks.one_of("decay", self.decay, RETROFIT_DECAYS)


def retrofit(
    vit: Vit,
    *,
    mask: str = "2d",
    kind: str = "full",
    combine: Combine = "logit",
    decay: str = "zero",
    blocks: Sequence[int] | None = None,
) -> Vit:
    """Give the attention of a timm ViT a structured mask with learned decays; its weights are kept.

    With the defaults the model computes the same function as before: all log-decays start at 0. Fine-tuning then learns
    them. Class and register tokens are not masked; learned positions, RoPE, QK norms and gates stay as they are. With
    such tokens, "logit" runs on the dense mask, O(N^2) memory.

    Args:
        vit: a `VisionTransformer` or `Eva` of timm (ViT, DeiT, DINOv2, DINOv3, EVA-02, ...), which is changed in place.
        mask: "2d", "v2h", "shared", "cross" or "hilbert".
        kind: "full"; "criss_cross", "linear" and "decomposed" replace the softmax over all tokens and change the
            function. "criss_cross" takes no class or register tokens.
        combine: "logit" (mask inside the softmax, paths averaged) or "hadamard" (after the softmax, paths summed: with
            the two paths of "2d" the attention starts at twice its former output).
        decay: the decay head. "zero" starts at log-decays of 0; "relu" and "softplus" start at small random decays.
        blocks: indices of the blocks to change, negative ones from the end; all if None.

    Returns:
        The same model. Its `state_dict()` has the same names and those of the decay heads, `blocks.0.attn.decay.*`.

    Raises:
        ValueError: the model has a part that masked attention cannot keep; the model is unchanged.

    Examples:
        >>> import timm, torch, ppma
        >>> vit = timm.create_model("test_vit").eval()
        >>> image = torch.randn(1, 3, 160, 160)
        >>> before = vit(image)
        >>> torch.allclose(ppma.retrofit(vit)(image), before, atol=1e-5)
        True
    """
    config = RetrofitConfig(mask, kind, combine, decay, None if blocks is None else tuple(blocks))
    model: Any = vit
    chosen = _check(model, config)
    recorder = GridRecorder()
    options = {field: getattr(config, field) for field in ("mask", "kind", "combine", "decay")}
    for block in chosen:
        block.attn = RetrofitAttention(block.attn, recorder, model.num_prefix_tokens, **options).train(block.training)
    model.patch_embed.register_forward_hook(recorder)
    model.retrofit_config = config
    return vit


def _check(vit: Any, config: RetrofitConfig) -> list[Any]:
    """The blocks to change; a ValueError if one cannot be changed."""
    if not isinstance(vit, (VisionTransformer, Eva)):
        raise ValueError(f"vit: expected a VisionTransformer or Eva of timm, got {type(vit).__name__}")
    if hasattr(vit, "retrofit_config"):
        raise ValueError("vit: expected a model without masked attention, got one that was retrofitted before")
    if not isinstance(getattr(vit, "patch_drop", None), (nn.Identity, type(None))):
        raise ValueError("vit: expected patch_drop_rate=0, a mask needs the whole grid of patches")
    if not hasattr(vit.patch_embed, "dynamic_feat_size"):
        raise ValueError(f"vit: expected a patch embedding with a grid, got {type(vit.patch_embed).__name__}")
    if config.kind == "criss_cross" and vit.num_prefix_tokens:
        raise ValueError(f"kind: criss_cross takes no prefix tokens, the model has {vit.num_prefix_tokens}")
    count = len(vit.blocks)
    indices = range(count) if config.blocks is None else config.blocks
    wrong = [index for index in indices if not -count <= index < count]
    if wrong:
        raise ValueError(f"blocks: expected indices from {-count} to {count - 1}, got {wrong[0]}")
    for index in indices:
        block = vit.blocks[index]
        if not hasattr(block, "attn"):
            raise ValueError(f"vit: blocks[{index}]: expected a block with an attention, got {type(block).__name__}")
        reason = unsupported_reason(block.attn)
        if reason is not None:
            raise ValueError(f"vit: blocks[{index}]: {reason}")
    return [vit.blocks[index] for index in sorted({index % count for index in indices})]


def save_retrofit(vit: nn.Module, path: str | Path, *, check: bool = True, **model_args: Any) -> None:
    """Write a retrofitted ViT to one safetensors file, from which `load_retrofit` rebuilds it.

    The file has the weights, timm's name of the model, and the arguments of `timm.create_model` and `retrofit`.

    Args:
        vit: returned by `retrofit`, built by `timm.create_model`.
        path: of the file.
        check: rebuild the model and compare the outputs for one image before writing.
        model_args: arguments that `timm.create_model` was given. `num_classes`, `in_chans`, `img_size`,
            `dynamic_img_size` and `global_pool` are read from the model.

    Raises:
        ValueError: the file would rebuild another model.

    Examples:
        >>> import tempfile, timm, ppma
        >>> vit = ppma.retrofit(timm.create_model("test_vit", num_classes=10), mask="v2h")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ppma.save_retrofit(vit, f"{folder}/vit.safetensors")
        ...     ppma.load_retrofit(f"{folder}/vit.safetensors").retrofit_config.mask
        'v2h'
    """
    config = getattr(vit, "retrofit_config", None)
    if not isinstance(vit, (VisionTransformer, Eva)) or not isinstance(config, RetrofitConfig):
        raise ValueError(f"vit: expected a model of `ppma.retrofit`, got {type(vit).__name__}")
    name = (getattr(vit, "pretrained_cfg", None) or {}).get("architecture")
    if not name or not timm.is_model(name):
        raise ValueError("vit: expected a model built by timm.create_model, whose name the file keeps")
    facts = {"model": name, "model_args": {**_arguments(vit), **model_args}, "retrofit": dataclasses.asdict(config)}
    try:
        text = json.dumps(facts)
    except TypeError as error:
        raise ValueError(f"model_args: expected numbers, strings and lists ({error})") from None
    state = vit.state_dict()
    if check:
        _check_rebuilt(vit, _rebuild(mapping(text, str(path)), state, "model_args"))
    write_safetensors(path, state, {"format": "pt", _KEY: text})


def _arguments(vit: Any) -> dict[str, Any]:
    """The arguments of `timm.create_model` that the model shows."""
    embedding = vit.patch_embed
    shown = {
        "num_classes": vit.num_classes,
        "in_chans": next(m.in_channels for m in embedding.modules() if isinstance(m, nn.Conv2d)),
        "img_size": embedding.img_size,
        "dynamic_img_size": getattr(vit, "dynamic_img_size", None),
        "global_pool": vit.global_pool,
    }
    return {name: value for name, value in shown.items() if value is not None}


@torch.no_grad()
def _check_rebuilt(vit: Any, rebuilt: nn.Module) -> None:
    parameter = next(vit.parameters())
    size = vit.patch_embed.img_size or (224, 224)
    channels = next(m.in_channels for m in vit.patch_embed.modules() if isinstance(m, nn.Conv2d))
    image = torch.randn(1, channels, *size, device=parameter.device, dtype=parameter.dtype)
    training = vit.training
    try:
        before = vit.eval()(image)
    finally:
        vit.train(training)
    after = rebuilt.to(parameter.device, parameter.dtype)(image)
    if (after - before).abs().max() > _AGREEMENT * before.abs().max():
        raise ValueError(
            "model_args: expected the arguments of timm.create_model that built the model, its outputs differ"
        )


def load_retrofit(path: str | Path) -> nn.Module:
    """Load a ViT that `save_retrofit` wrote, in evaluation mode; nothing in a file is executed.

    Args:
        path: of the file.

    Raises:
        CheckpointError: the file is damaged, is another model's, or does not fit.
    """
    checkpoint = open_checkpoint(path)
    if _KEY not in checkpoint.metadata:
        raise CheckpointError(f"{checkpoint.path}: expected a file of `save_retrofit`, got another model's")
    facts = mapping(checkpoint.metadata[_KEY], f"{checkpoint.path}: {_KEY}")
    return _rebuild(facts, checkpoint.contents, str(checkpoint.path))


def _rebuild(facts: dict[str, Any], state: dict[str, Tensor], source: str) -> nn.Module:
    name, model_args, arguments = (facts.get(key) for key in ("model", "model_args", "retrofit"))
    if not isinstance(name, str) or not timm.is_model(name):
        raise CheckpointError(f"{source}: expected the name of a model of timm {timm.__version__}, got {name!r}")
    if not isinstance(model_args, dict) or not isinstance(arguments, dict):
        raise CheckpointError(f"{source}: expected model_args and retrofit as mappings")
    # Constructor arguments alone: create_model takes others that read files.
    known = inspect.signature(VisionTransformer).parameters.keys() | inspect.signature(Eva).parameters.keys()
    unknown = sorted(model_args.keys() - known)
    if unknown:
        raise CheckpointError(f"{source}: model_args: expected arguments of a ViT, got {unknown[0]!r}")
    depth = model_args.get("depth", 0)
    if not isinstance(depth, int) or depth > len(state):  # before building that many blocks
        raise CheckpointError(f"{source}: expected weights of {depth} blocks, got {len(state)} tensors")
    try:
        config = configs.build(RetrofitConfig, arguments, source=source)
    except ValueError as error:
        raise CheckpointError(str(error)) from None

    def make() -> nn.Module:
        return retrofit(timm.create_model(name, **model_args), **dataclasses.asdict(config))

    return _with_weights(make, state, source)


def _with_weights(make: Callable[[], nn.Module], state: dict[str, Tensor], source: str) -> nn.Module:
    try:
        if hasattr(timm.layers, "calculate_drop_path_rates"):
            return build(make, state, source=source)
        model = make()  # older versions of timm cannot build a model on the meta device
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{source}: cannot be built: {str(error).splitlines()[0]}") from None
    load_weights(model, state, source=source)
    return model.eval()
