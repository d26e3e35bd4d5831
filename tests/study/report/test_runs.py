"""Reading run folders: a config's method, runs still going, sweeps, and folders that are no run."""

import os
import shutil

import pytest
from helpers.evaluated_runs import make_run
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.config.methods import METHODS
from finch.config.parser import merge
from finch.study.report.runs import method_of_config, read_runs, sort_runs


@pytest.mark.parametrize(
    "name", [*sorted(METHODS.keys() - {"small_lr", "wise_ft"}), "finch+talr", "finch+lora", "talr+l2"]
)
def test_method_of_config(name):
    settings = ["lr_scheduler.log=x"] if name == "lr_replay" else ["lr_scheduler.decay=0.3"]
    cfg, _ = merge(MINIMAL, [f"method={name}", *settings])
    assert method_of_config(OmegaConf.to_container(cfg)) == name


@pytest.mark.parametrize("name", ["kl", "self_replay", "l2"])
def test_block_of_strength_0_is_no_method(name):
    block = next(iter(METHODS[name].blocks))
    cfg, _ = merge(MINIMAL, [f"method=finch+{name}" if name == "kl" else f"method={name}", f"{block}.strength=0"])
    assert method_of_config(OmegaConf.to_container(cfg)) == ("finch" if name == "kl" else "sft")


def test_replayed_rates_are_not_the_configs(tmp_path):
    run = make_run(tmp_path / "a", "sft", 3e-5, base=None, config={"lr_scheduler": {"_component_": "finch.ReplayLR"}})
    assert (read_runs([run])[0].method, read_runs([run])[0].learning_rate) == ("lr_replay", None)


def test_values_are_a_cell_over_its_config(tmp_path):
    run = make_run(tmp_path / "a", "finch", 3e-5, 7, base=None)
    [read] = read_runs([run])
    assert read.values == {"method": "finch", "optimizer.lr": 3e-5, "batch_size": 16, "seed": 7}
    (run / "cell.json").write_text('{"values": {"method": "small_lr"}, "task": "science", "status": "running"}')
    [read] = read_runs([run])
    assert (read.method, read.learning_rate, read.task, read.status) == ("small_lr", 3e-5, "science", "running")


def test_rows_are_those_that_were_trained(tmp_path):
    """Not the lines of the file, of which some are held out."""
    run = make_run(tmp_path / "a", "sft", 1e-5, base=None)
    assert read_runs([run])[0].num_rows is None
    (run / "checkpoints" / "step_3").mkdir(parents=True)
    (run / "checkpoints" / "step_3" / "manifest.json").write_text("{}")
    (run / "checkpoints" / "step_3" / "state.json").write_text('{"identity": {"number of samples": 54}}')
    assert read_runs([run])[0].num_rows == 54
    (run / "checkpoints" / "step_3" / "state.json").write_text("{}")
    assert read_runs([run])[0].num_rows is None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"identity": {"number of samples": Infinity}}', None])
def test_rows_of_a_damaged_state_are_unknown(tmp_path, text):
    """None: a pipe."""
    run = make_run(tmp_path / "a", "sft", 1e-5, base=None)
    (run / "checkpoints" / "step_3").mkdir(parents=True)
    (run / "checkpoints" / "step_3" / "manifest.json").write_text("{}")
    state = run / "checkpoints" / "step_3" / "state.json"
    os.mkfifo(state) if text is None else state.write_text(text)
    assert read_runs([run])[0].num_rows is None


def test_steps_without_an_epoch_are_of_the_first(tmp_path):
    run = make_run(tmp_path / "a", "sft", 1e-5, base=None, config={"save_best_only": True})
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert read_runs([run])[0].finished_epochs == 0


def test_an_average_is_compared_with_its_run(tmp_path, base_folder):
    """By what `finch average` has measured, next to the run's own start; not once the run has another model."""
    run = make_run(tmp_path / "a", "sft", 1e-5, base=None)
    shutil.copytree(base_folder, run / "best", dirs_exist_ok=True)
    average = run / "average"
    average.mkdir()
    (average / "measured.json").write_text('{"validation_loss": 1.0, "probe/own/kl": 0.1}')
    assert len(read_runs([run])) == 1  # it was killed before its model was written
    shutil.copytree(base_folder, average / "model")
    os.utime(average / "model" / "config.json", (2e9, 2e9))
    trained, averaged = read_runs([run])
    assert (trained.method, averaged.method, averaged.folder) == ("sft", "wise_ft+sft", average)
    start = [line for line in trained.metrics if line["step"] == 0]
    assert start
    assert averaged.metrics == [*start, {"step": 40, "validation_loss": 1.0, "probe/own/kl": 0.1}]
    assert (averaged.learning_rate, averaged.finished_epochs) == (trained.learning_rate, trained.finished_epochs)
    os.utime(run / "best" / "model.safetensors", (3e9, 3e9))
    assert len(read_runs([run])) == 1


def test_gradient_accumulation_is_part_of_the_batch(tmp_path):
    run = make_run(tmp_path / "a", "sft", 1e-5, base=None, config={"gradient_accumulation_steps": 4})
    assert read_runs([run])[0].values["batch_size"] == 64


def test_sweep_is_read_once_with_its_cells(sweep):
    runs = read_runs([sweep, sweep / "sft-3e-05-0"])
    places = [(run.method, run.seed) for run in sort_runs(runs)]
    assert places == [(method, seed) for method in ("sft", "finch", "dft") for seed in (0, 1, 0, 1)]


def test_bad_folders_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "new" / "epoch_0").mkdir(parents=True)
    (tmp_path / "new" / "cell.json").write_text('{"values": {}}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("a: [")
    for name, words in {
        "absent": "is no folder",
        "empty": "is no run",
        "new": "no steps and no evaluations yet",
        "broken": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            read_runs([tmp_path / name])
        assert "\n" not in str(caught.value)
