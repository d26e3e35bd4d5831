"""Reading run folders: a config's method, runs still going, sweeps, and folders that are no run."""

import json

import pytest
import yaml
from helpers.evaluated_runs import make_config, make_run

from finch.config.methods import METHODS
from finch.errors import UserError
from finch.report.runs import method_of_config, read_runs, sort_runs


def config_of(name):
    """The blocks that ``method=NAME`` sets."""
    config = dict(METHODS["sft"].blocks) | {"model": {"_component_": "torchtune.models.llama2.llama2"}}
    for one in name.split("+"):
        config |= {key: block for key, block in METHODS[one].blocks.items() if key != "model"}
        if one == "lora":
            config["model"] = {"_component_": "torchtune.models.llama2.lora_llama2"}
    return config


@pytest.mark.parametrize(
    "name", [*sorted(METHODS.keys() - {"small_lr", "wise_ft"}), "finch+talr", "finch+lora", "talr+l2"]
)
def test_method_of_config(name):
    assert method_of_config(config_of(name)) == name


def test_values_are_a_cell_over_its_config(tmp_path):
    run = make_run(tmp_path / "a", "finch", 3e-5, 7, base=None)
    [read] = read_runs([run])
    assert read.values == {"method": "finch", "optimizer.lr": 3e-5, "batch_size": 16, "seed": 7}
    (run / "cell.json").write_text(
        json.dumps({"values": {"method": "small_lr"}, "task": "science", "status": "running"})
    )
    [read] = read_runs([run])
    assert (read.method, read.learning_rate, read.task, read.status) == ("small_lr", 3e-5, "science", "running")


def test_gradient_accumulation_is_part_of_the_batch(tmp_path):
    run = make_run(tmp_path / "a", "sft", 1e-5, base=None)
    (run / "config.yaml").write_text(yaml.safe_dump(make_config("sft", 1e-5) | {"gradient_accumulation_steps": 4}))
    assert read_runs([run])[0].values["batch_size"] == 64


def test_torn_last_line_is_left_out(tmp_path):
    run = make_run(tmp_path / "a", "sft", 1e-5, base=None)
    complete = read_runs([run])[0].metrics
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    assert read_runs([run])[0].metrics == complete


def test_sweep_is_read_once_with_its_cells(sweep):
    runs = read_runs([sweep, sweep / "sft-3e-05-0"])
    assert len(runs) == 12
    assert [run.method for run in sort_runs(runs)] == 4 * ["sft"] + 4 * ["finch"] + 4 * ["dft"]
    assert [run.seed for run in sort_runs(runs)][:4] == [0, 1, 0, 1]


def test_bad_folders_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "new" / "epoch_0").mkdir(parents=True)
    (tmp_path / "new" / "cell.json").write_text(json.dumps({"values": {}}))
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
