import pytest
from short_run import SHORT, one_thread

from ppma_cli import main


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """The folder of a finished short run on the digits, by the command line."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    settings = [part for setting in SHORT for part in ("--set", setting)]
    assert main(["train", "digits_nano", "--out", str(out), *settings]) == 0
    return out


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """A folder of a few small scenes in both layouts; tests that change it copy it."""
    out = tmp_path_factory.mktemp("data") / "scenes"
    assert main(["data", "scenes", "--out", str(out), "--train", "8", "--val", "3", "--size", "64"]) == 0
    return out
