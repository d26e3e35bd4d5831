"""Which models a folder stands for."""

from finch.base import run_files


def test_models_in_runs_sweeps_averages_and_interpolations(tmp_path):
    def model(*names):
        folder = tmp_path.joinpath(*names)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    cells = [tmp_path / "sweep" / name for name in ("a", "b", "untrained")]
    for cell in cells:
        cell.mkdir(parents=True)
        (cell / run_files.CELL).write_text("{}")
        if cell.name != "untrained":
            model("sweep", cell.name, "epoch_0")
    averaged = model("sweep", "a", "average", "model")
    blends = [model("out", f"alpha_{alpha}") for alpha in (0.3, 0.6)]
    blended_cells = [model("blends", cell, "alpha_0.5") for cell in "ab"]
    assert run_files.models_in(tmp_path / "sweep") == cells[:2]
    assert run_files.models_in(cells[0]) == [cells[0]]
    assert run_files.models_in(cells[0] / "average") == run_files.models_in(averaged) == [averaged]
    assert run_files.models_in(tmp_path / "out") == blends
    assert run_files.models_in(tmp_path / "blends") == blended_cells
    assert run_files.models_in(tmp_path / "none") == [tmp_path / "none"]
