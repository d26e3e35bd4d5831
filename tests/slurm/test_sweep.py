"""`finch sweep --slurm` on a real Slurm of two nodes."""

import json

import pytest
import yaml
from helpers.runs import wait_until, write_config
from helpers.slurm_lab import ENDED

from finch.cli import main as cli

pytestmark = pytest.mark.slow


def states(lab, job):
    """Of the job, or of each task of an array, by its number."""
    return {each.get("ArrayTaskId", ""): each["JobState"] for each in lab.jobs(job)}


def test_array_trains_cells_and_the_dependent_job_follows(lab, tmp_path, tiny, monkeypatch, capsys):
    """Three cells, of which one fails; then the job that depends on them makes WiSE-FT's model of one of the others."""
    grid = {
        "config": write_config(tmp_path, tiny(max_steps_per_epoch=2, check_dataset=False)),
        "out": str(tmp_path / "out"),
        "grid": [
            {"method": ["sft"], "seed": [0, 1]},
            {"method": ["sft"], "dataset.data_files": [str(tmp_path / "absent.jsonl")]},
            {"method": ["wise_ft"], "seed": [1]},
        ],
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    for key, value in lab.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    cli.main(["sweep", "grid.yaml", "--slurm", "--gpus-per-node=0", "--time", "60", "--jobs", "3"])
    printed = capsys.readouterr().out
    assert "3 of 4 cells to train" in printed
    array, follower = printed.split("squeue --jobs ")[1].split()[0].split(",")
    assert states(lab, follower) == {"": "PENDING"}
    cli.main(["sweep", "grid.yaml", "--slurm", "--gpus-per-node=0", "--time", "60"])
    printed = capsys.readouterr().out
    assert f"in Slurm's queue already: {array}, {follower}\n" in printed
    assert "there is nothing to submit" in printed
    for job in (array, follower):
        wait_until(lambda job=job: set(states(lab, job).values()) <= ENDED, pause=0.5)
    output = "\n".join(path.read_text() for path in sorted((tmp_path / "out" / "slurm").glob("*.out")))
    assert states(lab, array) == {"0": "COMPLETED", "1": "COMPLETED", "2": "FAILED"}, output
    assert states(lab, follower) == {"": "FAILED"}  # as a cell has failed
    failed = "sft_data_files-absent.jsonl"
    assert f"{failed}: it is not trained to the end: dataset" in output
    assert "not retried: dataset" in output
    assert (tmp_path / "out" / "wise_ft_seed1" / "best" / "model.safetensors").exists()
    cells = (tmp_path / "out").glob("*/cell.json")
    found = {path.parent.name: json.loads(path.read_text())["status"] for path in cells}
    assert found == {"sft_seed0": "finished", "sft_seed1": "finished", "wise_ft_seed1": "finished", failed: "failed"}

    capsys.readouterr()  # what is trained is not submitted again
    cli.main(["sweep", "grid.yaml", "--slurm", "--dry-run", "--gpus-per-node=0"])
    printed = capsys.readouterr().out
    assert "--array=0-0 " in printed
    assert f"dataset.data_files={tmp_path}/absent.jsonl" in printed


@pytest.mark.parametrize("cause", ["PYTHON=/bin/false", "kill -USR1 $$"], ids=["failure", "time limit"])
def test_one_task_of_an_array_is_requeued_alone(lab, tmp_path, tiny, monkeypatch, capsys, cause):
    """The task that starts last, which has the array's own number: the first time, it fails or is warned of its time limit."""
    config = write_config(tmp_path, tiny(max_steps_per_epoch=2))
    grid = {"config": config, "out": str(tmp_path / "out"), "grid": [{"method": ["sft"], "seed": [0, 1, 2]}]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    (tmp_path / "site.sh").write_text(
        f"if [[ $SLURM_ARRAY_TASK_ID == 2 && ${{SLURM_RESTART_COUNT:-0}} == 0 ]]; then {cause}; fi\n"
    )
    for key, value in {**lab.environment, "FINCH_SETUP": "site.sh"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    cli.main(["sweep", "grid.yaml", "--slurm", "--gpus-per-node=0", "--time", "60", "--jobs", "1"])
    array = capsys.readouterr().out.split("squeue --jobs ")[1].split()[0]
    wait_until(lambda: set(states(lab, array).values()) <= ENDED, pause=0.5)
    output = "\n".join(path.read_text() for path in sorted((tmp_path / "out" / "slurm").glob("*.out")))
    assert states(lab, array) == {"0": "COMPLETED", "1": "COMPLETED", "2": "COMPLETED"}, output
    restarts = {each["ArrayTaskId"]: each["Restarts"] for each in lab.jobs(array)}
    assert restarts == {"0": "0", "1": "0", "2": "1"}, output
