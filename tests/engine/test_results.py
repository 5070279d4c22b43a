"""Results on a full disk: warnings while there is time, an error at the end, nothing lost."""

import json

import pytest
import torch
from disk import FULL, full_for
from safetensors.torch import load_file
from stand_in import StandIn, run

from ppma.engine import checkpoint
from ppma.engine.errors import IncompleteRunError


def test_full_disk_weights_retried(tmp_path, monkeypatch):
    save, calls = StandIn.save_weights, []

    def full(task, model, path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        save(task, model, path)

    monkeypatch.setattr(StandIn, "save_weights", full)
    with pytest.warns(UserWarning, match="weights not written, the earlier ones are kept: .*No space left"):
        run(tmp_path, "epochs=2", "eval_epochs=1")
    assert (tmp_path / "last.safetensors").is_file()


def test_full_disk_checkpoint_skipped(tmp_path, monkeypatch):
    save = checkpoint.save

    def full(path, state):
        if state["step"] in (4, 6):
            raise OSError(28, "No space left on device")
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.warns(UserWarning, match="earlier ones are kept: .*No space left"):
        run(tmp_path, "epochs=2", "keep=10")
    assert checkpoint.steps(tmp_path) == [2, 8, 10, 12]


@pytest.mark.parametrize(
    "name", ["last.safetensors", "best.safetensors", "summary.json", "curves.png", "checkpoints/step-00000012.pt"]
)
@pytest.mark.filterwarnings("ignore:.*not written")
def test_full_disk_at_the_end(tmp_path, monkeypatch, name):
    with monkeypatch.context() as full:
        full_for(full, name)
        with pytest.raises(IncompleteRunError) as failed:
            run(tmp_path, "epochs=2")
    assert str(failed.value) == (
        f"{tmp_path}: all 12 steps are done, but {name} could not be written (No space left on device); "
        f"make room, then --resume auto continues from step {10 if 'step' in name else 12}"
    )
    assert not (tmp_path / name).exists()
    run(tmp_path, "epochs=2", resume="auto")
    assert (tmp_path / name).exists()


@pytest.mark.filterwarnings("ignore:.*not written")
def test_full_disk_names_all_missing(tmp_path, monkeypatch):
    full_for(monkeypatch, "safetensors", "last.safetensors", "best.safetensors", "step-", "summary", "curves")
    with pytest.raises(IncompleteRunError) as failed:
        run(tmp_path, "epochs=2")
    names = "last.safetensors, best.safetensors, checkpoints/step-00000012.pt, summary.json, curves.png"
    assert f"but {names} could not be written" in str(failed.value)
    assert str(failed.value).endswith("make room, then --overwrite trains again")


@pytest.mark.filterwarnings("ignore:.*not written")
def test_full_disk_best_weights_retried(tmp_path, monkeypatch):
    save, accuracies = StandIn.save_weights, iter([0.9, 0.1])

    def refuse_the_first(task, model, path):
        if path.name == "best.safetensors" and first:
            first.clear()
            best.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
            raise FULL
        save(task, model, path)

    first, best = [True], {}
    monkeypatch.setattr(StandIn, "save_weights", refuse_the_first)
    monkeypatch.setattr("stand_in.Accuracy.compute", lambda *_: {"accuracy": next(accuracies, 0.5)})
    run(tmp_path, "epochs=2", "eval_epochs=1")
    assert json.loads((tmp_path / "summary.json").read_text())["best_step"] == 6
    written = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(best[name], tensor) for name, tensor in written.items())
