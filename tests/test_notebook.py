"""The notebooks run from top to bottom."""

import os
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "docs/notebooks"


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize(
    "name,timeout,expected",
    [
        ("quickstart", 600, ("8x, verified:", "violations")),
        ("conversation", 1200, ("answers are those of dense attention", "segments")),
    ],
    ids=["quickstart", "conversation"],
)
def test_notebook(demo_model, tmp_path, name, timeout, expected):
    """The demo_model fixture has fetched the model, so the notebooks need no network."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
    nbclient.NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert all(text in printed for text in expected)
