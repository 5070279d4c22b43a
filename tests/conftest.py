"""For the whole suite."""

from hypothesis import settings

# The same examples on every run: a failure that a change did not cause helps nobody who waits for its result.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
