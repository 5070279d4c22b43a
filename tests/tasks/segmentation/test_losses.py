"""Focal and dice losses, and weights of classes."""

import pytest
import torch
import torch.nn.functional as F
from short_run import SHORT_DENSE, SMALL_DECODER, settings

from ppma.data.label_maps import IGNORED
from ppma.tasks.registry import load_config, make_task
from ppma.tasks.segmentation.losses import dice_loss, pixel_loss
from ppma_cli import main


@pytest.fixture
def batch():
    torch.manual_seed(0)
    scores, labels = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randint(0, 3, (2, 4, 5))
    labels[0, 0] = IGNORED
    return scores, labels


def test_focal_loss(batch):
    scores, labels = batch
    expected = 0.0
    for place in (labels != IGNORED).nonzero().tolist():
        p = scores[place[0], :, place[1], place[2]].softmax(0)[labels[tuple(place)]]
        expected += -((1 - p) ** 2) * p.log() / 35
    torch.testing.assert_close(pixel_loss(scores, labels, gamma=2.0), expected)
    focal = pixel_loss(scores, labels, gamma=1e-9, weights=torch.tensor([1.0, 2.0, 3.0]))
    plain = F.cross_entropy(scores, labels, torch.tensor([1.0, 2.0, 3.0]), ignore_index=IGNORED)
    torch.testing.assert_close(focal, plain)
    torch.testing.assert_close(pixel_loss(scores, labels, weights=torch.tensor([1.0, 2.0, 3.0])), plain)


def test_focal_loss_gradient_certain_pixels():
    scores = torch.tensor([100.0, -100.0]).view(1, 2, 1, 1).expand(1, 2, 2, 2).clone().requires_grad_()
    pixel_loss(scores, torch.zeros(1, 2, 2, dtype=torch.int64), gamma=0.5).backward()
    assert scores.grad.isfinite().all()


def test_dice_loss(batch):
    scores, labels = batch
    probabilities, inside = scores.softmax(1), labels != IGNORED
    losses = []
    for label in range(3):
        p, g = probabilities[:, label][inside], (labels == label)[inside].float()
        losses.append(1 - 2 * (p * g).sum() / (p.sum() + g.sum()))
    torch.testing.assert_close(dice_loss(scores, labels), torch.stack(losses).mean())
    expected = (losses[0] + 4 * losses[2]) / 5
    torch.testing.assert_close(dice_loss(scores, labels, torch.tensor([1.0, 0.0, 4.0])), expected)
    absent = labels.where(labels != 1, IGNORED)  # a class that does not occur is left out
    one_hot = 200 * F.one_hot(absent.where(absent != IGNORED, 1), 3).movedim(-1, 1).float()
    assert dice_loss(one_hot, absent).item() == pytest.approx(0, abs=1e-6)


def test_dice_loss_without_labels(batch):
    scores, labels = batch
    loss = dice_loss(scores, torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss == 0
    assert not scores.grad.any()


@pytest.mark.parametrize("loss", ["cross_entropy", "focal", "dice", "combination"])
def test_losses_of_recipe(scenes, batch, loss):
    changes = [f"data.root={scenes}", f"loss={loss}", "class_weights={'3': 2}", "class_balance=0"]
    task = make_task(load_config("scenes_upernet_nano", changes))
    scores = torch.randn(2, len(task.classes), 4, 5)
    weights = torch.tensor([2.0 if name == "3" else 1.0 for name in task.classes])
    gamma = 2.0 if loss == "focal" else 0.0
    pixels, dice = pixel_loss(scores, batch[1], weights=weights, gamma=gamma), dice_loss(scores, batch[1], weights)
    expected = {"dice": dice, "combination": pixels + dice}.get(loss, pixels)
    torch.testing.assert_close(task._loss(scores, batch[1]), expected)


@pytest.mark.parametrize("options", [{}, {"balance": 0.4}, {"mean": "all"}, {"gamma": 2.0}], ids=str)
def test_losses_read_nothing(options):
    """The host does not wait for a GPU: on the meta device, a value that is read is an error."""
    with torch.device("meta"):
        scores, labels = torch.empty(2, 3, 4, 5, requires_grad=True), torch.empty(2, 4, 5, dtype=torch.int64)
        weights = torch.empty(3)
        (pixel_loss(scores, labels, weights=weights, **options) + dice_loss(scores, labels, weights)).backward()
    assert scores.grad.shape == scores.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss=dise", "loss: expected"),
        ("class_weights={cat: 2}", "class_weights: expected one of"),
        ("class_weights={'3': -1}", "class_weights.3: expected a number >= 0"),
        ("focal_gamma=-1", "focal_gamma: expected 0 or more"),
    ],
)
def test_loss_mistakes(scenes, tmp_path, capsys, change, message):
    changes = settings(*SHORT_DENSE, *SMALL_DECODER, f"data.root={scenes}", change)
    assert main(["train", "scenes_upernet_nano", "--out", str(tmp_path), *changes]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_training_with_combination(scenes, tmp_path):
    changes = settings(*SHORT_DENSE, *SMALL_DECODER, f"data.root={scenes}", "loss=combination", "steps=1", "log=[csv]")
    assert main(["train", "scenes_upernet_nano", "--out", str(tmp_path), *changes]) == 0
