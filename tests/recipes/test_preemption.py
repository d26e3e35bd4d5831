"""Preemption: a run saves, writes REQUEUE, and a later resume equals the uninterrupted run; through the recipe."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.runs import assert_same_run, before_steps, environment, is_running, make_config, run_here

from finch.training import run as run_module


def raise_signal_in(monkeypatch, step, number):
    before_steps(monkeypatch, lambda recipe: recipe.state.step + 1 == step and os.kill(os.getpid(), number))


@pytest.mark.parametrize(("number", "step"), [(signal.SIGUSR1, 11), (signal.SIGTERM, 22), (signal.SIGINT, 3)])
def test_resume_after_a_signal_equals_uninterrupted(
    number, step, tmp_path, base_folder, rows_file, trained, monkeypatch
):
    """Also in the last step of an epoch, whose end then comes after the resume, and in the very last step."""
    config = make_config(base_folder, rows_file, tmp_path / "uninterrupted", epochs=2, num_workers=2)
    uninterrupted = trained(config)
    config = {**config, "output_dir": str(tmp_path / "run"), "resume_from_checkpoint": "auto"}
    with monkeypatch.context() as patch:
        raise_signal_in(patch, step, number)
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


def start(folder, config, ranks):
    """`tune run` that does not wait for the end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "slow_rows.py").write_text(
        "import time\n"
        "from torchtune.datasets import instruct_dataset\n"
        "class Slow:\n"
        "    def __init__(self, inner): self.inner = inner\n"
        "    def __len__(self): return len(self.inner)\n"
        "    def __getitem__(self, index):\n"
        "        time.sleep(0.1)\n"
        "        return self.inner[index]\n"
        "def dataset(tokenizer, **kwargs): return Slow(instruct_dataset(tokenizer, **kwargs))\n"
    )
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", "--nproc_per_node", str(ranks)]
    command += ["finch_full_finetune", "--config", str(folder / "config.yaml")]
    output = (folder / "output.txt").open("w")
    return subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=environment())


def wait_for_step(run, step, timeout=600):
    end = time.monotonic() + timeout
    while True:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        if len(lines) >= step:
            return
        assert time.monotonic() < end, (run.parent / "output.txt").read_text()[-3000:]
        time.sleep(0.05)


def workers_of(launcher):
    return [int(each) for each in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.slow
def test_two_ranks_stop_together_and_die_with_their_launcher(tmp_path, base_folder, rows_file, trained, monkeypatch):
    config = make_config(
        base_folder, rows_file, tmp_path / "uninterrupted", epochs=2, batch_size=2, check_dataset=False
    )
    config["lr_scheduler"] = {**config["lr_scheduler"], "init": 4.0}
    uninterrupted = trained({**config, "batch_size": 4})
    config = {**config, "output_dir": str(tmp_path / "run"), "resume_from_checkpoint": "auto"}
    config["checkpoint"] = {"every_n_steps": 2}
    slow = {**config, "dataset": {**config["dataset"], "_component_": "slow_rows.dataset"}}

    # Killed with its launcher; meanwhile a second start is refused.
    launcher = start(tmp_path, slow, ranks=2)
    wait_for_step(tmp_path / "run", 4)
    workers = workers_of(launcher.pid)
    holder = json.loads((tmp_path / "run" / ".lock").read_text())["pid"]
    assert holder in workers
    monkeypatch.setattr(run_module, "ACQUIRE_TIMEOUT_S", 0.2)
    assert f"is in use by process {holder} on " in run_here(tmp_path / "second", config).error()
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 300
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.05)

    # SIGTERM, which torchrun forwards
    launcher = start(tmp_path, slow, ranks=2)
    wait_for_step(tmp_path / "run", len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) + 2)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=600)
    output = (tmp_path / "output.txt").read_text()
    assert "resumed from step" in output
    assert "stopped by a signal after step" in output, output[-3000:]
    assert (tmp_path / "run" / "REQUEUE").exists()
    resumed = run_here(tmp_path / "r", {**config, "batch_size": 4})
    assert resumed.column("step") == uninterrupted.column("step")
    assert max(abs(a - b) for a, b in zip(resumed.column("loss"), uninterrupted.column("loss"), strict=True)) < 1e-5
