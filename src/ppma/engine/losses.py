"""Losses of a run, averaged over steps and processes, and read from the device as seldom as possible."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppma.engine.distributed import World


class Reading(NamedTuple):
    """What `LossMeter.read` found, the same in all processes.

    Attributes:
        total: loss of the last step.
        stop: whether a process received a signal.
        non_finite: the first step with a non-finite loss, and its terms; None if all are finite.
    """

    total: float
    stop: bool
    non_finite: tuple[int, dict[str, float]] | None


class LossMeter:
    """Collects the terms of the loss. They stay on the device until `read`, because reading waits for the device.

    Args:
        world: this process among all.

    Attributes:
        sums: sum of each term since the last row of metrics.
        steps: number of steps in `sums`.

    Examples:
        >>> meter = LossMeter(World())
        >>> for step, loss in enumerate((0.5, 0.25)):
        ...     meter.add(step, {"cross_entropy": torch.tensor(loss)})
        >>> meter.read()
        Reading(total=0.25, stop=False, non_finite=None)
        >>> meter.take()
        {'train_loss': 0.375}
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.sums: dict[str, float] = {}
        self.steps = 0
        self._names: list[str] = []
        self._unread: dict[int, Tensor] = {}

    def add(self, step: int, terms: Mapping[str, Tensor]) -> None:
        """Take the terms of a step, each a scalar; every step has the same terms."""
        self._names = list(terms)
        self._unread[step] = torch.stack([term.double() for term in terms.values()])

    def read(self, signal: int = 0) -> Reading:
        """Wait for the steps since the last read, and average them over all processes.

        Args:
            signal: number of the signal that this process received, 0 for none.
        """
        flag = torch.full((1, max(1, len(self._names))), float(signal), dtype=torch.float64, device=self.world.device)
        *rows, flags = self.world.mean(torch.cat([*(row[None] for row in self._unread.values()), flag])).tolist()
        steps, non_finite = list(self._unread), None
        self._unread.clear()
        for step, values in zip(steps, rows, strict=True):
            terms = dict(zip(self._names, values, strict=True))
            if not all(map(math.isfinite, values)):
                non_finite = (step, terms)
                break
            self.sums = {name: self.sums.get(name, 0.0) + value for name, value in terms.items()}
            self.steps += 1
        return Reading(sum(rows[-1]) if rows else math.nan, flags[0] != 0, non_finite)

    def take(self) -> dict[str, float]:
        """The averages since the last call, as columns of metrics.csv: the loss and, if several, its terms."""
        sums, steps = self.sums, self.steps
        self.sums, self.steps = {}, 0
        if not steps:
            return {}
        terms = {f"train_{name}": total / steps for name, total in sums.items()} if len(sums) > 1 else {}
        return {"train_loss": sum(sums.values()) / steps, **terms}

    def state(self) -> dict[str, Any]:
        """The sums, for a checkpoint; everything must have been read."""
        return {"sums": self.sums, "summed": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.sums, self.steps = dict(state["sums"]), state["summed"]
