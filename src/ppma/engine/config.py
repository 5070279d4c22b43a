"""The configuration keys of every run; a task's schema extends `RunConfig` by its own."""

import difflib
from dataclasses import dataclass, field
from typing import Any, Literal

from timm.optim import get_optimizer_info, list_optimizers

from ppma.config import require

# A larger value is a typing mistake that would exhaust time, memory or processes.
LIMITS = {
    "epochs": 1_000_000,
    "steps": 1_000_000_000,
    "batch_size": 1_000_000_000,
    "repeats": 1_000,
    "workers": 1_000,
    "seed": 2**63 - 1,
}


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of timm. Biases, norms and what the model excludes take no weight decay.

    Attributes:
        name: a first-order optimizer of timm's `create_optimizer_v2`.
        weight_decay: weight decay of the other parameters.
        eps: epsilon of the Adam family.
        betas: betas of the Adam family.
        layer_decay: factor on the learning rate from each layer of the backbone to the one before; None for none.
        backbone_lr_scale: factor on the learning rate of the backbone, relative to the head's.
        decay_lr_scale: factor on the learning rate of the decay heads of masked attention.
        weight_decay_groups: which parameters are decayed: "ours", or what the "authors" of the paper decay.
    """

    name: str = "adamw"
    weight_decay: float = 0.05
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float | None = None
    weight_decay_groups: Literal["ours", "authors"] = "ours"
    backbone_lr_scale: float = 1.0
    decay_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        known = [str(name) for name in list_optimizers() if not get_optimizer_info(str(name)).second_order]
        name = self.name[:100].lower().split("_")[-1]  # timm also accepts lookahead_NAME
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        require(name in known, "name", f"a first-order optimizer of timm{hint}", self.name)
        require(self.weight_decay >= 0, "weight_decay", "a number >= 0", self.weight_decay)
        require(self.eps > 0, "eps", "a number > 0", self.eps)
        require(all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers in [0, 1)", self.betas)
        decay = self.layer_decay
        require(decay is None or 0 < decay <= 1, "layer_decay", "a number in (0, 1]", decay)
        for key in ("backbone_lr_scale", "decay_lr_scale"):
            require(getattr(self, key) > 0, key, "a number > 0", getattr(self, key))


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning-rate schedule.

    Attributes:
        name: "cosine" and "poly" decay to `min_lr`, "multistep" multiplies by `gamma` at each milestone.
        min_lr: final learning rate of "cosine" and "poly".
        epochs: length of "cosine" and "poly" where it is not the run's, such as a run that ends before `min_lr`.
        warmup_epochs: length of the linear warm-up from `warmup_lr`.
        warmup_steps: length of the warm-up in steps, in place of `warmup_epochs`.
        warmup_lr: initial learning rate of the warm-up.
        warmup_prefix: whether "cosine" and "poly" begin at their peak after the warm-up, instead of where they would be
            without one.
        milestones: epochs at which "multistep" decays, ascending.
        gamma: factor at each milestone.
        power: exponent of "poly".
        per: update at every "step"; or once in an "epoch" and one epoch late, as the authors' classification does.
    """

    name: Literal["cosine", "poly", "multistep", "constant"] = "cosine"
    min_lr: float = 0.0
    epochs: float | None = None
    warmup_epochs: float = 0.0
    warmup_steps: int | None = None
    warmup_lr: float = 0.0
    warmup_prefix: bool = False
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    power: float = 1.0
    per: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        for key in ("min_lr", "warmup_epochs", "warmup_lr", "gamma", "power"):
            require(getattr(self, key) >= 0, key, "a number >= 0", getattr(self, key))
        require(self.epochs is None or self.epochs > 0, "epochs", "a number > 0", self.epochs)
        require(self.warmup_steps is None or self.warmup_steps >= 0, "warmup_steps", "0 or more", self.warmup_steps)
        require(list(self.milestones) == sorted(self.milestones), "milestones", "ascending epochs", self.milestones)


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the weights; the average is what is evaluated and saved.

    Attributes:
        decay: decay of each step.
        reference_batch: batch size that `decay` is given for; other batch sizes use
            decay ** (batch_size / reference_batch). None uses `decay` as given.
        warmup: at step t the decay is at most (1 + t) / (10 + t), so that a short run does not average its random
            initial weights.
    """

    decay: float
    reference_batch: int | None = None
    warmup: bool = True

    def __post_init__(self) -> None:
        require(0 < self.decay < 1, "decay", "a number between 0 and 1", self.decay)
        reference = self.reference_batch
        require(reference is None or reference >= 1, "reference_batch", "at least 1", reference)

    def for_batch(self, batch_size: int) -> float:
        """The decay of a step with this batch size."""
        return self.decay if self.reference_batch is None else self.decay ** (batch_size / self.reference_batch)


@dataclass(frozen=True)
class EarlyStoppingConfig:
    """When to end a run that no longer improves.

    Attributes:
        patience: number of evaluations without improvement after which the run ends.
        min_delta: smallest increase of the task's monitored metric that counts as an improvement.
    """

    patience: int
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        require(self.patience >= 1, "patience", "at least 1", self.patience)
        require(self.min_delta >= 0, "min_delta", "a number >= 0", self.min_delta)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run, as far as the engine reads it.

    Attributes:
        task: name of the task, which supplies model, data, loss and metrics.
        model: name of the model.
        model_args: fields of the model's configuration to change.
        epochs: length of the run in passes over the training data; or `steps`.
        steps: length of the run in optimizer steps, in place of `epochs`.
        batch_size: samples of one optimizer step, over all processes and accumulated micro-batches.
        lr: peak learning rate.
        lr_batch_size: batch size that `lr` is given for; `lr` scales linearly. None uses `lr` as given.
        seed: seed of initial weights, order and augmentation.
        workers: loader processes of each training process.
        accumulate: micro-batches of one step.
        clip_grad: largest norm of the gradient; None for no clipping.
        amp: autocast dtype.
        sync_batch_norm: whether batch norms use the statistics of all processes.
        sync_batch_norm_skip: submodules whose batch norms use the statistics of their own process, such as [backbone].
        deterministic: whether to select deterministic GPU kernels. CPU runs are deterministic either way.
        repeats: copies of each sample in a row (repeated augmentation); the length of an epoch stays the same.
        optimizer: see `OptimizerConfig`.
        schedule: see `ScheduleConfig`.
        ema: see `EmaConfig`; None for no moving average.
        early_stopping: see `EarlyStoppingConfig`; None to train to the end.
        freeze: patterns of parameter names (`stem*`, `backbone.*`) that are not trained; their batch norms keep their
            statistics.
        grad_checkpointing: whether to recompute the backbone's blocks in the backward pass, which saves memory.
        compile: whether to run the backbone through `torch.compile`.
        eval_epochs: epochs between evaluations.
        eval_steps: steps between evaluations, in place of `eval_epochs`.
        checkpoint_steps: steps between checkpoints, besides the one at each evaluation.
        log_steps: steps between rows of metrics.csv, besides the one at each evaluation.
        log: where the rows go; metrics.csv is always written.
        keep: number of checkpoints to keep, besides the best.
        max_broken: broken samples to skip before the run fails.

    Examples:
        >>> from ppma.engine.config import RunConfig
        >>> run = RunConfig(task="t", model="ppma_nano", epochs=2, batch_size=64, lr=1e-3, lr_batch_size=128)
        >>> run.scaled_lr
        0.0005
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
    sync_batch_norm_skip: tuple[str, ...] = ()
    deterministic: bool = False
    repeats: int = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig | None = None
    early_stopping: EarlyStoppingConfig | None = None
    freeze: tuple[str, ...] = ()
    grad_checkpointing: bool = False
    compile: bool = False
    eval_epochs: int = 1
    eval_steps: int | None = None
    checkpoint_steps: int | None = None
    log_steps: int | None = None
    log: tuple[Literal["csv", "tensorboard", "trackio", "wandb"], ...] = ("csv", "tensorboard")
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
        for key, limit in LIMITS.items():
            value = getattr(self, key)
            require(value is None or value <= limit, key, f"at most {limit:,}", value)
        for key in ("epochs", "steps", "lr_batch_size", "clip_grad", "eval_steps", "checkpoint_steps", "log_steps"):
            value = getattr(self, key)
            require(value is None or value > 0, key, "a number > 0", value)
        for key in ("batch_size", "accumulate", "repeats", "eval_epochs", "keep"):
            require(getattr(self, key) >= 1, key, "at least 1", getattr(self, key))
        for key in ("workers", "max_broken", "seed"):
            require(getattr(self, key) >= 0, key, "0 or more", getattr(self, key))

    @property
    def scaled_lr(self) -> float:
        """The peak learning rate for this run's batch size."""
        return self.lr if self.lr_batch_size is None else self.lr * self.batch_size / self.lr_batch_size
