"""Every notebook runs from top to bottom, in its own process, as in Colab or Jupyter."""

import os
import pathlib

import nbclient
import nbformat
import pytest

from tests.fast import FLAGS

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FLAGS)  # the notebook asks for its own devices
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are committed without outputs"
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
