"""The random generators of a process."""

import random

import numpy as np
import torch


def seed_process(seed: int, rank: int = 0, *, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; processes of one run differ by their rank.

    Args:
        seed: of the run.
        rank: of the process.
        deterministic: choose deterministic GPU kernels too, where there are any.
    """
    mixed = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
    if deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
