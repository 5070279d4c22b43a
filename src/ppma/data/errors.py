"""Errors of data sets."""


class BrokenSampleError(Exception):
    """A sample that cannot be read; the message names it. The engine counts and skips it."""


class LabelFormatError(BrokenSampleError):
    """A readable label map that contradicts the configuration."""
