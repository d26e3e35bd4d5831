"""`finch slurm submit --titan`: what is submitted and refused. The program in sbatch's place is a dry run."""

import shlex
import sys

import pytest
from helpers.runs import ROOT, finch


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("FINCH_SETUP", "FINCH_PYTHON", "FINCH_RANKS_PER_NODE", "FINCH_CONTAINER"):
        monkeypatch.delenv(name, raising=False)


def submit(capsys, *words):
    return finch(capsys, "slurm", "submit", "--dry-run", *words)


def test_submit_separates_arguments_from_options(capsys, tmp_path):
    words = (
        "--titan",
        "finch_sft_qwen3_4b",
        "--nodes",
        "2",
        "--training.steps",
        "9",
        "--gpus-per-node=8",
        "--lr_scheduler.ema=0.8",
    )
    code, out, _ = submit(capsys, *words, "--dump_folder", "run", "--time=2:00:00")
    run = tmp_path / "run"
    made, _, command = out.partition(" && ")
    assert (code, made) == (0, f"mkdir -p {run}/slurm")
    script = str(ROOT / "slurm" / "finch_titan.sbatch")
    expected = ["--nodes", "2", "--gpus-per-node=8", "--time=2:00:00", f"--output={run}/slurm/%j.out", script]
    expected += ["finch.titan", "finch_sft_qwen3_4b", str(run), "--training.steps", "9", "--lr_scheduler.ema=0.8"]
    assert shlex.split(command) == [f"FINCH_PYTHON={sys.executable}", "sbatch", "--parsable", "--export=ALL", *expected]


def test_submit_takes_a_module_of_the_users(capsys, tmp_path):
    code, out, _ = submit(capsys, "--titan", "my.configs:run")
    assert code == 0
    assert out.split()[-3:] == ["my.configs", "run", f"{tmp_path}/out/titan/run"]
    assert "--gpus-per-node=1" in out.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--titan", "finch_sft_qwen3"],
            "--titan finch_sft_qwen3: there is no such config; there are finch_sft_llama3_8b, ",
        ),
        (["--titan", "finch_sft_qwen3_4b", "epochs=3"], "epochs=3 is no option of sbatch or torchtitan.train"),
        (["--titan", "finch_sft_qwen3_4b", "--time=0:01:30"], "--time 0:01:30 must be at least 60 s longer"),
    ],
)
def test_submit_refuses(capsys, words, message):
    code, out, err = submit(capsys, *words)
    assert (code, out) == (1, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
