"""The choice of a model and of its initial weights, shared by the recipes of all tasks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppma.config import ConfigError, require
from ppma.engine.config import RunConfig
from ppma.models import CONFIGS, Checkpoint
from ppma.models.published import PUBLISHED
from ppma.models.timm_models import check_model, is_timm


@dataclass(frozen=True, kw_only=True)
class ModelConfig(RunConfig):
    """A run with a model of ours or of timm.

    Attributes:
        init: initial weights, any file that `ppma train` writes or `ppma.load_checkpoint` reads. The file determines
            the architecture, and `model_args` change it; layers that do not fit the task are new.
        pretrained: whether to start from published weights of the model, ours or timm's.
    """

    init: str | None = None
    pretrained: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            check_model(self.model, self.model_args)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from None
        require(self.init is None or not self.pretrained, "init, pretrained", "one of the two", "both")
        if self.pretrained and self.model in CONFIGS:
            expected = f"one of {', '.join(_PUBLISHED)} or of timm"
            require(self.model in _PUBLISHED, "pretrained", f"a model with published weights, {expected}", self.model)

    @property
    def start(self) -> str | None:
        """The initial weights, a file or a published name; None for random weights and for timm's."""
        return _PUBLISHED.get(self.model) if self.pretrained else self.init

    def start_args(self, start: Checkpoint) -> dict[str, Any]:
        """`model_args`, unless they are for another kind of model than the one of the initial weights."""
        return self.model_args if is_timm(self.model) == (start.timm_model is not None) else {}


def require_weights(weights: Mapping[str, Any]) -> None:
    """Check the values of `class_weights`."""
    for name, weight in weights.items():
        valid = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < math.inf
        require(valid, f"class_weights.{name}", "a number >= 0", weight)


_PUBLISHED = {entry.backbone: entry.name for entry in PUBLISHED.values() if entry.task == "classification"}
