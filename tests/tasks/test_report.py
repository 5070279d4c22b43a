"""The files of an evaluation, and the picture of a confusion matrix."""

import json

import pytest
import torch

from ppma.engine.task import Details
from ppma.tasks.report import FILES, confusion_figure, report_files


def test_report_files_without_details():
    files = report_files({"accuracy": 50.0}, None)
    assert json.loads(files.pop("metrics.json")) == {"metrics": {"accuracy": 50.0}, "classes": []}
    assert files == {}


def test_report_files_tables():
    rows = [{"class": "a, b", "count": 1, "accuracy": 100.0}, {"class": "c", "count": 0, "accuracy": None}]
    files = report_files({}, Details(rows, torch.tensor([[1, 0], [0, 0]]), predictions=[{"id": 1}]))
    assert sorted(files) == sorted(FILES)
    assert files["classes.csv"] == b'class,count,accuracy\n"a, b",1,100.0\nc,0,\n'
    assert files["confusion.csv"] == b'true / predicted,"a, b",c\n"a, b",1,0\nc,0,0\n'
    assert json.loads(files["predictions.json"]) == [{"id": 1}]
    assert files["confusion.png"].startswith(b"\x89PNG")


@pytest.mark.parametrize(("largest", "text"), [(12, "12"), (9000, "90")])
def test_confusion_figure_numbers(largest, text):
    (axis,) = confusion_figure(torch.tensor([[largest, largest // 9], [0, 0]]), ["cat", "dog"]).axes
    assert axis.texts[0].get_text() == text
    assert [label.get_text() for label in axis.get_yticklabels()] == ["cat", "dog"]
    assert axis.images[0].get_array()[1].tolist() == [0, 0]  # a class without samples


def test_confusion_figure_many_classes():
    (axis,) = confusion_figure(torch.eye(150, dtype=torch.int64), [f"class {index}" for index in range(150)]).axes
    assert len(axis.texts) == 0
    assert len(axis.get_yticks()) < 20  # numbers, not names
