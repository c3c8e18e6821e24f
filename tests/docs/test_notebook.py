"""The notebook of examples/, in a kernel, and what other cells print."""

from __future__ import annotations

import nbclient
import nbformat
import pytest
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


CELLS = [
    """
import torch
from penstock.client import Appliance, DataLoader

class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        return torch.ones(1) if number < 40 else 1 / (number - 40)

loader = DataLoader(Photos(), batch_size=8)
appliance = Appliance()
batches = iter(loader)
next(batches)
loader.state_dict()
""",
    "for _ in range(20): get_ipython().system('true')",
    "list(batches)",
]


def test_cells_print_what_a_reader_wants(capfd: pytest.CaptureFixture[str]) -> None:
    """A state in one line; no line of gRPC's when the kernel forks; the source of a class that a cell defines."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=110, allow_errors=True).execute()
    outputs = [output for cell in notebook.cells for output in cell["outputs"]]
    (state,) = (output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result")
    assert state == "<State of Photos, batch_size=8, step 1; dict() of it shows its 10 items>"
    assert "gRPC" not in capfd.readouterr().err  # below pytest a kernel leaves the descriptor where it was
    (error,) = (output["evalue"] for output in outputs if output["output_type"] == "error")
    assert "return torch.ones(1) if number < 40 else 1 / (number - 40)" in error
