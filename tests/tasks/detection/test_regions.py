"""The options by which regions follow MMDetection instead of torchvision, one by one."""

import dataclasses
import math

import pytest
import torch
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign

from ppma.config import ConfigError
from ppma.tasks.detection import DetectorConfig, mask_rcnn
from ppma.tasks.detection.model import LEVELS
from ppma.tasks.detection.regions import ASPECT_RATIOS, PyramidAnchors, PyramidRoIAlign, SymmetricBoxCoder

SIZES = (32, 64, 128, 256, 512)
SMALL = DetectorConfig(channels=8, box_channels=8, mask_convolutions=1, short_side=64, long_side=96)


def small(**changes):
    torch.manual_seed(0)
    detector = dataclasses.replace(SMALL, **changes)
    return mask_rcnn("ppma_nano", num_classes=4, detector=detector, stem_stride=4, drop_path_rate=0.0)


def test_exact_anchors_unrounded_and_placed_by_strides():
    images = ImageList(torch.zeros(1, 3, 800, 1088), [(800, 1088)])
    levels = [torch.zeros(1, 1, -(-800 // stride), -(-1088 // stride)) for stride in (4, 8, 16, 32, 64)]
    exact, rounded = (
        PyramidAnchors(SIZES, (4, 8, 16, 32, 64), exact=exact)(images, levels)[0] for exact in (True, False)
    )
    theirs = AnchorGenerator([(size,) for size in SIZES], [ASPECT_RATIOS] * 5)(images, levels)[0]
    assert torch.equal(rounded, theirs)
    assert exact.shape == rounded.shape
    half = 16 * math.sqrt(2)
    torch.testing.assert_close(exact[0], torch.tensor([-half, -half / 2, half, half / 2]))
    assert rounded[0].tolist() == [-23, -11, 23, 11]
    last = torch.tensor([[64.0 * 16, 64 * 12]]).repeat(1, 2)[0]  # the last cell, 17 x 13 of them
    torch.testing.assert_close(exact[-2], last + 256 * torch.tensor([-1.0, -1, 1, 1]))
    assert (rounded[-2, 1] + rounded[-2, 3]).item() / 2 == 61 * 12


@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_level_by_size(aligned):
    """Regions of 111 and 112 pixels are pooled from the first and the second level."""
    pool = PyramidRoIAlign(LEVELS, (4, 8, 16, 32), 7, sampling_ratio=2, aligned=aligned)
    levels = {name: torch.full((1, 1, 256 // 2**i, 256 // 2**i), float(i)) for i, name in enumerate(LEVELS)}
    boxes = torch.tensor([[9.0, 9, 9 + side, 9 + side] for side in (0, 55, 111, 112, 223, 224, 447, 448, 900)])
    assert pool(levels, [boxes])[:, 0, 3, 3].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_roi_align_matches_torchvision():
    torch.manual_seed(0)
    levels = {name: torch.randn(2, 3, 64 // 2**i, 96 // 2**i) for i, name in enumerate(LEVELS)}
    boxes = [torch.rand(9, 4) * 100 + torch.tensor([0, 0, 100, 90]) for _ in range(2)]
    ours = PyramidRoIAlign(LEVELS, (4, 8, 16, 32), 7, sampling_ratio=2, aligned=False)
    theirs = MultiScaleRoIAlign(list(LEVELS), 7, 2)
    shapes = [(256, 384), (250, 380)]
    assert torch.equal(ours(levels, boxes, shapes), theirs(levels, boxes, shapes))


@torch.no_grad()
def test_thin_image_does_not_change_later_images():
    """torchvision infers the strides of levels from the first image, here 1 pixel high and padded to 32."""
    fresh, used = small(score_threshold=0.0).eval(), small(score_threshold=0.0).eval()
    used([torch.rand(3, 1, 96)])
    image = torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(1))
    for name, expected in fresh([image])[0].items():
        assert torch.equal(used([image])[0][name], expected)


@torch.no_grad()
@pytest.mark.parametrize("exact", [False, True])
def test_boxes_float32_under_autocast(exact):
    """In bfloat16, coordinates from 256 pixels on would be multiples of 2."""
    model, seen = small(exact_anchors=exact, score_threshold=0.0).eval(), []
    model.rpn.anchor_generator.register_forward_hook(lambda *arguments: seen.append(arguments[-1][0]))
    model.rpn.register_forward_hook(lambda *arguments: seen.append(arguments[-1][0][0]))
    image = torch.rand(3, 64, 96)
    model([image])
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = model([image])
    assert torch.equal(seen[0], seen[2])  # anchors
    assert seen[3].dtype == found["boxes"].dtype == found["scores"].dtype == torch.float32
    assert (found["boxes"] != found["boxes"].bfloat16()).any()


def test_box_coder_limits_shrinking():
    box = torch.tensor([[100.0, 100, 200, 300]])
    deltas = torch.tensor([[0.0, 0, -100, -100, 0, 0, 100, 100, 1, 1, -1, -1]])
    shrunk, grown, usual = SymmetricBoxCoder((10.0, 10.0, 5.0, 5.0)).decode_single(deltas, box).reshape(3, 4)
    factors = [((found[2:] - found[:2]) / torch.tensor([100, 200])) for found in (shrunk, grown, usual)]
    for factor, expected in zip(factors, (16 / 1000, 1000 / 16, math.exp(-0.2)), strict=True):
        torch.testing.assert_close(factor, torch.full((2,), expected))


def test_foreground_outputs_same_detections():
    """Outputs for the background are never read: without them the other weights give the same detections."""
    whole, fewer = (small(score_threshold=0.0, background_outputs=flag).double().eval() for flag in (True, False))
    state = whole.state_dict()
    for layer, unused in (("box_predictor.bbox_pred", 4), ("mask_predictor.mask_fcn_logits", 1)):
        for part in ("weight", "bias"):
            state[f"roi_heads.{layer}.{part}"] = state[f"roi_heads.{layer}.{part}"][unused:]
    fewer.load_state_dict(state)
    image = torch.rand(3, 64, 96).double()
    with torch.no_grad():
        (first,), (second,) = whole([image]), fewer([image])
    for name, expected in first.items():
        torch.testing.assert_close(second[name], expected)
    assert fewer.roi_heads.mask_predictor.mask_fcn_logits.out_channels == 3


def test_tiny_boxes_kept_or_dropped():
    logits = torch.tensor([[0.0, 9, 0, 0]])
    deltas, outside = torch.zeros(1, 16), [torch.tensor([[-30.0, 4, -10, 20]])]
    for keep, count in ((False, 0), (True, 1)):
        boxes, scores, labels = small(keep_tiny_boxes=keep).roi_heads.postprocess_detections(
            logits, deltas, outside, [(64, 96)]
        )
        assert len(boxes[0]) == len(scores[0]) == len(labels[0]) == count
    assert boxes[0].tolist() == [[0, 4, 0, 20]]
    assert labels[0].tolist() == [1]


def test_candidates_and_proposals_of_the_paper():
    rpn = small(candidates_train=2000, candidates=1000, proposals_train=1000, proposals=1000).rpn
    assert (rpn.train().pre_nms_top_n(), rpn.post_nms_top_n()) == (2000, 1000)
    assert (rpn.eval().pre_nms_top_n(), rpn.post_nms_top_n()) == (1000, 1000)
    rpn = small(proposals_train=30, proposals=20).rpn
    assert (rpn.train().pre_nms_top_n(), rpn.eval().pre_nms_top_n()) == (30, 20)


def test_initial_weights():
    model = small(initial_weights="mmdetection", box_channels=256, channels=64)
    predictor, box_head = model.roi_heads.box_predictor, model.roi_heads.box_head
    # The standard error of the standard deviation of n samples is 1 / sqrt(2 n) of it.
    for layer, std in (
        (predictor.cls_score, 0.01),
        (predictor.bbox_pred, 0.001),
        (box_head.fc7, math.sqrt(2 / (256 + 256))),
        (model.backbone.fpn.layer_blocks[1][0], math.sqrt(2 / (2 * 9 * 64))),
    ):
        error = 4 / math.sqrt(2 * layer.weight.numel())
        assert layer.weight.std().item() == pytest.approx(std, rel=error)
        assert not layer.bias.any()


def test_mmdetection_options_train():
    model = mask_rcnn(
        "ppma_nano",
        num_classes=4,
        detector=DetectorConfig.mmdetection(channels=8, box_channels=8, mask_convolutions=1),
        drop_path_rate=0.0,
    )
    masks = torch.zeros(1, 64, 64, dtype=torch.uint8)
    masks[:, 10:40, 12:50] = 1
    target = {"boxes": torch.tensor([[12.0, 10, 50, 40]]), "labels": torch.tensor([3]), "masks": masks}
    torch.stack(list(model([torch.rand(3, 64, 64)], [target]).values())).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("beta", [0.0, 1 / 9])
def test_box_loss_of_proposals(beta):
    rpn = small(box_loss_beta=beta).rpn
    deltas = torch.tensor([[0.05, -2.0, 0.0, 1.0], [9.0, 9, 9, 9], [7.0, 7, 7, 7]])
    labels = [torch.tensor([1.0, 0.0, -1.0])]  # an object, background, neither
    objectness, boxes = rpn.compute_loss(torch.zeros(3, 1), deltas, labels, [torch.zeros(3, 4)])
    assert objectness.item() == pytest.approx(math.log(2))
    small_error = 0.05 if beta == 0 else 0.05**2 / (2 * beta)
    assert boxes.item() == pytest.approx((small_error + 2 + 1 - 2 * beta / 2) / 2)


@pytest.mark.parametrize("beta", [0.0, 1 / 9])
def test_box_loss_of_heads(beta, monkeypatch):
    """Against a loop over the sampled regions."""
    heads = small(box_loss_beta=beta).train().roi_heads.double()
    torch.manual_seed(0)
    levels = {name: torch.randn(2, 8, 32 // 2**i, 32 // 2**i).double() for i, name in enumerate(LEVELS)}
    corners = torch.rand(2, 30, 2).double() * 60
    proposals = list(torch.cat((corners, corners + 10 + torch.rand(2, 30, 2) * 50), 2))
    masks = torch.zeros(1, 128, 128, dtype=torch.uint8)
    targets = [
        {"boxes": boxes[:1] + 3, "labels": torch.tensor([label]), "masks": masks}
        for boxes, label in zip(proposals, (1, 3), strict=True)
    ]
    predicted, sampled = [], []
    heads.box_predictor.register_forward_hook(lambda *arguments: predicted.append(arguments[-1]))
    select = heads.select_training_samples
    monkeypatch.setattr(heads, "select_training_samples", lambda *given: sampled.append(select(*given)) or sampled[0])
    _, losses = heads(levels, proposals, [(128, 128)] * 2, targets)
    label, target = (torch.cat(sampled[0][index]) for index in (2, 3))
    total = 0.0
    for index in (label > 0).nonzero().flatten().tolist():
        first = 4 * int(label[index])
        for error in (predicted[0][1][index, first : first + 4] - target[index]).abs().tolist():
            total += error**2 / (2 * beta) if error < beta else error - beta / 2
    assert total > 0
    assert losses["loss_box_reg"].item() == pytest.approx(total / len(label), rel=1e-12)
    assert set(losses) == {"loss_classifier", "loss_box_reg", "loss_mask"}


@pytest.mark.parametrize("padding", [True, False])
def test_padding_anchors(padding):
    """An image of 40 x 70 in a batch of 128 x 128: its own padding ends at 64 x 96."""
    rpn = small(padding_anchors=padding, exact_anchors=True).rpn
    grid = [torch.zeros(1, 1, 128 // stride, 128 // stride) for stride in (4, 8, 16, 32, 64)]
    rpn.image_sizes = [(40, 70), (128, 128)]
    anchors = rpn.anchor_generator(ImageList(torch.zeros(2, 3, 128, 128), rpn.image_sizes), grid)
    box = torch.tensor([[4.0, 4, 38, 38]])
    targets = [{"boxes": box}, {"boxes": box[:0]}]
    labels, boxes = rpn.assign_targets_to_anchors(anchors, targets)
    centres = (anchors[0][:, :2] + anchors[0][:, 2:]).round() / 2
    outside = (centres[:, 0] >= 96) | (centres[:, 1] >= 64)
    assert outside.any()
    assert (labels[0][outside] == (0 if padding else -1)).all()
    assert (labels[0][~outside] == 0).any()
    assert boxes[0][labels[0] == 1].unique(dim=0).tolist() == box.tolist()
    assert not labels[1].any()  # the other image fills the batch: background everywhere


def test_low_quality_matches_limited():
    """Three objects by five anchors: one well covered, one covered by 0.4 twice, one hardly."""
    quality = torch.tensor([[0.8, 0.2, 0.1, 0.0, 0.0], [0.1, 0.4, 0.4, 0.0, 0.0], [0.0, 0.1, 0.0, 0.2, 0.0]])
    usual, limited = (small(low_quality_iou=least).rpn.proposal_matcher for least in (None, 0.3))
    assert usual(quality.clone()).tolist() == [0, 1, 1, 2, Matcher.BELOW_LOW_THRESHOLD]
    assert limited(quality.clone()).tolist() == [0, 1, 1, -1, -1]


@pytest.mark.parametrize("binary", [False, True])
def test_mask_loss_targets(binary):
    """A region of one mask pixel an image pixel, half of a pixel off."""
    heads = small(binary_masks=binary).roi_heads
    mask = torch.zeros(1, 40, 40)
    mask[:, 10:20, 10:20] = 1
    logits = torch.zeros(1, 4, 28, 28)
    logits[:, 2] = 50 * (2 * mask[0, 4:32, 4:32] - 1)  # right where targets are 0 or 1
    loss = heads._mask_loss(
        logits, [torch.tensor([[4.0, 4, 32, 32]])], [mask], [torch.tensor([0])], torch.tensor([0, 2])
    )
    if binary:
        assert loss.item() == pytest.approx(0, abs=1e-12)
    else:  # targets of 0.5 along the edges of the square
        assert loss.item() > 1
    empty = heads._mask_loss(logits[:0], [torch.zeros(0, 4)], [mask], [torch.zeros(0)], torch.tensor([0]))
    assert empty.item() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": 10**12}, "channels: expected 1 to 1048576, got 1000000000000"),
        ({"candidates": 0}, "candidates: expected 1 to 1048576, got 0"),
        ({"long_side": 10**6}, "long_side: expected 1 to 16384"),
        ({"short_side": 1400}, "short_side: expected 1 to long_side, got 1400"),
        ({"anchor_sizes": (1, 2, 3, 4, 10**6)}, "anchor_sizes: expected numbers from 1 to 16384"),
        ({"box_loss_beta": -1.0}, "box_loss_beta: expected 0 or more, got -1.0"),
        ({"sampling_ratio": -1}, "sampling_ratio: expected 0 to 64, got -1"),
        ({"score_threshold": 2.0}, "score_threshold: expected a number from 0 to 1, got 2.0"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        DetectorConfig(**changes)
