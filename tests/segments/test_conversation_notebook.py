"""The conversation notebook runs from top to bottom."""

import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/conversation.ipynb"


@pytest.mark.real_model
@pytest.mark.slow
def test_conversation_notebook(demo_model, tmp_path):
    """The demo_model fixture has fetched the model, so the notebook needs no network."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "answers are those of dense attention" in printed and "segments" in printed
