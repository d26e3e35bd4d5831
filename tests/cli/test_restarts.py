"""`finch run --restarts`: ranks that fail are started again from the last checkpoint, and those that cannot succeed are not; real processes."""

import subprocess
import sys

import pytest
from helpers.runs import ROOT, Run, environment, make_config, run_here, write_config


@pytest.fixture
def start(base_folder, rows_file, tmp_path):
    """Runs 11 steps with a checkpoint every 4; the hook acts before step 7."""

    def started(name, *arguments, action=None, once=True, **changes):
        folder = tmp_path / name
        changes = {"checkpoint": {"every_n_steps": 4, "async": False}, "max_steps_per_epoch": 11, **changes}
        config = make_config(base_folder, rows_file, folder / "run", batch_size=2, **changes)
        if action is not None:
            hook = {"_component_": "helpers.acting_hook.ActingHook", "step": 7, "action": action}
            config["hooks"] = {"acting": {**hook, "once": str(folder / "acted") if once else ""}}
        command = [sys.executable, "-m", "finch.cli", "run", *arguments, "--config", write_config(folder, config)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
        done = subprocess.run(command, env=environment(ROOT / "tests"), timeout=300, check=False, **options)
        return Run(done.returncode, done.stdout, folder / "run")

    return started


@pytest.mark.slow
def test_killed_rank_is_restarted_and_the_run_equals_an_undisturbed_one(start, tiny, tmp_path):
    """Which is that of one process."""
    undisturbed = start("whole", "--nproc_per_node", "2")
    alone = run_here(tmp_path / "one", tiny(batch_size=4, max_steps_per_epoch=11))
    assert undisturbed.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
    run = start("killed", "--restarts", "2", "--nproc_per_node", "2", action="SIGKILL", overwrite=True)
    assert run.returncode == 0, run.output
    assert "finch: rank 1 failed with exit code 137 (SIGKILL)" in run.output
    assert "; restart 1 of 2, from step_4\n" in run.output
    assert f"resumed from step 4 of {run.folder}/checkpoints/step_4" in run.output
    assert run.column("step") == list(range(1, 12))
    assert run.columns("loss", "lr", "ema_loss") == undisturbed.columns("loss", "lr", "ema_loss")
    model = "epoch_0/model.safetensors"
    assert (run.folder / model).read_bytes() == (undisturbed.folder / model).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "checkpoint"), [(1, None), (2, {"every_n_steps": 4})], ids=["no-checkpoint", "two"])
def test_hanging_rank_is_restarted(start, ranks, checkpoint):
    """Without a checkpoint from the beginning."""
    options = ("--restarts=1", "--nproc_per_node", str(ranks), "distributed_timeout=12")
    run = start("r", *options, action="hang", checkpoint=checkpoint)
    assert run.returncode == 0, run.output
    assert f"finch: rank {ranks - 1} has made no progress for 11 s; its stacks:" in run.output
    assert "failed with exit code 124 (a hang): no progress for distributed_timeout; the stacks are above" in run.output
    assert run.column("step") == list(range(1, 12))


@pytest.mark.slow
def test_second_failure_from_a_checkpoint_ends_the_run(start):
    run = start("r", "--restarts", "9", action="SIGKILL", once=False)
    assert run.returncode == 137
    assert run.output.count("; restart ") == 1
    assert "rank 0 failed with exit code 137 (SIGKILL)" in run.error()
    assert run.error().endswith("; not started a third time from step_4")


@pytest.mark.slow
def test_second_step_that_is_not_finite_names_its_rows(start):
    run = start("r", "--restarts", "9", "shuffle=False", action="nan", once=False)
    assert run.returncode == 1
    assert run.output.count("warning: step 7 took rows 13, 14\n") == 2
    assert run.output.count("finch: error: the loss was not finite at a step after step 6") == 2
    assert "; not started a third time from step_4" in run.output


@pytest.mark.parametrize(
    ("overrides", "action", "code"),
    [(["dataset.data_files=/nowhere.jsonl"], None, 1), pytest.param([], "SIGTERM", 0, marks=pytest.mark.slow)],
)
def test_mistake_and_preemption_are_not_restarted(start, overrides, action, code):
    """A mistake that both ranks see is said once."""
    run = start("r", "--restarts", "3", "--nproc_per_node", "1" if action else "2", *overrides, action=action)
    assert "Traceback" not in run.output
    assert run.returncode == code, run.output
    assert "restart " not in run.output
    if code:
        assert run.error() == "finch: error: dataset.data_files=/nowhere.jsonl does not exist; correct the path"
    else:
        assert (run.folder / "REQUEUE").exists()
