"""The study's command: which files of a sweep are removed, and what it says before it starts."""

import json
import signal
import subprocess
import sys

import pytest

from finch.evaluation.tasks.registry import TASKS
from finch.study.sweep.grid import cells_of, read_grid, write_cell
from studies.smollm2_tofu import run, score
from studies.smollm2_tofu.run import GRIDS, QUICK, cost, remove_weights

GRID = """
config: studies/smollm2_tofu/config.yaml
out: {out}
grid:
  - {{method: [sft], optimizer.lr: [1.0e-4, 2.0e-4], seed: [0]}}
  - {{method: [wise_ft], optimizer.lr: [2.0e-4], seed: [0]}}
evaluate: {{tasks: [tofu, hellaswag]}}
"""
SUITES = {"losses": ["own_answers_kl"], "knowledge": ["tofu"], "forgetting": ["hellaswag"]}


@pytest.fixture
def grid(tmp_path):
    """Its cells have the statuses of ``finish``; none is begun."""
    file = tmp_path / "GRID.yaml"
    file.write_text(GRID.format(out=tmp_path / "sweep"))
    return read_grid(str(file))


def cell_of(grid, *place):
    return next(one for one in cells_of(grid) if (one.values["method"], one.values["optimizer.lr"]) == place)


def fill(cell, status, *, suites=tuple(SUITES)):
    """A cell's folder with a state, a model and results."""
    write_cell(cell, task="knowledge", status=status)
    for name in ("checkpoints/step_60/state.pt", "epoch_4/model.safetensors", "epoch_4/config.json"):
        (cell.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cell.folder / name).write_text("x")
    (cell.folder / "evaluation").mkdir()
    for suite in suites:
        known = {task: {"definition": TASKS[task].definition(False)} for task in SUITES[suite] if task in TASKS}
        tasks = dict.fromkeys(SUITES[suite]) | known
        content = {"tasks": tasks, "settings": {"limit": None, "data": "hub"}}
        (cell.folder / "evaluation" / f"{suite}.json").write_text(json.dumps(content))


def kept(cell):
    """Whether its state and its weights are there; all else has to be."""
    assert (cell.folder / "epoch_4" / "config.json").exists()
    assert (cell.folder / "cell.json").exists()
    return (cell.folder / "checkpoints").exists(), (cell.folder / "epoch_4" / "model.safetensors").exists()


def test_cells_that_have_not_begun_are_left(grid, tmp_path):
    remove_weights(grid)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("status", "suites", "expected"),
    [
        ("running", ["losses", "knowledge", "forgetting"], (True, True)),
        ("failed", [], (True, True)),
        ("evaluated", ["knowledge", "forgetting"], (False, True)),
        ("finished", ["losses", "knowledge"], (False, True)),
        ("evaluated", ["losses", "knowledge", "forgetting"], (False, False)),
    ],
)
def test_weights_are_kept_until_all_scores_are_there(grid, status, suites, expected):
    cell = cell_of(grid, "sft", 1e-4)
    fill(cell, status, suites=suites)
    remove_weights(grid)
    assert kept(cell) == expected


@pytest.mark.parametrize("status", [None, "waiting", "running", "failed"])
def test_sft_weights_wait_for_wise_ft(grid, status):
    source, average = cell_of(grid, "sft", 2e-4), cell_of(grid, "wise_ft", 2e-4)
    assert average.source == source.folder
    fill(source, "evaluated")
    if status is not None:
        write_cell(average, task="knowledge", status=status)
    remove_weights(grid)
    assert kept(source) == (False, True)
    fill(average, "finished", suites=["losses"])
    remove_weights(grid)
    assert kept(source) == (False, False)
    assert kept(average) == (False, True)


def test_cost_has_the_numbers_of_cells():
    assert cost(GRIDS, is_quick=False).startswith("188 cells, 170 of them trained: ")
    assert cost({"blocks": GRIDS["blocks"]}, is_quick=False).startswith("36 cells, 36 of them trained: ")
    assert cost(QUICK, is_quick=True).startswith("the quick study: ")


def test_an_error_while_scoring_ends_the_sweep(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(run, "finch", lambda *words: process)
    monkeypatch.setattr(score, "Scorer", lambda *folders: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.run_sweep(run.HERE / "GRID.yaml", tmp_path, tmp_path / "smooth", 1, [])
    assert process.returncode == -signal.SIGTERM
