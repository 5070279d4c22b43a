"""The backbone: stem, stages, classifier head. Every variant is this class with another configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ppma.layers.attention import PolylineAttention
from ppma.layers.convolution import Conv3x3, DepthwiseConv
from ppma.layers.fused import FusedConv
from ppma.layers.stem import Stem
from ppma.layers.together import run_together
from ppma.models.card import make_card
from ppma.models.checkpoints import CheckpointError, open_checkpoint, release, write_checkpoint
from ppma.models.checkpoints.metadata import decode_config, encode_config
from ppma.models.checkpoints.weights import EXTRA_STATE, build, check_size
from ppma.models.config import CONFIGS, BackboneConfig
from ppma.models.head import ClassifierHead
from ppma.models.stage import Stage
from ppma.models.timm_config import CLASSIFIER, FIRST_CONV, pretrained_cfg
from ppma.ops import backends, checks
from ppma.ops.options import BackendName

WEIGHTS_NAME = "model.safetensors"


class PolylineBackbone(nn.Module, ModelHubMixin):
    """A hierarchical vision backbone with masked attention, in timm's conventions, for images of any size.

    Args:
        config: what to build; `ppma.models.CONFIGS` has those of the registered variants.

    Attributes:
        config: of this model, kept up to date by `reset_classifier` and `prune_intermediate_layers`.
        pretrained_cfg: timm's description of inputs, classifier and weights.
        feature_info: channels, stride and module name of each stage, for timm.
        num_classes: number of classes, 0 without a classifier.
        num_features: channels of the last stage.
        head_hidden_size: channels that the classifier reads.

    Examples:
        >>> import torch
        >>> from ppma.models import CONFIGS, PolylineBackbone
        >>> model = PolylineBackbone(CONFIGS["ppma_nano"].replace(num_classes=10))
        >>> model(torch.randn(2, 3, 32, 48)).shape
        torch.Size([2, 10])
    """

    output_fmt = "NHWC"

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.pretrained_cfg = self.default_cfg = pretrained_cfg(config)
        self._set_config(config)
        self.stem = Stem(config.in_chans, config.dims[0], config.stem_stride)
        drop_paths = torch.linspace(0, config.drop_path_rate, sum(config.depths), device="cpu").split(config.depths)
        self.stages = nn.ModuleList(Stage(config, index, rates.tolist()) for index, rates in enumerate(drop_paths))
        self.feature_norms = nn.ModuleDict(
            {
                str(index): nn.LayerNorm(config.dims[index], eps=config.feature_norm_eps)
                for index in config.feature_norms
            }
        )
        self.head = self._head()
        self.feature_info = [
            {"num_chs": dim, "reduction": config.stem_stride * 2**index, "module": f"stages.{index}"}
            for index, dim in enumerate(config.dims)
        ]

    def _set_config(self, config: BackboneConfig) -> None:
        self.config = self._hub_mixin_config = config
        self.num_classes, self.num_features = config.num_classes, config.dims[-1]
        self.head_hidden_size = config.head_width or config.dims[-1]
        self.describe()

    def describe(self) -> None:
        """Update `pretrained_cfg`, which timm saves next to the weights.

        timm stores the architecture's name but not the arguments it was built with. They are kept under "model_args",
        so that a saved folder rebuilds this model. For other programs that read the folder, call
        `save_for_hf(..., model_args=model.pretrained_cfg["model_args"])`.
        """
        differences = self.config.differences(CONFIGS[self.pretrained_cfg["architecture"]])
        differences.pop("num_classes", None)  # timm stores it itself
        self.pretrained_cfg.update(model_args=differences, first_conv=FIRST_CONV, classifier=CLASSIFIER)

    def _head(self) -> ClassifierHead:
        config = self.config
        return ClassifierHead(
            config.dims[-1], config.head_width, config.num_classes, config.global_pool, config.drop_rate
        )

    def forward_features(self, image: Tensor, valid: Tensor | None = None) -> Tensor:
        """Images (B, in_chans, height, width) to the last stage's features (B, H, W, C).

        `valid`, a boolean (B, height, width), is False at padding: tokens without a valid pixel are no keys in any
        block, and convolutions read 0 there. Only the stem and the downsampling look across the border of an image.
        """
        return self._in_turn([self.stem, *self.stages], image, valid)

    def _in_turn(self, modules: Sequence[nn.Module], x: Tensor, valid: Tensor | None) -> Tensor:
        """Stem and stages one after the other, from the first for which it is possible in a single native call."""
        for index, module in enumerate(modules):
            together = run_together(modules[index:], x) if valid is None else None
            if together is not None:
                return together
            x = module(x) if module is self.stem else module(x, valid)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (B, H, W, C) to logits (B, num_classes), or to the input of the classifier if `pre_logits`."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, image: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(image))

    def forward_intermediates(
        self,
        image: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        valid: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The features of some stages.

        Args:
            image: (B, in_chans, height, width).
            indices: of the stages; an int n for the last n, None for all.
            norm: ignored, part of timm's signature; `config.feature_norms` decides which features are normalised.
            stop_early: do not run stages after the last one asked for.
            output_fmt: layout of the features, "NCHW" or "NHWC".
            intermediates_only: return the features only.
            valid: as in `forward_features`.

        Returns:
            The features, through their layer norms where the model has `feature_norms`; unless `intermediates_only`,
            a pair of the output of `forward_features` and the features.
        """
        checks.one_of("output_fmt", output_fmt, ("NCHW", "NHWC"))
        taken, last = feature_take_indices(len(self.stages), indices)
        features = []
        x = image
        waiting: list[nn.Module] = [self.stem]
        for index, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            waiting.append(stage)
            if index in taken:
                x, waiting = self._in_turn(waiting, x, valid), []
                feature = self.feature_norms[str(index)](x) if str(index) in self.feature_norms else x
                features.append(feature.permute(0, 3, 1, 2) if output_fmt == "NCHW" else feature)
        x = self._in_turn(waiting, x, valid)
        return features if intermediates_only else (x, features)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what the features of these stages do not need.

        Args:
            indices: as in `forward_intermediates`.
            prune_norm: ignored, part of timm's signature.
            prune_head: remove the head.

        Returns:
            The indices of the stages asked for, from 0.
        """
        taken, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        for index in set(self.config.feature_norms) - set(taken):
            del self.feature_norms[str(index)]
        self._set_config(self.config.replace(feature_norms=[i for i in self.config.feature_norms if i in taken]))
        if prune_head:
            self._set_config(self.config.without_head(last + 1))
            self.head = self._head()
        return taken

    def get_classifier(self) -> nn.Module:
        """The classifier, a linear layer."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one (none for 0 classes), and the pooling unless None."""
        changes: dict[str, Any] = {"num_classes": num_classes}
        if global_pool is not None:
            changes["global_pool"] = global_pool
        self._set_config(self.config.replace(**changes))
        self.head.reset(num_classes, global_pool)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of storing its activations."""
        for module in self.modules():
            if isinstance(module, Stage):
                module.grad_checkpointing = enable

    def set_backend(self, name: BackendName) -> None:
        """Select the implementation of every operator: "auto", "reference", "torch", "native" or "triton".

        Parts of a block for which a backend has no kernel run in plain PyTorch; "reference" and "triton" have none for
        depthwise convolutions and rotary embeddings.
        """
        checks.one_of("name", name, backends.NAMES)
        for module in self.modules():
            if isinstance(module, PolylineAttention | Conv3x3 | DepthwiseConv | FusedConv):
                module.backend = name

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay, besides biases and norms: those of the mask's decay factors."""
        return {name for name, _ in self.named_parameters() if name.endswith((".dt_bias", ".A_log", ".decay.bias"))}

    def authors_no_weight_decay(self) -> set[str]:
        """Names of all parameters that the authors exclude from weight decay: ours, but not the layer scales."""
        flat = {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}
        return (flat | self.no_weight_decay()) - {name for name in flat if name.endswith("_scale.gamma")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns by which timm groups parameters into layers."""
        if coarse:
            blocks: Any = r"^stages\.(\d+)"
        else:
            blocks = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return {"stem": r"^stem", "blocks": blocks}

    def get_extra_state(self) -> Tensor:
        """The configuration as bytes: weights carry it, so that a model that computes another function refuses them."""
        device = next(self.parameters()).device
        # An optimizer step with a moving average reads the state of both models, and must not wait for the device.
        return encode_config(self.config).to(device, non_blocking=True)

    def set_extra_state(self, state: Any) -> None:
        """Compare with this model's configuration; weights of a different model are a CheckpointError."""
        if message := self.origin_mismatch({EXTRA_STATE: state}):
            raise CheckpointError(message)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Accept weights with the authors' names too, and refuse those of a model that computes another function."""
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        if message := self.origin_mismatch(own):  # an error whether strict or not, like a wrong shape
            error_msgs.append(message)
        state_dict.pop(prefix + EXTRA_STATE, None)
        if release.is_release_layout(own):
            for name in own:
                state_dict.pop(prefix + name, None)
            state_dict.update({prefix + name: tensor for name, tensor in release.convert(own).items()})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + EXTRA_STATE in missing_keys:
            missing_keys.remove(prefix + EXTRA_STATE)

    def origin_mismatch(self, state: Mapping[str, Tensor]) -> str | None:
        """How the model these weights come from differs from this one; None if it does not, or if they do not tell."""
        encoded = state.get(EXTRA_STATE)
        if release.is_release_layout(state):
            source = self.config.replace(formulation="release", mask=release.implied_mask(state) or self.config.mask)
        elif encoded is None or getattr(encoded, "is_meta", False):
            return None
        else:
            try:
                source = decode_config(encoded, EXTRA_STATE)
            except CheckpointError as error:
                return str(error)
        return self.config.mismatch(source)

    def _save_pretrained(self, save_directory: Path) -> None:
        write_checkpoint(save_directory / WEIGHTS_NAME, self.state_dict(), self.config)

    def generate_model_card(self, *_: Any, **described: Any) -> ModelCard:
        """The README of `save_pretrained`; `model_card_kwargs` are the keywords of `ppma.models.card.make_card`."""
        return make_card(self.config, sum(parameter.numel() for parameter in self.parameters()), **described)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        config: BackboneConfig | None = None,
        **overrides: Any,
    ) -> "PolylineBackbone":
        """From a local folder or a repository of the Hub; the weight file has the configuration."""
        local = Path(model_id) / WEIGHTS_NAME
        path = (
            local
            if local.is_file()
            else hf_hub_download(
                model_id,
                WEIGHTS_NAME,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
        )
        checkpoint = open_checkpoint(path)
        stored, state = checkpoint.backbone, checkpoint.contents
        if stored is None:
            raise CheckpointError(f"{path}: expected a configuration in its metadata, found none")
        chosen = (config or stored).replace(**overrides)
        check_size(chosen, state, source=str(path))
        return build(lambda: cls(chosen), state, source=str(path))
