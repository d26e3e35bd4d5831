"""examples/finch_in_your_loop.ipynb runs from top to bottom, and its two runs are one."""

import re

import nbclient
import nbformat
import pytest
from helpers.runs import ROOT


@pytest.mark.slow
def test_notebook_runs():
    notebook = nbformat.read(ROOT / "examples" / "finch_in_your_loop.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert float(re.search(r"differ by at most (\S+), relative", text)[1]) < 1e-5
    new = float(re.findall(r"new ones (\S+)", text)[-1])
    assert new < 0.1  # it starts at 0.8
    assert "image/png" in outputs[-1]["data"]
