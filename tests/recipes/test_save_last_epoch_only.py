"""save_last_epoch_only: one folder and one state, of the same weights; through the recipes, on the CPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.runs import FULL, LORA, LORA_MODEL, assert_same_weights, finished, make_config, run_broken, validated

from finch.study.report.runs import read_runs
from finch.study.sweep.job import is_trained

RECIPES = {FULL: ["epoch_1"], LORA: ["epoch_1", "epoch_1_adapter"]}
CFG = SimpleNamespace(epochs=2, forgetting_budget=None, early_stopping=None)


@pytest.fixture(scope="module")
def straight(base_folder, rows_file, trained):
    """Of each recipe the config, and the run of it that saves every epoch: 2 of 11 steps."""
    runs = {}
    for recipe in RECIPES:
        changes = {"model": LORA_MODEL} if recipe == LORA else {}
        config = validated(make_config(base_folder, rows_file, Path("run"), epochs=2, **changes))
        runs[recipe] = config, trained(config, recipe=recipe)
    return runs


def assert_last_only(run, recipe, uninterrupted):
    assert sorted(path.name for path in run.folder.glob("epoch_*")) == RECIPES[recipe]
    assert (run.folder / "best").readlink().name == "epoch_1"
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_22"]
    assert run.column("loss") == uninterrupted.column("loss")
    assert run.metrics(validation=True) == uninterrupted.metrics(validation=True)
    assert_same_weights(run.folder / "epoch_1", uninterrupted.folder / "epoch_1")
    assert is_trained(run.folder, CFG)
    assert read_runs([run.folder])[0].finished_epochs == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_last_epoch_only_equals_the_run_that_saves_all(recipe, straight, tmp_path):
    config, uninterrupted = straight[recipe]
    run = finished(tmp_path, {**config, "save_last_epoch_only": True}, recipe=recipe)
    assert_last_only(run, recipe, uninterrupted)
    assert run.output.count("saved the state of step") == 1
    assert run.output.count("RUN/best is the last epoch, not the one with the best validation loss") == 1


@pytest.mark.parametrize(("every", "saved"), [(11, 11), (13, 13), (None, None)])
def test_last_epoch_only_resumes_from_a_step(every, saved, straight, tmp_path, monkeypatch):
    """A save that is due in the last step of epoch 0 is made at its end; without saves the run starts from scratch."""
    config, uninterrupted = straight[FULL]
    config = {**config, "output_dir": str(tmp_path / "run"), "resume_from_checkpoint": "auto"}
    config |= {"checkpoint": {"every_n_steps": every}, "save_last_epoch_only": True}
    run_broken(tmp_path, config, monkeypatch, 14)
    folder = tmp_path / "run"
    assert [path.name for path in folder.glob("checkpoints/*")] == ([f"step_{saved}"] if saved else [])
    assert not list(folder.glob("epoch_*"))
    assert not is_trained(folder, CFG)
    run = finished(tmp_path, config)
    assert (f"resumed from step {saved} of" if saved else "epoch 1") in run.output
    assert_last_only(run, FULL, uninterrupted)


def test_last_epoch_only_can_be_switched_on_at_a_resume(straight, tmp_path, monkeypatch):
    config, uninterrupted = straight[FULL]
    config = {**config, "output_dir": str(tmp_path / "run"), "epochs": 3}
    run_broken(tmp_path, config, monkeypatch, 14)
    assert (tmp_path / "run" / "epoch_0").is_dir()
    run_broken(tmp_path, config, monkeypatch, 24, "resume_from_checkpoint=True", "save_last_epoch_only=True")
    assert not (tmp_path / "run" / "epoch_1").exists()
    run = finished(tmp_path, config, "resume_from_checkpoint=True")
    assert "resumed from step 11 of" in run.output
    assert_same_weights(run.folder / "epoch_1", uninterrupted.folder / "epoch_1")
    assert (run.folder / "epoch_2").is_dir()
