"""`finch run --slurm` and `finch slurm` with a program in place of sbatch: what it submits, prints and refuses. On a real Slurm: tests/slurm."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import ROOT, finch

from finch.cli import slurm_submit

SCRIPT = ROOT / "slurm" / slurm_submit.SCRIPT
SBATCH = """#!/usr/bin/env bash
(IFS='|'; echo "$*") > "$0.arguments"
env | grep ^FINCH_ | sort > "$0.settings"
if [[ " $*" == *" -p gpu "* ]]; then echo "sbatch: error: invalid partition specified: gpu" >&2; exit 1; fi
echo "42;cluster"
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FINCH_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A program in sbatch's place."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def received(sbatch):
    """sbatch's arguments, separated by |, and the script's settings at the last submission."""
    return Path(f"{sbatch}.arguments").read_text().strip(), Path(f"{sbatch}.settings").read_text().splitlines()


def submit(capsys, *words):
    return finch(capsys, *(["slurm"] if "--titan" in words else ["run", "--slurm"]), *words)


def test_submit_passes_options_overrides_and_settings(capsys, tmp_path, monkeypatch, sbatch):
    monkeypatch.setenv("FINCH_CONTAINER_MOUNTS", "/data,/a b:/c")
    options = ("--nodes", "3", "-N2", "--gpus-per-node=a100:8", "-t12:00:00", "--exclusive", "--comment=a b")
    overrides = ("data_parallel_replicate_dim=2", "~seed", "tokenizer.prompt_template={user: ['a b', ' $x']}")
    code, out, _ = submit(capsys, *options, "qwen3/4B_finch", *overrides, "output_dir=run")
    run = f"{tmp_path}/run"
    expected = (
        f"--parsable|--export=ALL|{'|'.join(options)}|--output={run}/slurm/%j.out|{SCRIPT}|"
        f"qwen3/4B_finch|output_dir={run}|{'|'.join(overrides)}",
        ["FINCH_CONTAINER_MOUNTS=/data,/a b:/c", f"FINCH_PYTHON={sys.executable}", "FINCH_RECIPE=finch_full_finetune"],
    )
    assert (code, received(sbatch)) == (0, expected)
    assert out.splitlines()[0] == f"job 42: nodes=2, ranks per node=8, output_dir={run}"
    assert f"tail -F {run}/slurm/42.out" in out
    assert (tmp_path / "run/slurm").is_dir()


@pytest.mark.parametrize("option", ["--nproc_per_node 8", "--nproc-per-node=8", "--restarts 2", "--rdzv_backend c10d"])
@pytest.mark.parametrize("job", [["qwen3/4B_finch"], ["--titan", "finch_sft_qwen3_4b"]], ids=["recipe", "titan"])
def test_options_of_torchrun_are_refused(capsys, job, option):
    error = submit(capsys, *job, *option.split(), "--dry-run")[2].strip()
    name = option.partition("=")[0].split()[0]
    assert error.startswith(f"finch: error: {name} is torchrun's; ranks are --gpus-per-node N and --nodes N")


def test_a_sites_own_option_is_passed_on(capsys, sbatch):
    assert submit(capsys, "qwen3/4B_finch", "--gpu_cmode=shared", "output_dir=run")[0] == 0
    assert "|--gpu_cmode=shared|" in received(sbatch)[0]


@pytest.mark.parametrize("flag", ["--exclusive", "--requeue", "-H", "-N2"])
def test_a_flag_takes_no_word(capsys, sbatch, flag):
    assert submit(capsys, flag, "qwen3/4B_finch", "output_dir=run")[0] == 0
    assert f"--export=ALL|{flag}|--gpus-per-node=1" in received(sbatch)[0]


def test_dry_run_prints_the_same_command(capsys, tmp_path, monkeypatch, sbatch):
    monkeypatch.setenv("FINCH_SETUP", "a b;$c.sh")
    assert "FINCH_SETUP=a b;$c.sh is not a file" in submit(capsys, "qwen3/4B_finch")[2]
    Path("a b;$c.sh").touch()
    words = ("qwen3/4B_finch", "method=finch+lora", "tokenizer.prompt_template={user: ['a b', ' $x']}", "output_dir=r")
    submit(capsys, *words)
    submitted = received(sbatch)
    (tmp_path / "r/slurm").rmdir()
    _, line, _ = submit(capsys, *words, "--dry-run")
    assert not (tmp_path / "r/slurm").exists()
    monkeypatch.delenv("FINCH_SETUP")
    subprocess.run(["bash", "-c", line], check=True)
    assert received(sbatch) == submitted
    assert {"FINCH_RECIPE=finch_lora_finetune", f"FINCH_SETUP={tmp_path}/a b;$c.sh"} < set(submitted[1])
    assert (tmp_path / "r/slurm").is_dir()


