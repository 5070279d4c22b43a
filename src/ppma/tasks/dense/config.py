"""Fields shared by the recipes of detection and segmentation."""

from dataclasses import dataclass

from ppma.config import ConfigError, require
from ppma.engine.config import RunConfig
from ppma.models import CONFIGS
from ppma.ops import checks

HEAD_FIELDS = ("num_classes", "head_width", "global_pool", "feature_norms")


@dataclass(frozen=True, kw_only=True)
class DenseConfig(RunConfig):
    """A run that trains a backbone with dense heads.

    Attributes:
        init: initial backbone weights, any file that `ppma.load_checkpoint` reads; the file then determines the
            architecture, and `model_args` override it.
    """

    init: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in HEAD_FIELDS:
            given = self.model_args.get(field)
            require(field not in self.model_args, f"model_args.{field}", "no value, the task sets it", given)
        try:
            checks.one_of("model", self.model, CONFIGS)
            CONFIGS[self.model].replace(**self.model_args)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from None
