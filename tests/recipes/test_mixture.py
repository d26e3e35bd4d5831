"""Training on a mixture through the recipe: what it draws, on several ranks too, and what a resume refuses; exact resume: test_resume.py."""

import json

import pytest
from helpers.runs import assert_close_runs, finished, mixed, run_here, run_ranks


@pytest.fixture
def config(tiny, tmp_path):
    """41 rows of a task and 20% of 17 general rows: 51 samples per epoch, 10 of them general; a step has 4, the last one 3."""
    return mixed(tiny(epochs=2), tmp_path)


def test_mixture_draws_its_shares_on_any_number_of_ranks(config, trained, tmp_path):
    """Which rows: tests/data/test_mixture.py."""
    straight = trained(config)
    line = "51 samples: 41 (80.39%) from the 41 rows of {}, each 1 times; 10 (19.61%) from the 17 rows of {}, each 0.588 times"
    assert line.format(*(entry["data_files"] for entry in config["dataset"])) in straight.output
    assert straight.column("step")[-1] == 26
    run = run_ranks(2, tmp_path, {**config, "batch_size": 2})
    assert_close_runs(run, straight, 1e-5)


def test_resume_with_other_weights_is_refused_and_more_epochs_are_not(config, tmp_path):
    config |= {"epochs": 1, "lr_scheduler": None}
    finished(tmp_path, config)
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step_*/state.json")).read_text())
    for weights, message in (
        ((0.9, 0.1), "draws per epoch"),
        ((None, None), "rows of the mixed datasets=[41, 17], this config"),
    ):
        parts = zip(config["dataset"], weights, strict=True)
        changed = {**config, "dataset": [{**entry, "weight": weight} for entry, weight in parts]}
        assert message in run_here(tmp_path, changed, "resume_from_checkpoint=True", "check_dataset=False").error()
    more = finished(tmp_path, config, "resume_from_checkpoint=True", "epochs=2")
    assert state["identity"]["draws per epoch of the mixed datasets"] == [41, 10]
    assert more.column("step")[-1] == 26
