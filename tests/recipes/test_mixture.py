"""Training on a mixture through the recipe: what it draws, resumed anywhere and on another number of ranks, and bad input."""

import json
import shutil
from collections import Counter

import pytest
from helpers.runs import assert_same_run, make_config, run_broken, run_here, tune_run, write_rows

import finch.data.training_data as training_data
from benchmarks.tiny_job import instruct_dataset


@pytest.fixture
def config(base_folder, rows_file, tmp_path):
    """41 rows of a task and 20% of 17 general rows: 51 samples an epoch, 10 of them general; a step has 4, the last one 3."""

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


def draws(output):
    return next(line for line in output.splitlines() if "an epoch draws" in line)


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


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_mixture_resumes_bit_for_bit(packed, config, drawn, tmp_path, monkeypatch):
    """With FLOW, which needs the pretrained model's loss on each row."""
    config = config(loss={"_component_": "finch.objectives.FLOW"}, epochs=6 if packed else 2)
    if packed:
        config["batch_size"] = 1
        for entry in config["dataset"]:
            entry["packed"] = True
    uninterrupted = run_here(tmp_path / "s", config)
    assert uninterrupted.returncode == 0, uninterrupted.output
    if not packed:
        line = "51 samples: 41 (80.39%) from the 41 rows of {}, each 1 times; 10 (19.61%) from the 17 rows of {}, each 0.588 times"
        files = [entry["data_files"] for entry in config["dataset"]]
        assert draws(uninterrupted.output).endswith(line.format(*files))
        assert [len(rows) for rows in drawn.values()] == [51, 51]
        general = [[index for index in rows if index >= 41] for rows in drawn.values()]
        assert [len(rows) for rows in general] == [10, 10]
        assert len(set(general[0] + general[1])) == 17  # all of them, before one is repeated
        assert Counter(index for index in drawn[1] if index < 41) == Counter(range(41))
        assert uninterrupted.column("step")[-1] == 26
    broken = {**config, "output_dir": str(tmp_path / "broken"), "resume_from_checkpoint": "auto"}
    broken["checkpoint"] = {"every_n_steps": 2}
    last = uninterrupted.column("step")[-1]
    for stop in (5, last - 2):
        run_broken(tmp_path / "b", broken, monkeypatch, stop)
    resumed = run_here(tmp_path / "b", broken)
    assert "resumed from step" in resumed.output
    assert_same_run(resumed, uninterrupted)


@pytest.mark.slow
def test_mixture_resumes_on_another_number_of_ranks(config, tmp_path, monkeypatch):
    config = config()
    uninterrupted = run_here(tmp_path / "s", config)
    broken = {**config, "output_dir": str(tmp_path / "broken"), "checkpoint": {"every_n_steps": 5}}
    run_broken(tmp_path / "b", broken, monkeypatch, 8)
    moved = {**broken, "batch_size": 2, "resume_from_checkpoint": True}
    resumed = tune_run(tmp_path / "b", moved, ranks=2)
    assert "resumed from step 5 of" in resumed.output, resumed.output[-3000:]
    assert resumed.returncode == 0, resumed.output[-3000:]
    assert len(resumed.column("loss")) == 26
    assert resumed.column("num_target_tokens") == uninterrupted.column("num_target_tokens")
    differences = [abs(a - b) for a, b in zip(resumed.column("loss"), uninterrupted.column("loss"), strict=True)]
    assert max(differences) < 1e-5


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


@pytest.mark.parametrize(
    ("weights", "overrides", "message"),
    [
        ((0.8, 0), (), "dataset[1].weight=0 must be a number above 0"),
        ((-1, 0.2), (), "dataset[0].weight=-1 must be a number above 0"),
        ((0.8, "much"), (), "dataset[1].weight=much must be a number above 0"),
        ((0.8, None), (), "dataset[1] has no weight, but dataset[0].weight=0.8: give every entry"),
        ((0.8,), (), "dataset[0].weight=0.8: dataset has one entry"),
        ((0.8, 0.001), (), "dataset[1].weight=0.001: an epoch of 41 samples would draw none of its rows"),
        ((0.8, 0.2), ("dataset[1].split=train[:0]",), "general.jsonl (split train[:0]) has no rows"),
        ((0.8, 0.2), ("dataset[1].weight=x",), "dataset[1].weight=x must be a number above 0"),
        ((0.8, 0.2), ("dataset[2].weight=1",), "dataset[2].weight=1: dataset has 2 entries, [0] to [1]"),
        ((0.8, 0.2), ("dataset[1].packed=True",), "some entries of the list have packed=True and others not"),
        ((0.8, 0.2), ("batch_size=64",), "is larger than an epoch of 51 samples"),
    ],
)
def test_bad_weights_are_reported_in_one_line(weights, overrides, message, config, tmp_path):
    config = config()
    config["dataset"] = config["dataset"][: len(weights)]
    for entry, weight in zip(config["dataset"], weights, strict=True):
        entry.pop("weight") if weight is None else entry.update(weight=weight)
    assert message in run_here(tmp_path / "s", config, *overrides).error()
