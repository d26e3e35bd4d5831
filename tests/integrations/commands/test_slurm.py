"""TorchTitan's sbatch script with programs in Slurm's place. On a real Slurm the recipe's: tests/slurm."""

import os
import subprocess

import pytest
from helpers.runs import ROOT

from finch.integrations.commands.slurm import SCRIPT, _split_arguments


@pytest.mark.parametrize("words", [[], ["--checkpoint.folder", "own"], ["--checkpoint.folder=own"]])
def test_job_is_requeued_after_a_new_checkpoint(words, tmp_path):
    step = tmp_path / "run" / ("own" if words else "checkpoint") / "step-4"
    for program, line in (("srun", f"mkdir -p {step} && touch {step}/.metadata; exit 1"), ("scontrol", "echo $@")):
        (tmp_path / program).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / program).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / SCRIPT), "finch.titan", "finch_sft_qwen3_4b", str(tmp_path / "run"), *words],
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "requeued, to resume from step 4" in done.stdout
    assert done.stdout.splitlines()[-1] == "requeue 7"


def test_negative_number_is_the_options_value():
    words = ["--checkpoint.load_step", "-1", "-N2", "--lr_scheduler.ema=-.5", "--time", "9", "-p", "gpu"]
    arguments = ["--checkpoint.load_step", "-1", "--lr_scheduler.ema=-.5"]
    assert _split_arguments(words) == (arguments, ["-N2", "--time", "9", "-p", "gpu"])
