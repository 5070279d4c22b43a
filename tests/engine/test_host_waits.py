"""Between the steps that are logged, the host never waits for the device."""

import contextlib
import re

import pytest
import torch
from stand_in import make
from test_distributed import PLAIN, two_processes
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppma.engine import distributed, learner
from ppma.engine.distributed import World
from ppma.engine.trainer import Trainer
from ppma.tasks.registry import load_config, make_task

# A device whose values cannot be read: an attempt is an error, as are operations whose results have a shape that
# depends on values.
META = torch.device("meta")


class Uploads(TorchDispatchMode):
    """Records the copies from the CPU that wait for the device."""

    def __init__(self):
        super().__init__()
        self.operations, self.waiting = 0, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operations += 1
        out = operator(*args, **(kwargs or {}))
        copied = operator in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        made = operator is torch.ops.aten.lift_fresh.default and args[0].is_meta  # torch.tensor, new_tensor
        waits = copied and not (kwargs or {}).get("non_blocking") and not any(map(is_true, args[2:]))
        if made or (waits and {leaf.device.type for leaf in tensors((args, out))} == {"cpu", "meta"}):
            self.waiting.append(operator)
        return out


def is_true(value):
    return value is True


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.fixture(autouse=True)
def _autocast_of_meta(monkeypatch):
    """PyTorch has no autocast for the meta device."""
    monkeypatch.setattr(learner, "autocast", lambda amp, device: contextlib.nullcontext())


def test_train_reads_at_log_steps_only(tmp_path):
    task = make("log_steps=5", "checkpoint_steps=null", "accumulate=2", "clip_grad=1")
    trainer = Trainer(task, tmp_path, World(device=META))
    with Uploads() as uploads, pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        trainer.train()
    assert trainer.step == 4  # steps finished: the fifth read its loss, before the update
    assert uploads.operations > 100
    assert uploads.waiting == []


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: bool(x > 0), lambda x: x.cpu(), torch.nonzero])
def test_read_in_step_fails(tmp_path, monkeypatch, read):
    """What the tests here rely on."""
    task = make("checkpoint_steps=null")
    loss = task.loss

    def loss_and_read(model, batch):
        terms = loss(model, batch)
        read(terms["cross_entropy"])
        return terms

    monkeypatch.setattr(task, "loss", loss_and_read)
    trainer = Trainer(task, tmp_path, World(device=META))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        trainer.train()
    assert trainer.step == 0


@pytest.mark.parametrize("make_tensor", [lambda x: x.new_tensor([1.0]), lambda x: torch.ones(3).to(x)])
def test_uploads_recorded(make_tensor):
    with Uploads() as uploads:
        make_tensor(torch.empty(2, device=META))
    assert len(uploads.waiting) == 1


def test_classifier_step():
    """A whole PPMA: mixing of images, drop paths, masked attention, clipping and the moving average."""
    settings = ("augment.mixup=0.8", "augment.cutmix=1", "model_args.drop_path_rate=0.1", "batch_size=4")
    task = make_task(load_config("digits_nano", settings))
    learning = learner.Learner(task, World(device=META), steps=10, steps_per_epoch=5)
    with Uploads() as uploads:
        learning.begin(0)
        learning.backward((torch.randn(4, 3, 32, 32), torch.arange(4)), last=True)
        learning.update(1)
    assert uploads.operations > 1000
    assert uploads.waiting == []


def test_fp16_update(monkeypatch):
    """Whether a gradient overflowed stays on the GPU too. The scaler wants CUDA; autograd would want a real GPU."""
    monkeypatch.setattr("torch.amp.grad_scaler.torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    task = make("amp=fp16", "clip_grad=1")
    model = task.model()
    monkeypatch.setattr(task, "model", lambda: model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        learning = learner.Learner(task, World(device=torch.device("cuda", 0)), steps=10, steps_per_epoch=5)
        assert learning.scaler.is_enabled()
        learning.begin(0)
        for _ in range(2):
            learning.scaler.scale(torch.ones((), device="cuda"))
            for parameter in learning.model.parameters():
                parameter.grad = torch.empty_like(parameter)
            learning.update(1)
        with pytest.raises(DataDependentOutputException):
            learning.scaler.get_scale()


def test_sync_batch_norm(monkeypatch):
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda tensor: None)
    norm = distributed.SyncBatchNorm2d(5).to(META)
    with Uploads() as uploads:
        norm(torch.empty(6, 5, 3, 4, device=META, requires_grad=True)).sum().backward()
    assert uploads.operations > 10
    assert uploads.waiting == []


def test_two_processes_read_at_log_steps_only(tmp_path):
    settings = (*PLAIN, "epochs=2", "eval_epochs=2", "log_steps=5", "checkpoint_steps=null", "clip_grad=1")
    for printed in two_processes((tmp_path, tmp_path), "none", *settings, "--read-steps", "100", "--print-waits"):
        waits = {int(step): seen for step, seen in re.findall(r"^step (\d+): ?(.*)$", printed, re.MULTILINE)}
        assert list(waits) == list(range(1, 13))
        assert {step for step, seen in waits.items() if seen} == {5, 10, 12}
        assert set(" ".join(waits.values()).split()) == {"tolist"}
