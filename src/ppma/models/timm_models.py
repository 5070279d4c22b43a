"""Models of timm other than ours: names, arguments, preprocessing and pretrained weights."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
from timm.models import get_pretrained_cfg, is_model, split_model_name_tag
from torch import Tensor, nn

from ppma.models.config import CONFIGS

# Where weights come from is not the file's or `model_args`' to say: timm would read any path.
_RESERVED = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "num_classes")


def is_timm(name: object) -> bool:
    """Whether this is a model of timm that is not one of ours, with or without a tag of its weights."""
    if not isinstance(name, str) or ":" in name:
        return False
    architecture, tag = split_model_name_tag(name)
    return architecture not in CONFIGS and is_model(architecture) and (not tag or _pretrained_cfg(name) is not None)


def _pretrained_cfg(name: str) -> Any:
    """The description of a model in timm, None for an unknown tag and for models without one."""
    try:
        return get_pretrained_cfg(name)
    except RuntimeError:
        return None


def check_model(name: str, arguments: Mapping[str, Any], key: str = "model") -> None:
    """Check the name of a model, ours or timm's, and the arguments it is built with; `key` is for messages.

    Raises:
        ValueError: the name is unknown, with the nearest one, or an argument is not accepted.
    """
    if name in CONFIGS:
        CONFIGS[name].replace(**arguments)
        return
    if not is_timm(name):
        architecture = name.lower().partition(".")[0]
        known = timm.list_pretrained(f"{architecture}.*") if is_model(architecture) else [*CONFIGS, *timm.list_models()]
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{key}: expected one of {', '.join(CONFIGS)}, or a model of timm, got {name!r}{hint}")
    TimmModel(name, dict(arguments))


@dataclass(frozen=True)
class TimmModel:
    """A model of timm, as a weight file stores it.

    Attributes:
        name: of the model, with or without a tag: "resnet18", "resnet18.a1_in1k".
        args: arguments of `timm.create_model`, plain values.

    Examples:
        >>> TimmModel("resnet18").create(num_classes=3).num_classes
        3
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_timm(self.name) or not isinstance(self.args, dict):
            raise ValueError(f"expected the name and arguments of a model of timm, got {self.name!r}, {self.args!r}")
        for key in _RESERVED:
            if key in self.args:
                raise ValueError(f"model_args.{key}: expected no value, `init` and `pretrained` select weights")

    def create(self, *, weights: Mapping[str, Tensor] | None = None, pretrained: bool = False, **more: Any) -> Any:
        """Build the model.

        Args:
            weights: of the whole model, whose head may differ.
            pretrained: load timm's weights, downloaded unless they are in the cache.
            more: further arguments of `timm.create_model`.

        Raises:
            ValueError: the model does not take these arguments, or timm has no weights for it.
            ConnectionError: the weights can be neither downloaded nor found in the cache.
        """
        overlay = {"state_dict": dict(weights)} if weights is not None else {}
        if pretrained:
            overlay = _find_weights(self.name)
        try:
            model: Any = timm.create_model(
                self.name,
                pretrained=pretrained or weights is not None,
                pretrained_cfg_overlay=overlay or None,
                **self.args,
                **more,
            )
        except OSError as error:
            raise _download_error(self.name, error) from None
        except (TypeError, AssertionError, RuntimeError, AttributeError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"model: timm cannot build {self.name} with {self.args or 'its defaults'}: {reason}"
            ) from None
        model.pretrained_cfg.pop("state_dict", None)
        if "img_size" in self.args:
            size = self.args["img_size"]
            model.pretrained_cfg["input_size"] = (3, *(size if isinstance(size, list | tuple) else (size, size)))
        model.timm_model = self
        return model

    def classifier(self, num_classes: int, image_size: int | None = None, **options: Any) -> nn.Module:
        """Build a classifier for square images.

        Args:
            num_classes: number of classes.
            image_size: side of the images; None for the model's own. Models with position embeddings of one size are
                built for it.
            options: see `create`.
        """
        config = _pretrained_cfg(self.name)
        own = config.input_size[-1] if config is not None else image_size
        if image_size in (None, own) or config is None or not config.fixed_input_size or "img_size" in self.args:
            return self.create(num_classes=num_classes, **options)
        return TimmModel(self.name, {**self.args, "img_size": image_size}).create(num_classes=num_classes, **options)


def preprocessing_values(name: str) -> dict[str, Any]:
    """The preprocessing of a model in timm: the fields of `ppma.data.preprocessing.Preprocessing`.

    Examples:
        >>> preprocessing_values("resnet18")["image_size"]
        224
    """
    config = _pretrained_cfg(name)
    if config is None:
        return {}
    values = {
        "image_size": config.input_size[-1],
        "interpolation": config.interpolation,
        "mean": list(config.mean),
        "std": list(config.std),
        "crop_pct": config.crop_pct,
    }
    if values["interpolation"] not in ("bicubic", "bilinear", "nearest"):
        del values["interpolation"]
    return values


def _find_weights(name: str) -> dict[str, Any]:
    """The overlay with which timm finds its weights: a file of the cache, or nothing if it can download them."""
    config = _pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise ValueError(f"pretrained: timm has no weights of {name}")
    if config.hf_hub_id is None:
        return {}
    import huggingface_hub as hub

    for file in filter(None, (config.hf_hub_filename, "model.safetensors", "pytorch_model.bin")):
        cached = hub.try_to_load_from_cache(config.hf_hub_id, file)
        if isinstance(cached, str):
            return {"file": cached}
    try:  # fails at once without a network, while a download is tried again for a minute
        hub.get_hf_file_metadata(hub.hf_hub_url(config.hf_hub_id, "config.json"))
    except Exception as error:  # of huggingface_hub and of its HTTP library
        raise _download_error(name, error) from None
    return {}


def _download_error(name: str, error: Exception) -> ConnectionError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return ConnectionError(f"pretrained: the weights of {name} are not in the cache and cannot be downloaded: {reason}")
