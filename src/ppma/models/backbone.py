"""The backbone: stem, four stages, head. Every published variant is this class with another configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin, hf_hub_download
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ppma.layers.attention import PolylineAttention
from ppma.layers.block import NORM_EPS
from ppma.layers.convolution import DepthwiseConv
from ppma.layers.stem import Stem
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


class PolylineBackbone(nn.Module, ModelHubMixin, library_name="ppma", tags=["image-classification", "timm"]):
    """A hierarchical vision backbone with masked attention, in timm's conventions, for images of any size.

    Args:
        config: what to build; see `ppma.models.CONFIGS` for the published ones.

    Example:
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
            {str(index): nn.LayerNorm(config.dims[index], eps=NORM_EPS) for index in config.feature_norms}
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
        """Bring `pretrained_cfg`, which timm saves beside the weights, up to what this model is.

        timm builds a model from a name and arguments. It keeps the name; the arguments that lead from there to this
        model stand under "model_args", so that a saved folder gives the same model again. `save_for_hf(..., model_args=
        model.pretrained_cfg["model_args"])` tells other programs too.
        """
        differences = self.config.differences(CONFIGS[self.pretrained_cfg["architecture"]])
        self.pretrained_cfg.update(
            model_args={name: value for name, value in differences.items() if name != "num_classes"},  # timm's own
            first_conv=FIRST_CONV,
            classifier=CLASSIFIER,
        )

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
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x, valid)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (B, H, W, C) to class scores (B, num_classes), or to what the classifier reads."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, image: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to class scores (B, num_classes)."""
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
            indices: which stages; an int for the last so many, None for all.
            norm: accepted for timm; there is no norm after the last stage, and `feature_norms` belong to the features.
            stop_early: leave the stages out that no feature needs.
            output_fmt: "NCHW" or "NHWC" of the features.
            intermediates_only: return the features only.
            valid: as in `forward_features`.

        Returns:
            The features, each through its layer norm where the model has `feature_norms`; before them, unless
            `intermediates_only`, what `forward_features` returns.
        """
        checks.one_of("output_fmt", output_fmt, ("NCHW", "NHWC"))
        taken, last = feature_take_indices(len(self.stages), indices)
        features = []
        x = self.stem(image)
        for index, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x, valid)
            if index in taken:
                feature = self.feature_norms[str(index)](x) if str(index) in self.feature_norms else x
                features.append(feature.permute(0, 3, 1, 2) if output_fmt == "NCHW" else feature)
        return features if intermediates_only else (x, features)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the features of these stages do not need; returns their indices.

        Args:
            indices: as in `forward_intermediates`.
            prune_norm: accepted for timm; see there.
            prune_head: drop the head.
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
        """The last linear layer."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new last layer for another number of classes (0: none), and optionally another pooling."""
        changes: dict[str, Any] = {"num_classes": num_classes}
        if global_pool is not None:
            changes["global_pool"] = global_pool
        self._set_config(self.config.replace(**changes))
        self.head.reset(num_classes, global_pool)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for module in self.modules():
            if isinstance(module, Stage):
                module.grad_checkpointing = enable

    def set_backend(self, name: BackendName) -> None:
        """Select the implementation of every operator: "auto", "reference", "torch", "native" or "triton".

        Where a backend has no kernel for a part of a block (the reference and Triton have none for depthwise
        convolutions and rotary embeddings), that part runs in plain PyTorch.
        """
        checks.one_of("name", name, backends.NAMES)
        for module in self.modules():
            if isinstance(module, PolylineAttention | DepthwiseConv):
                module.backend = name

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay, beside biases and norms: those that set the decays."""
        return {name for name, _ in self.named_parameters() if name.endswith((".dt_bias", ".A_log", ".decay.bias"))}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How timm's optimizers group the parameters into layers."""
        if coarse:
            blocks: Any = r"^stages\.(\d+)"
        else:
            blocks = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return {"stem": r"^stem", "blocks": blocks}

    def get_extra_state(self) -> Tensor:
        """The configuration, so that weights cannot be loaded into a model that computes something else with them."""
        device = next(self.parameters()).device
        return encode_config(self.config).to(device)

    def set_extra_state(self, state: Any) -> None:
        """Compare with this model's own; a CheckpointError if the weights beside it are of another model."""
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
        """Take weights in the authors' names too, and compare the model they come from with this one."""
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        if message := self.origin_mismatch(own):  # like a wrong shape, an error whether strict or not
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
        """How the model that these weights come from differs from this one, None where they agree or do not tell."""
        encoded = state.get(EXTRA_STATE)
        if release.is_release_layout(state):
            source = self.config.replace(formulation="release", mask=release.told_mask(state) or self.config.mask)
        elif encoded is None or getattr(encoded, "is_meta", False):
            return None
        else:
            try:
                source = decode_config(encoded, EXTRA_STATE)
            except CheckpointError as error:
                return str(error)
        different = self.config.mismatches(source)
        if not different:
            return None
        theirs, ours = (
            ", ".join(f"{name}={getattr(config, name)!r}" for name in different) for config in (source, self.config)
        )
        return f"the weights are of a model with {theirs}; this one has {ours}"

    def _save_pretrained(self, save_directory: Path) -> None:
        write_checkpoint(save_directory / WEIGHTS_NAME, self.state_dict(), self.config)

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
        """From a local folder or a repository of the Hub; the configuration is the one beside the weights."""
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
            raise CheckpointError(f"{path}: expected a configuration in the file's metadata, found none")
        chosen = (config or stored).replace(**overrides)
        check_size(chosen, state, source=str(path))
        return build(lambda: cls(chosen), state, source=str(path))
