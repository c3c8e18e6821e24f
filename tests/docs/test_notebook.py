"""The notebook of examples/, in a kernel."""

from __future__ import annotations

import nbclient
import nbformat
from documented import REPO


def test_the_notebook_runs() -> None:
    notebook = nbformat.read(REPO / "examples/notebook/penstock.ipynb", nbformat.NO_CONVERT)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "commit it without outputs"
    nbclient.NotebookClient(notebook, timeout=110).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs if output["output_type"] == "stream")
    assert "each of 512 samples once" in printed
    assert "ZeroDivisionError: division by zero" in printed
    assert "in broken" in printed
    warned = "".join(output.get("text", "") for output in outputs if output.get("name") == "stderr")
    assert not [line for line in warned.splitlines() if not line.startswith("penstock: waiting for ")]
