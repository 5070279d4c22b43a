"""The keys that every training configuration has; a task's schema extends `RunConfig` by its own sections."""

import difflib
from dataclasses import dataclass, field
from typing import Any, Literal

from timm.optim import get_optimizer_info, list_optimizers

from ppma.config import require

# More than any training needs: a slip of the keyboard, which would exhaust time, memory or processes.
MOST = {
    "epochs": 1_000_000,
    "steps": 1_000_000_000,
    "batch_size": 1_000_000_000,
    "repeats": 1_000,
    "workers": 1_000,
    "seed": 2**63 - 1,
}


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of timm's factory; biases, norms and what the model excludes take no weight decay.

    Attributes:
        name: as timm's `create_optimizer_v2` knows it; those of second order are refused.
        weight_decay: of the other parameters.
        eps: of AdamW.
        betas: of AdamW.
        layer_decay: factor on the learning rate from each layer to the one before, None for one rate.
    """

    name: str = "adamw"
    weight_decay: float = 0.05
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float | None = None

    def __post_init__(self) -> None:
        known = [str(name) for name in list_optimizers() if not get_optimizer_info(str(name)).second_order]
        wanted = self.name[:100].lower().split("_")[-1]  # timm reads lookahead_NAME too
        near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        require(wanted in known, "name", f"a first-order optimizer that timm knows{hint}", self.name)
        require(self.weight_decay >= 0, "weight_decay", "a number >= 0", self.weight_decay)
        require(self.eps > 0, "eps", "a number > 0", self.eps)
        require(all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers in [0, 1)", self.betas)
        decay = self.layer_decay
        require(decay is None or 0 < decay <= 1, "layer_decay", "a number in (0, 1]", decay)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run, changed at every step.

    Attributes:
        name: cosine to `min_lr`, poly to `min_lr` with `power`, multistep (times `gamma` at each milestone), constant.
        min_lr: where cosine and poly end.
        warmup_epochs: linear rise from `warmup_lr`.
        warmup_steps: the same in steps, in place of warmup_epochs.
        warmup_lr: where it starts.
        milestones: in epochs.
        gamma: factor at each milestone.
        power: of poly.
    """

    name: Literal["cosine", "poly", "multistep", "constant"] = "cosine"
    min_lr: float = 0.0
    warmup_epochs: float = 0.0
    warmup_steps: int | None = None
    warmup_lr: float = 0.0
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    power: float = 1.0

    def __post_init__(self) -> None:
        for key in ("min_lr", "warmup_epochs", "warmup_lr", "gamma", "power"):
            require(getattr(self, key) >= 0, key, "a number >= 0", getattr(self, key))
        require(self.warmup_steps is None or self.warmup_steps >= 0, "warmup_steps", "0 or more", self.warmup_steps)
        require(list(self.milestones) == sorted(self.milestones), "milestones", "ascending epochs", self.milestones)


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the weights, the one that is evaluated and saved for use.

    Attributes:
        decay: for each step, reached by a warm-up: after t steps it is at most (1 + t) / (10 + t), so that a short run
            does not average its random start.
        reference_batch: the batch size that `decay` is meant for; another batch size takes
            decay ** (batch_size / reference_batch). None: as given.
    """

    decay: float
    reference_batch: int | None = None

    def __post_init__(self) -> None:
        require(0 < self.decay < 1, "decay", "a number between 0 and 1", self.decay)
        reference = self.reference_batch
        require(reference is None or reference >= 1, "reference_batch", "at least 1", reference)

    def for_batch(self, batch_size: int) -> float:
        """The decay for a step with this batch."""
        return self.decay if self.reference_batch is None else self.decay ** (batch_size / self.reference_batch)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the engine reads.

    Attributes:
        task: who supplies model, data, loss and metrics.
        model: a registered model.
        model_args: fields of its configuration to change.
        epochs: passes over the training data (or `steps`).
        steps: optimizer steps, in place of epochs.
        batch_size: of one optimizer step, over all processes and accumulated micro-batches.
        lr: peak learning rate.
        lr_batch_size: the batch size that `lr` is meant for; it scales linearly. None: as given.
        seed: of weights, order and augmentation.
        workers: loader processes for each training process.
        accumulate: micro-batches of one step.
        clip_grad: largest norm of the gradient, None for no clipping.
        amp: autocast dtype.
        sync_batch_norm: batch statistics over all processes.
        deterministic: also choose deterministic GPU kernels; on CPU a run is exact either way.
        repeats: repeated augmentation, so many copies of a sample after one another; an epoch keeps its length.
        optimizer: see `OptimizerConfig`.
        schedule: see `ScheduleConfig`.
        ema: see `EmaConfig`, None for none.
        eval_epochs: evaluate after so many epochs (a run of `steps` with eval_steps: after so many steps).
        eval_steps: in place of eval_epochs.
        checkpoint_steps: checkpoints at these steps too, beside those at each evaluation.
        log_steps: a row of metrics.csv at these steps too.
        keep: how many checkpoints stay, beside the best.
        max_broken: broken samples that are skipped before the run stops.
    """

    task: str
    model: str
    model_args: dict[str, Any] = field(default_factory=dict)
    epochs: float | None = None
    steps: int | None = None
    batch_size: int
    lr: float
    lr_batch_size: int | None = None
    seed: int = 0
    workers: int = 0
    accumulate: int = 1
    clip_grad: float | None = None
    amp: Literal["none", "bf16", "fp16"] = "none"
    sync_batch_norm: bool = True
    deterministic: bool = False
    repeats: int = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig | None = None
    eval_epochs: int = 1
    eval_steps: int | None = None
    checkpoint_steps: int | None = None
    log_steps: int | None = None
    keep: int = 3
    max_broken: int = 50

    def __post_init__(self) -> None:
        require(
            (self.epochs is None) != (self.steps is None),
            "epochs, steps",
            "exactly one of the two, the other null",
            (self.epochs, self.steps),
        )
        require(self.lr > 0, "lr", "a number > 0", self.lr)
        for key, most in MOST.items():
            value = getattr(self, key)
            require(value is None or value <= most, key, f"at most {most:,}", value)
        for key in ("epochs", "steps", "lr_batch_size", "clip_grad", "eval_steps", "checkpoint_steps", "log_steps"):
            value = getattr(self, key)
            require(value is None or value > 0, key, "a number > 0", value)
        for key in ("batch_size", "accumulate", "repeats", "eval_epochs", "keep"):
            require(getattr(self, key) >= 1, key, "at least 1", getattr(self, key))
        for key in ("workers", "max_broken", "seed"):
            require(getattr(self, key) >= 0, key, "0 or more", getattr(self, key))

    @property
    def scaled_lr(self) -> float:
        """The peak learning rate of this run."""
        return self.lr if self.lr_batch_size is None else self.lr * self.batch_size / self.lr_batch_size
