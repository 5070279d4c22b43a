"""Weights of classes in the loss, and balanced sampling."""

import numpy as np
import pytest
import torch

from ppma.data.source import ArrayImages
from ppma.engine.sampling import epoch_order
from ppma.tasks.registry import load_config, make_task


def class_task(*settings):
    """Digits 0 and 1 only, three times as many of the first."""
    task = make_task(load_config("digits_nano", settings))
    labels = np.array([0] * 9 + [1] * 3)
    task.__dict__["source"] = ArrayImages(np.zeros((12, 8, 8), np.uint8), labels, ["zero", "one"])
    return task


SCORES = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
LABELS = torch.tensor([0, 1, 1])


def test_class_balance_weights():
    assert class_task().class_weights is None
    half, whole = (class_task(f"class_balance={power}").class_weights for power in (0.5, 1))
    assert whole.tolist() == pytest.approx([12 / 18, 12 / 6])  # 9 and 3 images weigh the same together
    assert (half[1] / half[0]).item() == pytest.approx(3**0.5)
    assert (9 * half[0] + 3 * half[1]).item() == pytest.approx(12)


def test_class_weights_of_numbered_classes():
    weights = make_task(load_config("digits_nano", ["class_weights={3: 2}"])).class_weights
    assert (weights[3] / weights[0]).item() == pytest.approx(2)


def test_class_weights_by_name():
    weights = class_task("class_weights={one: 4}").class_weights
    assert (weights[1] / weights[0]).item() == pytest.approx(4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_loss(smoothing):
    task = class_task("class_balance=1", f"label_smoothing={smoothing}")
    loss = task.loss(lambda images: SCORES, (torch.zeros(3, 3, 4, 4), LABELS))["cross_entropy"]
    each = torch.nn.functional.cross_entropy(SCORES, LABELS, label_smoothing=smoothing, reduction="none")
    assert loss.item() == pytest.approx((each * task.class_weights[LABELS]).mean().item())


def test_class_weights_loss_of_mixed_targets():
    task = class_task("class_balance=1", "augment.mixup=0.8", "label_smoothing=0.1", "batch_size=8")
    torch.manual_seed(0)
    np.random.seed(0)
    images, mixed = torch.rand(2, 3, 4, 4), []
    mixing = task.mixing
    task.__dict__["mixing"] = lambda *batch: mixed.append(mixing(*batch)) or mixed[0]
    loss = task.loss(lambda images: SCORES[:2], (images, LABELS[:2]))["cross_entropy"]
    soft = mixed[0][1]
    each = -(soft * SCORES[:2].log_softmax(-1)).sum(-1)
    assert loss.item() == pytest.approx((each * (soft @ task.class_weights)).mean().item())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["class_weights={eleven: 2}"], r"class_weights: expected one of the 10 classes, got 'eleven'"),
        (["class_weights={one: -1}"], r"class_weights.one: expected a number >= 0, got -1"),
        (["class_weights={one: heavy}"], r"class_weights.one: expected a number >= 0, got 'heavy'"),
        (["class_balance=2"], r"class_balance: expected a number in \[0, 1\], got 2.0"),
    ],
)
def test_class_weights_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        assert make_task(load_config("digits_nano", settings)).source


def test_balanced_sampling_weights():
    assert class_task().sample_weights() is None
    weights = class_task("balanced_sampling=true").sample_weights()
    assert sum(weights[:9]) == pytest.approx(sum(weights[9:]))
    order = epoch_order(12, 0, 0, weights=weights)
    assert len(order) == 12
