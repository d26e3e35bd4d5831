"""Preemption: a run saves, writes REQUEUE, and a later resume equals the uninterrupted run; through the recipe."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import (
    ROOT,
    assert_same_run,
    before_steps,
    environment,
    is_running,
    run_here,
    wait_until,
    write_config,
)

from finch.training import run as run_module


@pytest.mark.parametrize(("number", "step"), [(signal.SIGUSR1, 11), (signal.SIGTERM, 22), (signal.SIGINT, 3)])
def test_resume_after_a_signal_equals_uninterrupted(number, step, tmp_path, tiny, trained, monkeypatch):
    """Also in the last step of an epoch, whose end then comes after the resume, and in the very last step."""
    config = tiny(epochs=2, num_workers=2)
    uninterrupted = trained(config)
    config["resume_from_checkpoint"] = "auto"
    with monkeypatch.context() as patch:
        before_steps(patch, lambda recipe: recipe.state.step + 1 == step and os.kill(os.getpid(), number))
        stopped = run_here(tmp_path / "r", config)
    assert stopped.column("step") == list(range(1, step + 1))
    assert f"stopped by a signal after step {step}; the same command with resume_from_checkpoint=True" in stopped.output
    is_interrupt = number == signal.SIGINT
    assert stopped.returncode == (130 if is_interrupt else 0)
    assert (stopped.folder / "REQUEUE").exists() != is_interrupt
    resumed = run_here(tmp_path / "r", config)
    assert f"resumed from step {step} of" in resumed.output
    assert not (resumed.folder / "REQUEUE").exists()
    assert_same_run(resumed, uninterrupted)


def start(folder, config):
    """`tune run` on two ranks with slow rows; does not wait for the end."""
    (folder / "slow").write_text("0.1")
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", "--nproc_per_node", "2"]
    command += ["finch_full_finetune", "--config", write_config(folder, config)]
    paths = environment(ROOT / "tests", SLOW_ROWS=str(folder / "slow"))
    output = (folder / "output.txt").open("w")
    return subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=paths)


def wait_for_step(run, step):
    file = run / "metrics.jsonl"
    output = (run.parent / "output.txt").read_text
    wait_until(lambda: file.exists() and len(file.read_text().splitlines()) >= step, output)


@pytest.mark.slow
def test_two_ranks_stop_together_and_die_with_their_launcher(tmp_path, tiny, trained, monkeypatch):
    config = tiny(epochs=2, batch_size=2, check_dataset=False)
    config["lr_scheduler"]["init"] = 4.0
    uninterrupted = trained({**config, "batch_size": 4})
    config |= {"resume_from_checkpoint": "auto", "checkpoint": {"every_n_steps": 2}}
    slow = {**config, "dataset": {**config["dataset"], "_component_": "helpers.acting_rows.dataset"}}

    # Killed with its launcher; meanwhile a second start is refused.
    launcher = start(tmp_path, slow)
    wait_for_step(tmp_path / "run", 4)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    workers = [int(each) for each in children.split()]
    holder = json.loads((tmp_path / "run" / ".lock").read_text())["pid"]
    assert holder in workers
    monkeypatch.setattr(run_module, "ACQUIRE_TIMEOUT_S", 0.2)
    assert f"is in use by process {holder} on " in run_here(tmp_path / "second", config).error()
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(map(is_running, workers)))

    # SIGTERM, which torchrun forwards
    launcher = start(tmp_path, slow)
    wait_for_step(tmp_path / "run", len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) + 2)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=600)
    output = (tmp_path / "output.txt").read_text()
    assert "resumed from step" in output
    assert "stopped by a signal after step" in output, output[-3000:]
    assert (tmp_path / "run" / "REQUEUE").exists()
    resumed = run_here(tmp_path / "r", {**config, "batch_size": 4})
    assert resumed.column("step") == uninterrupted.column("step")
    assert resumed.column("loss") == pytest.approx(uninterrupted.column("loss"), rel=0, abs=1e-5)
