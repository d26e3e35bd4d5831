"""What of a cell's folder counts as done, and as this cell's."""

import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from finch.evaluation.tasks.registry import SUITES
from finch.study.sweep import local
from finch.study.sweep.grid import EVALUATED, Evaluation
from finch.study.sweep.job import different_key, missing_results
from finch.study.sweep.local import LocalSweep


def test_results_of_other_data_are_missing(tmp_path):
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "epoch_0").mkdir()
    tasks = {task: {} for task in SUITES["forgetting"]}
    for data, missing in (
        ("hub", ["forgetting"]),
        (str(tmp_path / "rows"), []),
        (str(tmp_path / "other"), ["forgetting"]),
    ):
        content = {"tasks": tasks, "settings": {"limit": None, "data": data}}
        (tmp_path / "evaluation" / "forgetting.json").write_text(json.dumps(content))
        assert (
            missing_results(tmp_path, Evaluation(suites=("forgetting",), data_root=str(tmp_path / "rows"))) == missing
        )


@pytest.mark.parametrize(("epochs", "difference"), [(2, None), (3, ("epochs", 2, 3)), (1, ("epochs", 2, 1))])
def test_a_run_of_other_epochs_is_another_one(epochs, difference, tmp_path):
    config = {"epochs": 2, "seed": 0, "output_dir": "a", "checkpointer": {"checkpoint_dir": "base"}}
    OmegaConf.save(config, tmp_path / "config.yaml")
    assert different_key(tmp_path, OmegaConf.create({**config, "epochs": epochs, "output_dir": "b"})) == difference


@pytest.mark.parametrize(("seed", "linked"), [(0, "a"), (1, "b"), (2, None), (None, "a")])
def test_small_lr_takes_the_run_of_its_own_seed(seed, linked, tmp_path, monkeypatch):
    """One whose seed is not there would be counted as another seed."""
    folders, found = {0: tmp_path / "a", 1: tmp_path / "b"}, []
    rate = SimpleNamespace(lr=1e-5, runs=tuple(folders.values()), forgetting=SimpleNamespace(mean=0.0))
    monkeypatch.setattr(local, "rates_of", lambda *_: [rate])
    states = {
        folder: SimpleNamespace(status=EVALUATED, job=SimpleNamespace(cell=SimpleNamespace(values={"seed": number})))
        for number, folder in folders.items()
    }
    cell = SimpleNamespace(dependencies=list(folders.values()), values={} if seed is None else {"seed": seed})
    job = SimpleNamespace(cell=cell, link_to=lambda run: found.append(run.name))
    sweep = SimpleNamespace(
        _states=states, _fail=lambda _, text: found.append(text), _set_trained=lambda _: found.append("trained")
    )
    LocalSweep._select(sweep, SimpleNamespace(job=job))
    expected = (
        ["sft has no evaluated run of seed 2 at the rate that was chosen, 1e-05"]
        if linked is None
        else [linked, "trained"]
    )
    assert found == expected
