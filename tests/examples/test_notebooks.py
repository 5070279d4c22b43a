"""The notebooks are those of the tutorials, and run."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def tool():
    specification = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_notebooks_up_to_date():
    written = tool()
    assert sorted(written.NOTEBOOKS) == NOTEBOOKS
    for target, page in written.NOTEBOOKS.items():
        assert target.read_text() == written.notebook(page.read_text()), "run `python tools/notebooks.py`"


@pytest.mark.slow
@by_notebook
def test_notebook_runs(path, tmp_path):
    """In a kernel, as a reader runs it; cell by cell without one, where Jupyter is not installed."""
    try:
        import ipykernel  # noqa: F401
        import nbformat
        from nbclient import NotebookClient
    except ImportError:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        names = {}
        for cell in cells:
            exec("".join(cell["source"]), names)
        return
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "True" in printed
    assert "False" not in printed
