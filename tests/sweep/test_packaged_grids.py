"""The paper's grids that come with finch: what they are, what their headers say, and that their cells are valid."""

import pytest

from finch.cli.sweep_jobs import compose
from finch.config.instantiate import grid_names
from finch.sweep.cells import METHOD, RUN
from finch.sweep.gpu_hours import PARAMETERS, SHARE_OF_PEAK, TASKS, disk_terabytes, gpu_hours, header
from finch.sweep.grid import cells_of, read_grid

METHODS = {"sft", "finch", "flow", "dft", "talr", "stm", "l2", "wise_ft", "lora", "small_lr"}
GRIDS = {
    name: path
    for name, path in grid_names().items()
    if name.startswith(tuple(f"sweeps/{model}" for model in PARAMETERS))
}


@pytest.mark.parametrize("name", GRIDS)
def test_grid_is_valid_and_its_header_says_what_it_takes(name):
    """Of each method one cell is composed: they differ in numbers alone."""
    grid = read_grid(name)
    cells = cells_of(grid)
    model, _, task = name.removeprefix("sweeps/").rpartition("_clip_grad_norm" if "clip" in name else "_")
    if "clip" in name:
        model, task = name.removeprefix("sweeps/").removesuffix("_clip_grad_norm"), "knowledge"
        assert len(cells) == 5
    else:
        assert {cell.values[METHOD] for cell in cells} == METHODS
        assert len(cells) == 8 * 6 * 2 + 4 * 2 + 2
    assert grid.out.parts[-3:] == ("out", "sweeps", name.removeprefix("sweeps/"))
    assert set(grid.evaluation.suites) == {"forgetting", task}
    assert grid.task == task
    first = {cell.values.get(METHOD): cell for cell in reversed(cells)}
    needed = {path for cell in first.values() for path in cell.waits_for}
    jobs = compose(grid, [cell for cell in cells if cell in first.values() or cell.folder in needed], is_here=False)
    rows = {str(job.cfg.dataset_validation["_component_"]).rpartition(".")[2] for job in jobs}
    assert rows == {{"knowledge": "tofu", "science": "sciknoweval", "language": "galician_alpaca"}[task] + "_dataset"}
    assert all(job.has_validation and job.cfg.epochs == 5 for job in jobs)
    assert {job.cfg.batch_size * job.cfg.gradient_accumulation_steps for job in jobs} == {16}
    text = GRIDS[name].read_text().split("\n\n")[0]
    assert f"finch sweep {name} --slurm " in text
    assert "\n".join(f"# {line}" for line in header(cells, model, task)) in text


def test_gpu_hours_follow_from_shapes():
    cells = cells_of(read_grid("qwen3_4B_science"))
    trained = [cell for cell in cells if cell.kind == RUN]
    assert len(trained) == 7 * 6 * 2 + 8
    with_pass = 3 * 6 * 2  # finch, flow, stm
    tokens = TASKS["science"].number * TASKS["science"].tokens
    operations = (len(trained) * 5 * 6 + with_pass * 2) * PARAMETERS["qwen3_4B"] * tokens
    assert gpu_hours(cells, PARAMETERS["qwen3_4B"], TASKS["science"]) == pytest.approx(
        operations / (989e12 * SHARE_OF_PEAK * 3600)
    )
    assert disk_terabytes(cells, 1e12) == 92 * 16 + 12 * 2
