"""The training loop."""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ppma import config as configs
from ppma.engine import checkpoint, folder, trackers
from ppma.engine.config import RunConfig
from ppma.engine.distributed import World
from ppma.engine.errors import LoaderDiedError, NonFiniteLossError, StoppedError, TooManyBrokenError
from ppma.engine.evaluation import BrokenSamples, evaluate
from ppma.engine.learner import Learner
from ppma.engine.logging import MetricsLog, format_metrics, headline
from ppma.engine.losses import LossMeter
from ppma.engine.progress_line import ProgressLine
from ppma.engine.results import ResultFiles
from ppma.engine.resume import check_fits, find_state
from ppma.engine.sampling import Batch, StepSampler, name_dead_workers, seed_process, train_batches
from ppma.engine.stopping import EarlyStopping, StopRequest, stop_request
from ppma.engine.task import TrainingTask

GPU_READ_STEPS = 50  # at most so many steps between reads of the loss on a GPU, each of which waits for the device


class Trainer:
    """One run of a task in one folder.

    What `state` returns is the whole state of a run: everything else is a function of the configuration and the step.
    A run resumed from any checkpoint therefore ends as if it had not been interrupted.

    Losses stay on the device until they are read: at every step on a CPU; on a GPU, where reading waits for all queued
    kernels, at logged, evaluated and saved steps and every `GPU_READ_STEPS`.

    Args:
        task: supplies model, data, loss and metrics.
        run: the run's folder, reserved by `folder.reserve`; only the main process writes to it.
        world: this process among all.
        resume: "none", "auto" (the newest readable checkpoint of the folder, if any) or the path of a checkpoint.
        overwrite: delete an earlier run in the folder, which is refused otherwise.

    Attributes:
        learner: the model and its optimizer.
        step: number of steps taken.
        steps: number of steps of the whole run.
        best: monitored metric of the best weights.
        best_step: step of the best weights, 0 before the first evaluation.
    """

    def __init__(
        self, task: TrainingTask, run: Path, world: World, *, resume: str = "none", overwrite: bool = False
    ) -> None:
        self.task, self.run, self.world = task, run, world
        config: RunConfig = task.config
        self.config = config
        trackers.check_installed(config.log)
        configs.require(
            config.batch_size % (world.size * config.accumulate) == 0,
            "batch_size",
            f"a multiple of {world.size} processes x {config.accumulate} accumulated micro-batches",
            config.batch_size,
        )
        restored = find_state(run, world, resume, overwrite=overwrite)
        seed_process(config.seed, deterministic=config.deterministic)
        self.train_data, self.eval_data = task.train_data(), dict(task.eval_data())
        self.samples = len(self.train_data)  # type: ignore[arg-type]
        configs.require(
            self.samples >= config.batch_size, "batch_size", f"at most the {self.samples} samples", config.batch_size
        )
        monitored = config.early_stopping is None or "val" in self.eval_data
        configs.require(monitored, "early_stopping", "validation data to monitor", "none")
        self.steps_per_epoch = self.samples // config.batch_size
        self.steps = config.steps or max(1, round((config.epochs or 0) * self.steps_per_epoch))
        self.learner = Learner(task, world, steps=self.steps, steps_per_epoch=self.steps_per_epoch)
        self.step, self.seconds = 0, 0.0
        self.best, self.best_step = -math.inf, 0
        self.stopping = EarlyStopping(config.early_stopping)
        self.losses = LossMeter(world)
        self.read_steps = 1 if world.device.type == "cpu" else GPU_READ_STEPS
        self.note = ""
        self.files = ResultFiles(run, task.save_weights)
        seed_process(config.seed, world.rank, deterministic=config.deterministic)
        if restored is not None:
            self.load(restored)
        self.log: MetricsLog | None = None
        if world.main:
            configs.write(config, run / folder.CONFIG)
            values = configs.to_dict(config)
            self.log = MetricsLog(run, self.step, trackers.Trackers(config.log, run, self.step, values))
        self.progress = ProgressLine("train", self.steps, self.step, enabled=world.main)
        self.broken = BrokenSamples(config.max_broken, self.progress.say)

    def state(self, rng: Sequence[Any]) -> dict[str, Any]:
        """Everything needed to continue the run.

        Args:
            rng: the states of the random generators of every process.
        """
        return {
            "step": self.step,
            "sampler": {
                "epoch": self.step // self.steps_per_epoch,
                "position": self.step % self.steps_per_epoch * self.config.batch_size,
                "samples": self.samples,
            },
            **self.learner.state(self.step),
            "rng": list(rng),
            "best": {"value": self.best, "step": self.best_step, "written": folder.BEST not in self.files.failed},
            "early_stopping": {"reference": self.stopping.reference, "stale": self.stopping.stale},
            "log": {**self.losses.state(), "seconds": self.seconds},
            "config": configs.to_dict(self.config),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        try:
            check_fits(state, self.config, self.learner.model, self.learner.optimizer, self.steps)
            self._restore(state)
        except configs.ConfigError:
            raise
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
            raise checkpoint.UnreadableCheckpointError(
                f"resume: expected a checkpoint of this version, got one with other contents ({error!r:.200})"
            ) from None

    def _restore(self, state: dict[str, Any]) -> None:
        changes = configs.differences(state["config"], configs.to_dict(self.config))
        before = state["sampler"].get("samples")
        if before not in (None, self.samples):
            changes.append(f"training samples: {before} -> {self.samples}")
        if changes and self.world.main:
            warnings.warn("the configuration changed since the checkpoint: " + "; ".join(changes), stacklevel=4)
        self.step = state["step"]
        self.learner.load(state)
        self.best, self.best_step = state["best"]["value"], state["best"]["step"]
        kept = state["best"].get("written", True) and (self.run / folder.BEST).is_file()
        if self.best_step and not self.world.broadcast(kept):
            if self.world.main:
                warnings.warn(
                    f"{folder.BEST} of step {self.best_step} is lost: the best is selected again", stacklevel=4
                )
            self.best, self.best_step = -math.inf, 0
        early = state.get("early_stopping", {})
        self.stopping.reference, self.stopping.stale = early.get("reference", -math.inf), early.get("stale", 0)
        self.losses.load(state["log"])
        self.seconds = state["log"]["seconds"]
        checkpoint.restore_rng(state["rng"], self.world)

    def save(self, path: Path) -> bool:
        """Write a checkpoint; False if the disk refuses, in which case the earlier ones are kept."""
        rng = self.world.gather(checkpoint.rng_state())
        written = True
        if self.world.main:
            written = self.files.save_checkpoint(path, self.state(rng))
            if written:
                self._delete_old()
        return self.world.broadcast(written)

    def _delete_old(self) -> None:
        checkpoint.keep_only(self.run, self.config.keep, self.best_step, self.step)

    def train(self) -> dict[str, Any]:
        """Train to the end and return the contents of summary.json.

        Raises:
            StoppedError: a signal stopped the run; its state was saved.
            NonFiniteLossError: the loss is not finite; the state before that step was saved if it was read at once.
            TooManyBrokenError: too many unreadable samples; with one process, the state was saved.
            LoaderDiedError: a loader process was killed.
            IncompleteRunError: the run finished, but some results could not be written.
        """
        batches = train_batches(self.train_data, self.task.collate, self._sampler(range(self.step, self.steps)))
        self.began = time.monotonic() - self.seconds
        try:
            with name_dead_workers():
                with stop_request() as request:
                    self._log_and_evaluate()
                    while self.step < self.steps and not self.stopping.due:
                        self._step(batches, request)
                        if _is_due(self.step, self.config.checkpoint_steps) or self._evaluation_due(self.step):
                            self.save(checkpoint.path_of(self.run, self.step))
                        self._log_and_evaluate()
                return self._finish()
        except LoaderDiedError as error:
            raise LoaderDiedError(f"{error}; {self._how_to_continue()}") from None
        finally:
            batches.close()
            self.progress.close()
            if self.log is not None:
                self.log.close()

    def _sampler(self, steps: range) -> StepSampler:
        return StepSampler(self.samples, self.config, self.world, steps, self.task.sample_weights())

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.eval_steps or self.config.eval_epochs * self.steps_per_epoch
        return step == self.steps or _is_due(step, every)

    def _step(self, batches: Iterator[Batch], request: StopRequest) -> None:
        """Take one optimizer step."""
        accumulate = self.config.accumulate
        self.learner.begin(self.step)
        terms: dict[str, torch.Tensor] = {}
        for micro in range(accumulate):
            batch = self._next(batches, first=micro == 0)
            for name, term in self.learner.backward(batch.data, last=micro == accumulate - 1).items():
                terms[name] = terms.get(name, 0) + term
        self.losses.add(self.step, terms)
        stop = self._read_due(request) and self._read_losses(request.signal)
        self.step += 1
        self.learner.update(self.step)
        self.seconds = time.monotonic() - self.began
        rate = self.config.batch_size / max(self.seconds / self.step, 1e-9)
        self.progress.update(self.step, f"{self.note}, {rate:.0f} samples/s".lstrip(", "))
        if stop:
            self._stop(request)

    def _read_due(self, request: StopRequest) -> bool:
        """Whether to read losses in this step; a decision that all processes must share."""
        done, config = self.step + 1, self.config
        every = (self.read_steps, config.log_steps, config.checkpoint_steps)
        asked = self.world.size == 1 and request.signal != 0
        return asked or self._evaluation_due(done) or any(_is_due(done, steps) for steps in every)

    def _read_losses(self, signal: int = 0) -> bool:
        """Read pending losses and check that they are finite; returns whether a process was asked to stop."""
        reading = self.losses.read(signal)
        if reading.non_finite is not None:
            self._stop_non_finite(*reading.non_finite)
        self.note = f"loss {reading.total:.4f}, lr {self.learner.lr:.3g}"
        return reading.stop

    def _next(self, batches: Iterator[Batch], *, first: bool) -> Batch:
        try:
            batch = next(batches)
            self.broken.note(batch.broken)
        except TooManyBrokenError as error:
            # Before the first micro-batch, the state is still that of the step's beginning.
            if first and self.world.size == 1:
                self._read_losses()
                self.save(checkpoint.path_of(self.run, self.step))
            raise TooManyBrokenError(f"{error}; {self._how_to_continue()}") from None
        return batch

    def _how_to_continue(self) -> str:
        """Where a run that failed can be continued from."""
        steps = checkpoint.steps(self.run)
        if not steps:
            return f"stopped at step {self.step}, before the first checkpoint"
        return f"stopped at step {self.step}; --resume auto continues from step {steps[-1]}"

    def _stop(self, request: StopRequest) -> None:
        path = checkpoint.path_of(self.run, self.step)
        if self.save(path):
            message = f"stopped at step {self.step} of {self.steps}; saved {path}; --resume auto continues"
        else:
            message = f"not saved: {self._how_to_continue()}"
        raise StoppedError(message, request.signal)

    def _stop_non_finite(self, step: int, losses: dict[str, float]) -> None:
        """Raise; before that, save the state if the optimizer has not yet used the gradients of that step."""
        path = self.run / checkpoint.FOLDER / f"failed-{step:08d}.pt"
        self.learner.optimizer.zero_grad(set_to_none=True)
        if step < self.step:
            where = f"{self._how_to_continue()}, and log_steps=1 would stop before that step"
        elif self.save(path):
            where = f"the state before this step is in {path}"
        else:
            where = "the state could not be saved"
        samples = [key.sample for keys in self._sampler(range(step, step + 1)) for key in keys]
        shown = ", ".join(map(str, samples[:16])) + (", ..." if len(samples) > 16 else "")
        self.learner.schedule.step_update(step)
        raise NonFiniteLossError(
            f"loss is {format_metrics(losses)} at step {step} (epoch {step // self.steps_per_epoch}, "
            f"samples {shown}), learning rate {self.learner.lr:.4g}; {where}: try a smaller lr, "
            "clip_grad or amp: none, with --resume and that path or an earlier checkpoint"
        )

    def _log_and_evaluate(self) -> None:
        """Evaluate if due, and write a row of metrics if due.

        A checkpoint of this step was saved before, so a run that is killed in here repeats only this.
        """
        evaluation = self._evaluation_due(self.step) and self.step > 0
        if not evaluation and not (_is_due(self.step, self.config.log_steps) and self.losses.steps):
            return
        row: dict[str, float] = {"step": self.step, "epoch": self.step / self.steps_per_epoch, "seconds": self.seconds}
        row["lr"] = self.learner.lr
        if self.losses.steps:
            row |= self.losses.take()
            row["samples_per_second"] = self.step * self.config.batch_size / max(self.seconds, 1e-9)
        if evaluation:
            row |= self._evaluate()
        if self.log is not None:
            self.log.add(row)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data, and write the weights that users load."""
        measured = self._measure("val") if "val" in self.eval_data else {}
        value = measured.get(f"val_{self.task.monitor}", math.inf)
        improved = not measured or self.best_step == 0 or value > self.best
        if improved:
            self.best, self.best_step = value, self.step
        self.stopping.update(value)
        if self.world.main:
            self.files.save_weights(self.learner.eval_model, improved=improved)
        shown = format_metrics(headline(measured))
        self.progress.say(f"step {self.step}/{self.steps}: {shown}{' (best)' if improved else ''}")
        if self.stopping.due:
            self.progress.say(
                f"stopping early: val_{self.task.monitor} did not improve in {self.stopping.stale} evaluations"
            )
        return measured

    def _measure(self, split: str) -> dict[str, float]:
        measured = evaluate(
            self.learner.eval_model,
            self.task.metrics(),
            self.eval_data[split],
            self.task.collate,
            batch_size=self.config.batch_size // (self.world.size * self.config.accumulate),
            workers=self.config.workers,
            world=self.world,
            broken=self.broken,
            amp=self.config.amp,
            title=split,
            within=self.progress,
        )
        return {f"{split}_{name}": value for name, value in measured.items()}

    def _finish(self) -> dict[str, Any]:
        """Evaluate the best weights on the other splits, and write the summary and the curves."""
        self.files.retry_weights(self.learner.eval_model)
        others = [split for split in self.eval_data if split != "val"]
        if others:
            if self.world.main:
                self._load_best()
            self.world.broadcast_parameters(self.learner.eval_model)
        final = {key: value for split in others for key, value in self._measure(split).items()}
        summary: dict[str, Any] = {**final, "seconds": round(time.monotonic() - self.began, 2), "steps": self.step}
        if self.log is not None:
            summary |= self._summary()
            self.files.write_summary(summary, self.log)
            self._delete_old()
        summary = self.world.broadcast(summary)
        self.files.check_complete(self.step)
        return summary

    def _load_best(self) -> None:
        if self.best_step == self.step:
            return
        try:
            state = checkpoint.load(checkpoint.path_of(self.run, self.best_step))
        except (FileNotFoundError, checkpoint.UnreadableCheckpointError) as error:
            warnings.warn(f"evaluating the last weights instead of the best: {error}", stacklevel=2)
            return
        self.learner.eval_model.load_state_dict(state["model"] if self.learner.ema is None else state["ema"])

    def _summary(self) -> dict[str, Any]:
        assert self.log is not None
        by_step = {row["step"]: row for row in self.log.rows}
        best, last = by_step.get(self.best_step, {}), by_step[self.step]
        return {
            **{name: value for name, value in best.items() if name.startswith("val_")},
            "best_step": self.best_step,
            "stopped_early": self.step < self.steps,
            "last": {name: value for name, value in last.items() if name != "step"},
            "samples_per_second": last.get("samples_per_second"),
            "parameters": sum(parameter.numel() for parameter in self.learner.model.parameters()),
            "processes": self.world.size,
            "device": str(self.world.device),
            "broken_samples": len(self.broken.seen),
            "config": folder.CONFIG,
        }


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step > 0 and step % every == 0
