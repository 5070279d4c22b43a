"""What the configuration files of detection and segmentation share."""

from dataclasses import dataclass

from ppma.config import ConfigError, require
from ppma.engine.config import RunConfig
from ppma.models import CONFIGS
from ppma.ops import checks

HEAD_FIELDS = ("num_classes", "head_width", "global_pool", "feature_norms")


@dataclass(frozen=True, kw_only=True)
class DenseConfig(RunConfig):
    """Training of a model around a backbone.

    Attributes:
        init: weights of the backbone to start from, any file that `ppma.load_checkpoint` reads; the architecture is
            then the file's, and only `model_args` change it.
    """

    init: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in HEAD_FIELDS:
            require(field not in self.model_args, f"model_args.{field}", "nothing: the task says it", "a value")
        try:
            checks.one_of("model", self.model, CONFIGS)
            CONFIGS[self.model].replace(**self.model_args)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from None
