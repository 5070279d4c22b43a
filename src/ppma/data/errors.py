"""What a data set raises for samples that cannot be used."""


class BrokenSampleError(Exception):
    """Raised by a dataset for a sample that cannot be read; the message names it. The engine counts and skips it."""


class LabelFormatError(BrokenSampleError):
    """A label map that is read without damage but cannot be what the configuration says it is."""