def test_submit_leaves_a_sites_script_its_defaults(capsys, tmp_path, sbatch):
    own = SCRIPT.read_text().replace("#SBATCH --nodes=1", "#SBATCH -N 4 --gres=gpu:8 # ours\n#SBATCH --output=mine.%j")
    (tmp_path / "own.sbatch").write_text(own)
    code, out, err = submit(capsys, "qwen3/4B_finch", "--script", "own.sbatch", "tensor_parallel_dim=8")
    assert code == 0, err
    run = f"{tmp_path}/out/qwen3/4B_finch"
    assert received(sbatch) == (
        f"--parsable|--export=ALL|--output=mine.%j|own.sbatch|qwen3/4B_finch|output_dir={run}|tensor_parallel_dim=8",
        ["FINCH_RECIPE=finch_full_finetune"],
    )
    assert out.startswith(f"job 42: nodes=4, ranks per node=as the job has GPUs, output_dir={run}\n")
    assert "tail -F mine.42\n" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--partition qwen3/4B_finch", "CONFIG is missing"),
        ("qwen3/4B_fnch", "did you mean qwen3/4B_finch?"),
        ("qwen3/4B_finch optimizer.lrr=3", "did you mean optimizer.lr?"),
        ("qwen3/4B_finch lr_scheduler.ema=2", "ema"),
        ("qwen3/4B_finch epochs", "overrides are key=value"),
        ("qwen3/4B_finch overwrite=True", "excludes overwrite=True"),
        ("qwen3/4B_finch --time 5:30", "--time 5:30 must be at least 60 s longer than the 300 s of its"),
        ("qwen3/4B_finch --time=1:00:00 --signal=B:USR1@3590", "or a shorter warning"),
        (
            "qwen3/4B_finch --signal=B:USR2@300",
            "--signal=B:USR2@300 would not save the run before the time limit; give",
        ),
        ("qwen3/4B_finch --signal=USR1@300", "give --signal=B:USR1@SECONDS"),
        ("qwen3/4B_finch --export=NONE", "give --export=ALL,NAME=VALUE"),
        ("qwen3/4B_finch -N 3 data_parallel_replicate_dim=2", "tensor_parallel_dim=1 does not divide the 3 ranks"),
        ("qwen3/4B_finch --array=0-3", "--array=0-3 starts all of its tasks on one output_dir"),
        ("qwen3/4B_finch --script absent", "absent is not a file; give --script FILE"),
        ("qwen3/4B_finch", "sbatch is not on this machine's PATH"),
        (
            "--titan finch_sft_qwen3",
            "--titan finch_sft_qwen3: there is no such config; there are finch_sft_llama3_8b, ",
        ),
        ("--titan finch_sft_qwen3_4b epochs=3", "epochs=3 is no option of sbatch or torchtitan.train"),
        ("--titan finch_sft_qwen3_4b --time=0:01:30", "--time 0:01:30 must be at least 60 s longer"),
    ],
)
def test_submit_fails_early_with_a_one_line_error(words, message, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = submit(capsys, *words.split())
    is_usage = message in ("CONFIG is missing", "overrides are key=value")
    assert (code, out) == (2 if is_usage else 1, "")
    [error] = [line for line in err.splitlines() if line.startswith("finch: error: ")]
    assert message in error
    assert "Traceback" not in err


def test_submit_checks_the_mesh_against_ranks_per_node(capsys, monkeypatch):
    words = ("qwen3/4B_finch", "--gpus-per-node", "0", "tensor_parallel_dim=4", "--dry-run")
    assert "does not divide the 1 rank" in submit(capsys, *words)[2]
    monkeypatch.setenv("FINCH_RANKS_PER_NODE", "4")
    assert submit(capsys, *words)[0] == 0
    monkeypatch.setenv("FINCH_RANKS_PER_NODE", "0")
    assert "FINCH_RANKS_PER_NODE=0 must be a number of at least 1" in submit(capsys, *words)[2]


@pytest.mark.usefixtures("sbatch")
def test_submit_reports_what_sbatch_says(capsys):
    code, _, err = submit(capsys, "qwen3/4B_finch", "-p", "gpu")
    assert code == 1
    assert "finch: error: sbatch fails: invalid partition specified: gpu" in err


def test_folder_of_the_jobs_output_is_made(capsys, tmp_path):
    """Without it Slurm ends the job without a word."""
    for output, place in (("logs/%j.out", " logs"), ("%j/out", ""), ("x.out", "")):
        out = submit(capsys, "--dry-run", "qwen3/4B_finch", f"--output={output}", f"output_dir={tmp_path}/run")[1]
        assert out.partition(" && ")[0] == f"mkdir -p {tmp_path}/run/slurm{place}"


def test_seconds_of_reads_slurms_time_limits():
    limits = {"5": 300, "5:30": 330, "1:05:30": 3930, "2-3": 183600, "2-3:04": 183840, "2-3:04:05": 183845}
    for limit, seconds in {**limits, "0": None, "UNLIMITED": None}.items():
        assert slurm_submit.seconds_of(limit) == seconds, limit


def test_titan_separates_arguments_from_options(capsys, tmp_path):
    words = "--titan finch_sft_qwen3_4b --nodes 2 --training.steps 9 --gpus-per-node=8 --lr_scheduler.ema=0.8 --dump_folder run"
    code, out, _ = submit(capsys, "--dry-run", *words.split(), "--time=2:00:00")
    run = tmp_path / "run"
    made, _, command = out.partition(" && ")
    assert (code, made) == (0, f"mkdir -p {run}/slurm")
    script = str(ROOT / "slurm" / "finch_titan.sbatch")
    expected = ["--nodes", "2", "--gpus-per-node=8", "--time=2:00:00", f"--output={run}/slurm/%j.out", script]
    expected += ["finch.titan", "finch_sft_qwen3_4b", str(run), "--training.steps", "9", "--lr_scheduler.ema=0.8"]
    assert shlex.split(command) == [f"FINCH_PYTHON={sys.executable}", "sbatch", "--parsable", "--export=ALL", *expected]


def test_titan_takes_a_module_of_the_users(capsys, tmp_path):
    out = submit(capsys, "--dry-run", "--titan", "my.configs:run")[1].split()
    assert (out[-3:], "--gpus-per-node=1" in out) == (["my.configs", "run", f"{tmp_path}/out/titan/run"], True)
