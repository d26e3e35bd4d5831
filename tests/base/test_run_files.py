"""Which models a folder stands for."""

import os

import pytest

from finch.base import run_files
from finch.base.errors import UserError


@pytest.mark.parametrize("kind", ["link", "loop", "pipe", "file", "folder"])
@pytest.mark.parametrize("is_file", [True, False])
def test_what_finch_writes_in_a_run_is_in_nothing_elses_place(kind, is_file, tmp_path):
    place, text = tmp_path / "run" / "place", "file" if is_file else "folder"
    place.parent.mkdir()
    (tmp_path / "outside").touch() if is_file else (tmp_path / "outside").mkdir()
    assert run_files.inside(place.parent, "place", is_file=is_file) == place
    make = {
        "link": lambda: place.symlink_to(tmp_path / "outside"),
        "loop": lambda: place.symlink_to("place"),
        "pipe": lambda: os.mkfifo(place),
        "file": place.touch,
        "folder": place.mkdir,
    }
    make[kind]()
    message = f"{place} is no {text}, and finch writes a {text} there; remove it"
    for is_own in (False, True):
        if kind == text or (kind == "link" and is_own):
            assert run_files.inside(place.parent, "place", is_file=is_file, is_own=is_own) == place
        else:
            with pytest.raises(UserError) as error:
                run_files.inside(place.parent, "place", is_file=is_file, is_own=is_own)
            assert str(error.value) == message


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
