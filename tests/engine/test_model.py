"""Frozen parameters, gradient checkpointing and compilation."""

import functools

import pytest
import timm
import torch
from stand_in import StandIn, run
from torch import nn

import ppma  # noqa: F401  (registers the models)
from ppma.config import ConfigError
from ppma.engine import checkpoint
from ppma.engine.distributed import World
from ppma.engine.model import build_model


def test_freeze_keeps_parameters_and_statistics(tmp_path):
    trainer = run(tmp_path, "epochs=2", "freeze=[0.*, 1.*]", "optimizer.weight_decay=0.5")
    torch.manual_seed(0)
    first = checkpoint.load(checkpoint.path_of(tmp_path, 12))["model"]
    start = run(tmp_path / "start", "epochs=null", "steps=1", "lr=1e-12").learner.model.state_dict()
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.allclose(first[name], start[name], rtol=0, atol=1e-11)
    norm = trainer.learner.model[1]
    assert not norm.training
    assert norm.running_mean.eq(0).all()
    assert norm.num_batches_tracked == 0
    assert trainer.learner.model[5].training
    assert not torch.equal(first["7.weight"], start["7.weight"])


def test_freeze_resume_is_exact(tmp_path):
    settings = ("freeze=[0.*]", "epochs=2", "keep=10")
    run(tmp_path, *settings)
    whole = checkpoint.load(checkpoint.path_of(tmp_path, 12))["model"]
    run(tmp_path, *settings, resume=str(checkpoint.path_of(tmp_path, 6)))
    again = checkpoint.load(checkpoint.path_of(tmp_path, 12))["model"]
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("[stem.*]", r"freeze: expected patterns of parameter names such as '0.weight', got 'stem.\*'"),
        ("['*']", r"freeze: expected some parameters to train, \('\*',\) freezes all of them"),
        ("stem", r"freeze: expected a list, got 'stem'"),
    ],
)
def test_freeze_mistakes(tmp_path, patterns, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, f"freeze={patterns}")


class Nano(StandIn):
    """A task with a PPMA backbone."""

    def model(self):
        return timm.create_model("ppma_nano", num_classes=2)


def test_grad_checkpointing_same_gradient():
    from stand_in import make

    image, gradients = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)), []
    for setting in ("grad_checkpointing=false", "grad_checkpointing=true"):
        torch.manual_seed(0)
        task = Nano(make(setting).config)
        model = build_model(task, World()).eval()
        assert all(stage.grad_checkpointing == task.config.grad_checkpointing for stage in model.stages)
        model(image).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_grad_checkpointing_unsupported(tmp_path):
    with pytest.raises(ConfigError, match="grad_checkpointing: not supported by Sequential"):
        run(tmp_path, "grad_checkpointing=true")


def test_compile_trains_the_same(tmp_path, monkeypatch):
    # The eager backend captures the graphs without compiling C++ code.
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = run(tmp_path / "compiled", "compile=true", "epochs=1").learner.model.state_dict()
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1
    plain = run(tmp_path / "plain", "epochs=1").learner.model.state_dict()
    assert compiled.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-9, atol=1e-11)
