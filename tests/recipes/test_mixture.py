"""Training on a mixture through the recipe: what it draws, on several ranks too, and what a resume refuses; exact resume: test_resume.py."""

import json
import shutil
from collections import Counter

import pytest
from helpers.runs import assert_close_runs, make_config, run_here, run_ranks, write_rows

import finch.data.training_data as training_data
from benchmarks.tiny_job import instruct_dataset


@pytest.fixture
def config(base_folder, rows_file, tmp_path):
    """41 rows of a task and 20% of 17 general rows: 51 samples per epoch, 10 of them general; a step has 4, the last one 3."""

    def make(**changes):
        general = tmp_path / "general.jsonl"
        if not general.exists():
            write_rows(general, 17)
        config = make_config(base_folder, rows_file, tmp_path / "run", **{"epochs": 2, **changes})
        config["dataset"] = [
            {**instruct_dataset(rows_file), "weight": 0.8},
            {**instruct_dataset(general), "weight": 0.2},
        ]
        return config

    return make


@pytest.fixture
def drawn(monkeypatch):
    """The indices that the run trains on, epoch by epoch."""
    seen = {}
    batches = training_data.TrainingData.batches

    def recorded(data, epoch, consumed):
        rows = [index for batch in data.order.micro_batches(0, epoch, consumed) for index in batch]
        seen.setdefault(epoch, []).extend(rows)
        return batches(data, epoch, consumed)

    monkeypatch.setattr(training_data.TrainingData, "batches", recorded)
    return seen


def test_mixture_draws_its_shares(config, drawn, tmp_path):
    config = config()
    run = run_here(tmp_path, config)
    line = "51 samples: 41 (80.39%) from the 41 rows of {}, each 1 times; 10 (19.61%) from the 17 rows of {}, each 0.588 times"
    files = [entry["data_files"] for entry in config["dataset"]]
    assert line.format(*files) in run.output
    assert [len(rows) for rows in drawn.values()] == [51, 51]
    general = [[index for index in rows if index >= 41] for rows in drawn.values()]
    assert [len(rows) for rows in general] == [10, 10]
    assert len(set(general[0] + general[1])) == 17  # all of them, before one is repeated
    assert Counter(index for index in drawn[1] if index < 41) == Counter(range(41))
    assert run.column("step")[-1] == 26


def test_mixture_on_two_ranks_draws_the_same(config, trained, tmp_path):
    straight = trained(config())
    run = run_ranks(2, tmp_path, {**config(), "batch_size": 2})
    assert_close_runs(run, straight, 1e-5)


def test_resume_with_other_weights_is_refused_and_more_epochs_are_not(config, tmp_path):
    config = config(epochs=1, lr_scheduler=None)
    assert run_here(tmp_path / "s", config).returncode == 0
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step_*/state.json")).read_text())
    for weights, message in (
        ([0.9, 0.1], "draws per epoch"),
        (None, "rows of the mixed datasets=[41, 17], this config"),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True, dirs_exist_ok=True)
        changed = {
            **config,
            "output_dir": str(tmp_path / "copy"),
            "dataset": [dict(entry) for entry in config["dataset"]],
        }
        for index, entry in enumerate(changed["dataset"]):
            entry.update({"weight": weights[index]} if weights else {"weight": None})
        error = run_here(tmp_path / "c", changed, "resume_from_checkpoint=True", "check_dataset=False").error()
        assert message in error
    more = run_here(tmp_path / "s", config, "resume_from_checkpoint=True", "epochs=2")
    assert more.returncode == 0, more.output
    assert state["identity"]["draws per epoch of the mixed datasets"] == [41, 10]
    assert more.column("step")[-1] == 26
