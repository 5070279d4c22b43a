"""Changes of a recipe for a run of seconds."""

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from ppma.tasks.run import train
from ppma_cli import main


@contextlib.contextmanager
def one_thread():
    """Sums have the same bits only with the same number of threads. Fixtures of a session run before the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


SHORT = ("epochs=null", "steps=3", "batch_size=8", "eval_steps=3", "data.test_split=null")

# The same for the recipes of detection and segmentation on scenes.
SHORT_DENSE = ("epochs=null", "steps=3", "batch_size=4", "eval_steps=3", "log_steps=1", "schedule.warmup_steps=0")
SMALL_DETECTOR = ("detector.channels=16", "detector.box_channels=32", "detector.mask_convolutions=1")
SMALL_DECODER = ("decoder.channels=16", "decoder.auxiliary_channels=8")


def settings(*assignments):
    """Assignments as arguments of the command line."""
    return ["--set", *assignments]


def assert_resume_gives_the_same_bits(recipe, run, again, changes, load):
    """A finished run of three steps whose last checkpoint is lost, continued, ends with the same weights."""
    shutil.copytree(run, again)
    (again / "checkpoints" / "step-00000003.pt").unlink()
    (again / "last.safetensors").unlink()
    assert main(["train", recipe, "--out", str(again), "--resume", "auto", *settings(*changes)]) == 0
    first, second = (load(path / "last.safetensors")[0].state_dict() for path in (run, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def summary_on_scenes(recipe, folder):
    """The summary of a whole run of a recipe on scenes as `ppma data scenes` writes them, on two threads."""
    torch.set_num_threads(2)
    assert main(["data", "scenes", "--out", str(folder / "scenes")]) == 0
    return train(recipe, folder / "run", assignments=[f"data.root={folder / 'scenes'}"])


def load_transcription():
    """The module tests/models/transcription.py: the released backbone, written out."""
    path = Path(__file__).parents[1] / "models" / "transcription.py"
    spec = importlib.util.spec_from_file_location("transcription_for_tasks", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def summary_under_torchrun(recipe, out, changes):
    """Run the command on two processes and return its summary."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ppma"]
    command += ["train", recipe, "--out", str(out), *settings(*changes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "summary.json").read_text())
