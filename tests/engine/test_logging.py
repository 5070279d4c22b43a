"""Rows of metrics.csv survive full disks and killed runs."""

import pytest
from disk import full_disk

from ppma.engine.logging import MetricsLog, read_rows


def test_metrics_log_full_disk(tmp_path):
    log = MetricsLog(tmp_path, 0)
    rows = [{"step": step, "loss": 0.1 * step} for step in range(1, 5)]
    log.add(rows[0])
    with full_disk(len("step,loss\n1,0.1\n") + 3):
        for row in rows[1:3]:
            with pytest.warns(UserWarning, match="a row of metrics.csv not written yet"):
                log.add(row)
    log.add(rows[3])
    assert read_rows(tmp_path / "metrics.csv") == rows


def test_read_rows_truncated(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,lr,train_loss\n3,0.1,0.5\n6,0.1,\n9,1e-")
    assert read_rows(path) == [{"step": 3, "lr": 0.1, "train_loss": 0.5}, {"step": 6, "lr": 0.1}]
