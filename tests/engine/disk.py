"""Disks without room, for tests."""

import contextlib
import os
import resource

from stand_in import StandIn

FULL = OSError(28, "No space left on device")


@contextlib.contextmanager
def full_disk(room):
    """A write beyond `room` bytes fails half-way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def full_for(monkeypatch, *names):
    """Files of these names cannot be written."""
    write, save = os.replace, StandIn.save_weights

    def replace(source, target):
        if any(name in str(target) for name in names):
            raise FULL
        write(source, target)

    def save_weights(task, model, path):
        if path.name in names:
            raise FULL
        save(task, model, path)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(StandIn, "save_weights", save_weights)
