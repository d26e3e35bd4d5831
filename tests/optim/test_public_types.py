"""What a user's type checker sees of the public names: their types, not Any."""

import os
import subprocess
import sys

import pytest
from helpers.runs import ROOT

LOOP = """
import torch
from finch import FinchLR, ReplayLR
from finch.objectives import TALR
from finch.objectives.regularization import L2

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
schedule = FinchLR(optimizer, eta_max=5e-5, init=3.6)
reveal_type(schedule)
reveal_type(schedule.step(torch.tensor(1.0), 7))
reveal_type(schedule.get_last_lr())
reveal_type(ReplayLR(optimizer, log="run").step(1.0))
reveal_type(TALR("exact").weights(torch.ones(1, 2), {}))
reveal_type(L2().add_gradients())
FinchLR(optimizer, eta_max=5e-5, init=None)
"""
REVEALED = ["finch.optim.finch_lr.FinchLR", "bool", "list[float]", "bool"]
REVEALED += ["torch._tensor.Tensor", "dict[str, torch._tensor.Tensor]"]


@pytest.mark.slow
def test_public_names_are_typed_for_mypy_strict(tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(LOOP)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "loop.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    *lines, _ = result.stdout.splitlines()
    assert [line.split('"')[1] for line in lines if "Revealed" in line] == REVEALED
    (error,) = [line for line in lines if "error:" in line]  # a wrong argument is one
    assert 'Argument "init" to "FinchLR" has incompatible type "None"' in error
    assert (ROOT / "finch" / "py.typed").is_file()  # without it an installed finch has no types
