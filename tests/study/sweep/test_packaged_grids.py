"""The paper's grids that come with finch: what they are, what their headers say, and that their cells are valid."""

import re

import pytest

from finch.config.instantiate import grid_names
from finch.study.commands.sweep import compose
from finch.study.sweep.grid import METHOD, RUN, WISE_FT, cells_of, read_grid

METHODS = {"sft", "finch", "flow", "dft", "talr", "stm", "l2", "wise_ft", "lora", "small_lr"}
NEED_A_PASS = {"finch", "flow", "stm"}  # with the pretrained weights over the training rows
GRIDS = {name: path for name, path in grid_names().items() if name.startswith(("sweeps/qwen3_4B", "sweeps/llama3_8B"))}


@pytest.mark.parametrize("name", GRIDS)
def test_grid_is_valid_and_its_header_says_what_it_takes(name):
    """Of each method one cell is composed: they differ only in numbers."""
    grid = read_grid(name)
    cells = cells_of(grid)
    task = name.rpartition("_")[2]
    if "clip" in name:
        task = "knowledge"
        assert len(cells) == 5
    else:
        assert {cell.values[METHOD] for cell in cells} == METHODS
        assert len(cells) == 8 * 6 * 2 + 4 * 2 + 2 + 2 * 2 * (task == "knowledge")
        assert not [path for cell in cells for path in cell.dependencies if "constant" in path.name]
    assert grid.out.parts[-3:] == ("out", "sweeps", name.removeprefix("sweeps/"))
    validation = {f"{task}_validation"} - {"language_validation"}  # the answers to Galician instructions have none
    assert set(grid.evaluation.suites) == {"forgetting", task, *validation}
    assert ({grid.evaluation.select_by} - {None}, grid.keep) == (validation, "best")
    assert grid.task == task
    first = {cell.values.get(METHOD): cell for cell in reversed(cells)}
    needed = {path for cell in first.values() for path in cell.dependencies}
    jobs = compose(grid, [cell for cell in cells if cell in first.values() or cell.folder in needed], is_here=False)
    rows = {str(job.cfg.dataset_validation["_component_"]).rpartition(".")[2] for job in jobs}
    assert rows == {{"knowledge": "tofu", "science": "sciknoweval", "language": "galician_alpaca"}[task] + "_dataset"}
    assert all(job.has_validation and job.cfg.epochs == 5 for job in jobs)
    assert {job.cfg.batch_size * job.cfg.gradient_accumulation_steps for job in jobs} == {16}
    text = " ".join(GRIDS[name].read_text().split("\n\n")[0].replace("#", " ").split())
    assert f"finch sweep {name} --slurm " in text
    check_cost(text, cells)


def check_cost(header, cells):
    """The GPU hours and the disk of a header: what its other numbers give."""
    trained = [cell for cell in cells if cell.kind == RUN]
    pattern = r": (\S+) on an H100, for (\d+) runs of 5 epochs: .* \((\S+)\) and token \((\S+) rows x (\d+)\)"
    hours, runs, parameters, rows, tokens = (float(n.replace(",", "")) for n in re.search(pattern, header).groups())
    assert runs == len(trained)
    passes = sum(6 * 5 + 2 * (cell.values.get(METHOD) in NEED_A_PASS) for cell in trained)
    assert hours == round(passes * parameters * rows * tokens / (0.40 * 989e12) / 3600, 1)
    kept = 2 * (len(trained) + sum(cell.kind == WISE_FT for cell in cells))  # bytes per parameter
    epochs_and_checkpoint = 4 * 2 + 6
    num_parallel = 1 if "clip" in cells[0].folder.parent.name else 8
    for num_complete, text in ((num_parallel, "Disk, computed:"), (len(trained), "With --slurm")):
        assert f"{text} {(kept + num_complete * epochs_and_checkpoint) * parameters / 1e12:.1f} TB: " in header
