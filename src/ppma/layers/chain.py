"""Modules that only call others."""

from torch import nn


class Chain(nn.Module):
    """A module whose `forward` only calls others, one after the other; they may also be called without it.

    That holds for the classes derived directly from this one: a class derived from one of those may compute more.
    """

    def parts(self) -> tuple[nn.Module, ...]:
        """The modules that `forward` calls."""
        raise NotImplementedError
