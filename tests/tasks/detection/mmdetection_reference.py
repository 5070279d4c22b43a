"""Mask R-CNN of MMDetection 2.28 at test time, written out with loops on the weights of a file.

It uses nothing of torchvision or `ppma`: anchors, box regression, NMS, RoIAlign and pasting are computed from their
definitions, one level, region or box at a time. It also makes random weights of the neck and the heads with
MMDetection's names.
"""

import math

import torch
import torch.nn.functional as F

STRIDES = (4, 8, 16, 32, 64)
RATIOS = (0.5, 1.0, 2.0)
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def random_heads(dims, classes, channels=12, box_channels=16, convolutions=2, seed=1):
    """Random weights of the neck and the heads; scores and deltas are large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    state = {}

    def layer(name, *shape, gain=1.0, transposed=False):
        fan_in = math.prod(shape) // (shape[1] if transposed else shape[0])
        state[f"{name}.weight"] = torch.randn(*shape, generator=generator) * gain * fan_in**-0.5
        state[f"{name}.bias"] = torch.randn(shape[1] if transposed else shape[0], generator=generator) * 0.1 * gain

    for level, dim in enumerate(dims):
        layer(f"neck.lateral_convs.{level}.conv", channels, dim, 1, 1)
        layer(f"neck.fpn_convs.{level}.conv", channels, channels, 3, 3)
    layer("rpn_head.rpn_conv", channels, channels, 3, 3)
    layer("rpn_head.rpn_cls", len(RATIOS), channels, 1, 1)
    layer("rpn_head.rpn_reg", 4 * len(RATIOS), channels, 1, 1, gain=0.7)
    layer("roi_head.bbox_head.shared_fcs.0", box_channels, channels * 49, gain=2.0)
    layer("roi_head.bbox_head.shared_fcs.1", box_channels, box_channels, gain=2.0)
    layer("roi_head.bbox_head.fc_cls", classes + 1, box_channels, gain=2.0)
    layer("roi_head.bbox_head.fc_reg", 4 * classes, box_channels, gain=3.0)
    for index in range(convolutions):
        layer(f"roi_head.mask_head.convs.{index}.conv", channels, channels, 3, 3)
    layer("roi_head.mask_head.upsample", channels, channels, 2, 2, transposed=True, gain=2.0)
    layer("roi_head.mask_head.conv_logits", classes, channels, 1, 1, gain=4.0)
    return state


def scaled_size(height, width, short=800, long=1333):
    """`mmcv.imrescale`: the nearest whole pixels."""
    scale = min(long / max(height, width), short / min(height, width))
    return int(height * scale + 0.5), int(width * scale + 0.5)


def prepare(image, size):
    """An 8-bit image (H, W, 3), numpy, scaled, normalised and padded to (1, 3, H', W'), multiples of 32."""
    pixels = torch.from_numpy(image.astype("float64"))
    for axis, length in enumerate(size):
        position = ((torch.arange(length, dtype=torch.float64) + 0.5) * pixels.shape[axis] / length - 0.5).clamp(min=0)
        low = position.floor().long().clamp(max=pixels.shape[axis] - 1)
        high = (low + 1).clamp(max=pixels.shape[axis] - 1)
        share = (position - low).reshape(-1, *[1] * (2 - axis))
        pixels = pixels.index_select(axis, low) * (1 - share) + pixels.index_select(axis, high) * share
    pixels = (pixels + 0.5).floor()  # 8 bits again
    normal = (pixels - torch.tensor(MEAN, dtype=torch.float64)) / torch.tensor(STD, dtype=torch.float64)
    return F.pad(normal.permute(2, 0, 1)[None], (0, -size[1] % 32, 0, -size[0] % 32))


class Reference:
    """The detector of a file.

    Args:
        state: weights of the neck and the heads with MMDetection's names, float64.
        classes: number of classes without the background.
        candidates: proposals of a level before NMS.
        proposals: proposals after NMS.
        detections: detections of an image.
    """

    score_threshold, box_iou, proposal_iou = 0.05, 0.5, 0.7

    def __init__(self, state, classes, *, candidates=1000, proposals=1000, detections=100):
        self.state, self.classes = state, classes
        self.candidates, self.proposals, self.detections = candidates, proposals, detections

    def conv(self, name, x):
        weight = self.state[f"{name}.weight"]
        return F.conv2d(x, weight, self.state[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def linear(self, name, x):
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def pyramid(self, stages):
        laterals = [self.conv(f"neck.lateral_convs.{i}.conv", stage) for i, stage in enumerate(stages)]
        for i in (3, 2, 1):
            above = laterals[i]
            rows, columns = (
                torch.arange(length) * above.shape[-2 + axis] // length
                for axis, length in enumerate(laterals[i - 1].shape[-2:])
            )
            laterals[i - 1] = laterals[i - 1] + above[..., rows, :][..., columns]  # nearest neighbours
        levels = [self.conv(f"neck.fpn_convs.{i}.conv", lateral) for i, lateral in enumerate(laterals)]
        return [*levels, levels[-1][..., ::2, ::2]]  # max pooling of kernel 1, stride 2

    @staticmethod
    def anchors(level, height, width):
        stride = STRIDES[level]
        found = []
        for y in range(height):
            for x in range(width):
                for ratio in RATIOS:
                    # base size = stride, scale 8, centre offset 0, in float32 as MMDetection has them
                    h = torch.tensor(ratio).sqrt()
                    half_w, half_h = (8 * stride * (1 / h) / 2).item(), (8 * stride * h / 2).item()
                    found.append([stride * x - half_w, stride * y - half_h, stride * x + half_w, stride * y + half_h])
        return torch.tensor(found, dtype=torch.float64)

    @staticmethod
    def decode(box, delta, stds, shape):
        """One box moved by its delta and clipped to the image."""
        dx, dy, dw, dh = (float(value) * std for value, std in zip(delta, stds, strict=True))
        limit = abs(math.log(16 / 1000))
        dw, dh = max(-limit, min(limit, dw)), max(-limit, min(limit, dh))
        left, top, right, bottom = map(float, box)
        centre = (left + right) / 2 + dx * (right - left), (top + bottom) / 2 + dy * (bottom - top)
        half = (right - left) * math.exp(dw) / 2, (bottom - top) * math.exp(dh) / 2
        corners = centre[0] - half[0], centre[1] - half[1], centre[0] + half[0], centre[1] + half[1]
        height, width = shape
        return [min(max(value, 0.0), float(most)) for value, most in zip(corners, (width, height) * 2, strict=True)]

    @staticmethod
    def nms(boxes, scores, groups, threshold):
        """Indices that survive, best first; only boxes of the same group suppress one another."""
        order = sorted(range(len(boxes)), key=lambda index: -scores[index])
        kept = []
        for index in order:
            a = boxes[index]
            for other in kept:
                b = boxes[other]
                if groups[index] != groups[other]:
                    continue
                w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
                common = max(w, 0.0) * max(h, 0.0)
                union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
                if union > 0 and common / union > threshold:
                    break
            else:
                kept.append(index)
        return kept

    def propose(self, levels, shape):
        boxes, scores, groups = [], [], []
        for level, features in enumerate(levels):
            hidden = self.conv("rpn_head.rpn_conv", features).relu()
            height, width = features.shape[-2:]
            objectness = self.conv("rpn_head.rpn_cls", hidden)[0].permute(1, 2, 0).reshape(-1).sigmoid()
            deltas = self.conv("rpn_head.rpn_reg", hidden)[0].permute(1, 2, 0).reshape(-1, 4)
            anchors = self.anchors(level, height, width)
            for index in objectness.argsort(descending=True)[: self.candidates].tolist():
                box = self.decode(anchors[index], deltas[index], (1, 1, 1, 1), shape)
                if box[2] > box[0] and box[3] > box[1]:
                    boxes.append(box)
                    scores.append(objectness[index].item())
                    groups.append(level)
        kept = self.nms(boxes, scores, groups, self.proposal_iou)[: self.proposals]
        return [boxes[index] for index in kept]

    def pool(self, levels, box, cells):
        """RoIAlign, aligned, as many samples in a cell as it has pixels: (C, cells, cells)."""
        side = math.sqrt((box[2] - box[0]) * (box[3] - box[1]))
        level = min(max(math.floor(math.log2(side / 56 + 1e-6)), 0), 3)
        features, stride = levels[level][0], STRIDES[level]

        def weights(low, high, length):
            """Shares (cells, length) of the pixels of an axis."""
            start, extent = low / stride - 0.5, (high - low) / stride
            samples = max(math.ceil(extent / cells), 0)
            matrix = torch.zeros(cells, length, dtype=torch.float64)
            for cell in range(cells):
                for sample in range(samples):
                    position = start + extent / cells * (cell + (sample + 0.5) / samples)
                    if position < -1 or position > length:
                        continue
                    position = max(position, 0.0)
                    first = min(int(position), length - 1)
                    share = 0.0 if first == length - 1 else position - first
                    matrix[cell, first] += (1 - share) / samples
                    matrix[cell, min(first + 1, length - 1)] += share / samples
            return matrix

        rows = weights(box[1], box[3], features.shape[1])
        columns = weights(box[0], box[2], features.shape[2])
        return torch.einsum("yh,chw,xw->cyx", rows, features, columns)

    def detect(self, levels, proposals, shape):
        boxes, scores, labels = [], [], []
        for proposal in proposals:
            hidden = self.pool(levels, proposal, 7).flatten()
            for index in (0, 1):
                hidden = self.linear(f"roi_head.bbox_head.shared_fcs.{index}", hidden).relu()
            probabilities = self.linear("roi_head.bbox_head.fc_cls", hidden).softmax(0)  # the last is the background
            deltas = self.linear("roi_head.bbox_head.fc_reg", hidden).reshape(self.classes, 4)
            for label in range(self.classes):
                if probabilities[label] > self.score_threshold:
                    boxes.append(self.decode(proposal, deltas[label], (0.1, 0.1, 0.2, 0.2), shape))
                    scores.append(probabilities[label].item())
                    labels.append(label)
        kept = self.nms(boxes, scores, labels, self.box_iou)[: self.detections]
        return [(boxes[index], scores[index], labels[index]) for index in kept]

    def mask(self, levels, box, label):
        x = self.pool(levels, box, 14)[None]
        index = 0
        while f"roi_head.mask_head.convs.{index}.conv.weight" in self.state:
            x = self.conv(f"roi_head.mask_head.convs.{index}.conv", x).relu()
            index += 1
        weight, bias = (self.state[f"roi_head.mask_head.upsample.{part}"] for part in ("weight", "bias"))
        x = F.conv_transpose2d(x, weight, bias, stride=2).relu()
        return self.conv("roi_head.mask_head.conv_logits", x)[0, label].sigmoid()

    @staticmethod
    def paste(mask, box, height, width):
        """The mask at the centre of every pixel, bilinear with zeros around it, from a probability of 0.5 on.

        MMDetection looks no further than a pixel around the box (on the CPU), which matters to boxes without area only.
        """
        length = mask.shape[0]
        padded = F.pad(mask, (1, 1, 1, 1))
        pasted = torch.zeros(height, width, dtype=torch.bool)
        for row in range(max(math.floor(box[1]) - 1, 0), min(math.ceil(box[3]) + 1, height)):
            for column in range(max(math.floor(box[0]) - 1, 0), min(math.ceil(box[2]) + 1, width)):
                y, x = (
                    (at + 0.5 - low) / (high - low) * length - 0.5 if high > low else (length - 1) / 2
                    for at, low, high in ((row, box[1], box[3]), (column, box[0], box[2]))
                )
                if -1 < y < length and -1 < x < length:
                    top, left = math.floor(y), math.floor(x)
                    down, right = y - top, x - left
                    corners = padded[top + 1 : top + 3, left + 1 : left + 3]
                    value = (
                        corners[0, 0] * (1 - down) * (1 - right)
                        + corners[0, 1] * (1 - down) * right
                        + corners[1, 0] * down * (1 - right)
                        + corners[1, 1] * down * right
                    )
                    pasted[row, column] = value >= 0.5
        return pasted

    def __call__(self, stages, shape, original):
        """Boxes, scores, labels and masks.

        Args:
            stages: features of the backbone for the padded image.
            shape: height and width of the scaled image.
            original: height and width of the image before.
        """
        levels = self.pyramid(stages)
        found = self.detect(levels, self.propose(levels, shape), shape)
        masks = [self.mask(levels, box, label) for box, _, label in found]
        down, right = original[0] / shape[0], original[1] / shape[1]
        boxes = [[box[0] * right, box[1] * down, box[2] * right, box[3] * down] for box, _, _ in found]
        pasted = [self.paste(mask, box, *original) for mask, box in zip(masks, boxes, strict=True)]
        return boxes, [score for _, score, _ in found], [label for _, _, label in found], pasted
