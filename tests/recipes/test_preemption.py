"""Preemption: a run saves, writes REQUEUE, and a later resume equals the uninterrupted run; through the recipe."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import (
    assert_same_run,
    before_steps,
    environment,
    is_running,
    run_here,
    wait_until,
    write_config,
)


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


@pytest.mark.slow
def test_ranks_die_with_their_launcher(tmp_path, tiny):
    """A killed `tune run` leaves no process. SIGTERM to a launcher: tests/cli/test_run.py and tests/slurm."""
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", "--nproc_per_node", "2", "finch_full_finetune"]
    command += ["--config", write_config(tmp_path, tiny(epochs=1000, batch_size=2))]
    with (tmp_path / "output.txt").open("w") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text(), (tmp_path / "output.txt").read_text)
    workers = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(workers) >= 2
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(map(is_running, workers)))
