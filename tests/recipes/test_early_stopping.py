"""early_stopping: when a run ends, which model is its result, and that it counts on after a kill; through the recipe, on the CPU."""

import math
from types import SimpleNamespace

import pytest
from helpers.runs import assert_same_run, assert_same_weights, finished, run_broken, script_validation
from omegaconf import OmegaConf

from finch.base import run_files, status
from finch.training.hooks import EarlyStopping


def result(run):
    assert run_files.chosen_model(run.folder) == run.folder / "best"
    return (run.folder / "best").readlink().name


def test_run_ends_at_the_epoch_and_stays_so(tiny, tmp_path, monkeypatch):
    """A NaN is a reading, and never the best. Killed before the last reading, a run counts on."""
    script_validation(monkeypatch, {2: math.nan, 4: 3.0, 6: 2.5, 8: 2.5, 10: math.nan, 12: 1.0})
    config = tiny(True, epochs=6, max_steps_per_epoch=2, early_stopping={"patience": 2})
    straight = finished(tmp_path / "a", config)
    reason = "early_stopping: validation loss no better in 2 readings; raise patience to continue"
    assert straight.column("step") == list(range(1, 11))
    assert result(straight) == "epoch_2"
    assert f"stopped by {reason}\nbest epoch: 3 of 5, validation loss 2.5000 nats\n" in straight.output
    assert status.read(straight.folder / "status.json")["stopped_by"] == reason

    run_broken(tmp_path / "b", {**config, "output_dir": str(tmp_path / "b" / "run")}, monkeypatch, 9)
    resumed = finished(tmp_path / "b", config, "resume_from_checkpoint=True")
    assert_same_run(resumed, straight)
    assert result(resumed) == "epoch_2"

    again = finished(tmp_path / "b", config, "resume_from_checkpoint=auto")
    assert f"nothing to do: this run was stopped by {reason}" in again.output
    assert_same_run(again, straight)
    assert status.read(again.folder / "status.json")["stopped_by"] == reason
    more = finished(tmp_path / "b", config, "resume_from_checkpoint=True", "early_stopping.patience=3")
    assert (more.column("step"), result(more)) == (list(range(1, 13)), "epoch_5")
    assert status.read(more.folder / "status.json")["stopped_by"] is None


@pytest.mark.parametrize("step", [5, 7])
def test_readings_within_epochs(step, tiny, tmp_path, monkeypatch):
    """The best model is that of step 4. Killed in either epoch, the run goes on from the end of the one before, or from scratch."""
    script_validation(monkeypatch, {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.2, 10: 1.0, 12: 1.0})
    config = tiny(True, epochs=2, max_steps_per_epoch=6, validate_every_n_steps=2, early_stopping={"patience": 2})
    config["resume_from_checkpoint"] = "auto"
    run_broken(tmp_path, config, monkeypatch, step)
    run = finished(tmp_path, config)
    assert [line["step"] for line in run.metrics(validation=True)] == [0, 2, 4, 6, 8]
    assert run.column("step") == list(range(1, 9))
    assert result(run) == "best_step_4"
    assert "best model: step 4, validation loss 2.0000 nats\n" in run.output
    short = finished(tmp_path / "short", {**config, "early_stopping": None}, "epochs=1", "max_steps_per_epoch=4")
    assert_same_weights(run.folder / "best", short.folder / "epoch_0")
    assert [path.name for path in run.folder.glob("best_step_*")] == ["best_step_4"]
    assert (run.folder / "epoch_1").is_dir()  # where it stopped
    again = finished(tmp_path, config)
    assert "nothing to do" in again.output
    assert_same_run(again, run)
    assert result(again) == "best_step_4"
    finished(tmp_path, config, "early_stopping=null", "resume_from_checkpoint=False", "overwrite=True")
    assert not list(run.folder.glob("best_step_*"))


@pytest.mark.parametrize(("every", "stops_at"), [(None, 6), (2, 2)])
def test_a_probe_read_more_often_counts_as_often(every, stops_at):
    """Readings at each step, the first the best, of 6 steps an epoch."""
    cfg = OmegaConf.create(
        {"early_stopping": {"patience": 1}, "validate_every_n_steps": every, "save_best_only": False}
    )
    key, stopped = "probe/own/kl", []
    state = SimpleNamespace(step=0, select_by=key, best={"epoch": "epoch_0", key: 0.1}, evaluated={})
    state.request_stop = lambda *_, **__: stopped.append(state.step)
    hook = EarlyStopping(cfg)
    hook.start(SimpleNamespace(cfg=cfg, state=state))
    for state.step in range(1, 13):
        state.evaluated = {key: 0.2}
        hook.after_step(state)
        if state.step % 6 == 0:
            hook.after_epoch(state)
    assert stopped[0] == stops_at


def test_two_ranks_stop_where_one_does(tiny, tmp_path):
    rising = ["optimizer.lr=0.5", "lr_scheduler=null", "validate_every_n_steps=1", "early_stopping.patience=1"]
    one = finished(tmp_path / "one", tiny(True), *rising)
    two = finished(tmp_path / "two", tiny(True, batch_size=2), *rising, ranks=2)
    assert two.column("step") == one.column("step")
    assert len(one.column("step")) < 11
    assert result(two) == result(one)
