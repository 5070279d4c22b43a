"""Progress lines: drawn on a terminal, absent elsewhere."""

import io
import sys
import time

import pytest

from ppma import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def lines(terminal):
    return terminal.getvalue().removesuffix("\r\033[K").replace("\033[K", "").split("\r")[1:]


def test_track_terminal(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", Terminal())
    seen = []
    for item in progress.track(range(4), "work"):
        seen.append(item)
        clock[0] += 2
    assert seen == [0, 1, 2, 3]
    drawn = lines(sys.stderr)
    assert drawn[0] == "work [######..................] 1/4, 0:06 left  "
    assert drawn[-1].startswith("work [########################] 4/4, 0:00 left")
    assert sys.stderr.getvalue().endswith("\r\033[K"), "the line is cleared"


def test_track_short_work_draws_nothing(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress.track([1, 2], "work")) == [1, 2]
    assert sys.stderr.getvalue() == ""


def test_track_without_terminal(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for _ in progress.track(range(3), "work"):
        clock[0] += 10
    assert sys.stderr.getvalue() == ""


def test_progress_unknown_length(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "_DELAY", 0.01)
    with progress.Progress("exporting"):
        deadline = time.monotonic() + 5
        while "exporting 0:00" not in sys.stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert lines(sys.stderr)[0] == "exporting 0:00"
    assert sys.stderr.getvalue().endswith("\r\033[K")


def test_progress_narrow_terminal(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "21")
    with progress.Progress("a long title", 1) as line:
        clock[0] += 2
        line.advance("a long note")
    assert [len(text) for text in lines(sys.stderr)] == [20]


def test_progress_clear(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.Progress("work", 2) as line:
        line.clear()
        assert sys.stderr.getvalue() == ""  # nothing was drawn
        clock[0] += 2
        line.advance()
        line.clear()
        cleared = sys.stderr.getvalue()
        assert cleared.endswith("\r\033[K")
    assert sys.stderr.getvalue() == cleared


def test_announce_terminal_only(monkeypatch):
    for stream, expected in ((Terminal(), "run 1\n"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        progress.announce("run 1")
        assert stream.getvalue() == expected


def test_track_closed_stderr(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress.track([1, 2], "work")) == [1, 2]


def test_progress_nested(monkeypatch, clock):
    """The innermost line is shown, then the outer one again."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.Progress("outer", 2) as outer:
        with progress.Progress("inner", 1) as inner:
            clock[0] += 2
            outer.advance()
            assert sys.stderr.getvalue() == ""
            inner.advance()
            assert lines(sys.stderr)[-1].startswith("inner ")
        outer.advance()
    assert lines(sys.stderr)[-1].startswith("outer ")
