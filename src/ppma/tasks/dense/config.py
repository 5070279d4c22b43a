"""Fields shared by the recipes of detection and segmentation."""

from dataclasses import dataclass

from ppma.config import require
from ppma.tasks.model_config import ModelConfig

HEAD_FIELDS = ("num_classes", "head_width", "global_pool", "feature_norms")


@dataclass(frozen=True, kw_only=True)
class DenseConfig(ModelConfig):
    """A run that trains a backbone with dense heads; `init` and `pretrained` are weights of the backbone."""

    def __post_init__(self) -> None:
        for field in HEAD_FIELDS:
            given = self.model_args.get(field)
            require(field not in self.model_args, f"model_args.{field}", "no value, the task sets it", given)
        super().__post_init__()
