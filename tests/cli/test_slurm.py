"""`finch slurm submit` without a Slurm: what it prints, hands to sbatch and refuses. Jobs: tests/slurm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import ROOT

from finch.cli import main as cli
from finch.cli.slurm import SCRIPT

TEMPLATE = (ROOT / "slurm" / SCRIPT).read_text()


@pytest.fixture(autouse=True)
def _away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def submit(capsys, *words):
    """(exit code, stdout, stderr)"""
    code = 0
    try:
        cli.main(["slurm", "submit", *words])
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def changed(script):
    """The lines in which a script differs from the one in the repository."""
    known = set(TEMPLATE.splitlines())
    return [line for line in script.splitlines() if line not in known]


def arguments(script):
    """What the shell makes of the script's list of arguments."""
    block = script[script.index("ARGUMENTS=(") :].split("\n)\n")[0]
    done = subprocess.run(
        ["bash", "-c", block + '\n)\nprintf "%s\\0" "${ARGUMENTS[@]}"'], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_dry_run_prints_the_whole_script(capsys, tmp_path):
    options = ("--nodes", "2", "--gpus-per-node", "a100:8", "--time=12:00:00", "--mail-type=END", "--exclusive")
    overrides = ("data_parallel_replicate_dim=2", "tokenizer.prompt_template={user: ['a b', ' $x'], assistant: [x, y]}")
    code, script, _ = submit(capsys, "qwen3/4B_finch", *options, *overrides, "--dry-run")
    run = tmp_path / "out/qwen3/4B_finch"
    assert code == 0
    assert changed(script)[:-1] == [
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=a100:8",
        "#SBATCH --time=12:00:00",
        "#SBATCH --mail-type=END",
        "#SBATCH --exclusive",
        f"#SBATCH --output={run}/slurm/%j.out",
        f"PYTHON={sys.executable}",
        "RECIPE=finch_full_finetune",
        "ARGUMENTS=(",
        "  qwen3/4B_finch",
        f"  output_dir={run}",
        "  data_parallel_replicate_dim=2",
    ]
    assert arguments(script) == ["qwen3/4B_finch", f"output_dir={run}", *overrides]
    assert list(tmp_path.iterdir()) == []


def test_the_filled_script_is_a_script(capsys, tmp_path):
    _, script, _ = submit(capsys, "qwen3/4B_finch", "--dry-run")
    for text in (TEMPLATE, script):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "-"], input=text, text=True, check=True)


def test_a_container_sees_the_working_directory_and_the_run(capsys, tmp_path):
    options = ("--container=my image.sif", "--container-runtime=apptainer", "--container-mounts=/data,/models")
    (tmp_path / "site.sh").touch()
    _, script, _ = submit(
        capsys, "qwen3/4B_finch", *options, "--setup", "site.sh", "--dry-run", "output_dir=/scratch/r"
    )
    for line in (
        "CONTAINER='my image.sif'",
        "CONTAINER_RUNTIME=apptainer",
        f"CONTAINER_MOUNTS={tmp_path},/scratch/r,/data,/models",
        "PYTHON=python",
        f"SETUP={tmp_path}/site.sh",
    ):
        assert line in script.splitlines()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--gpus-per-node", "0", "--ranks-per-node", "4"), "RANKS_PER_NODE=4"),
        (("--gres=gpu:4",), "#SBATCH --gres=gpu:4"),
    ],
)
def test_ranks_without_gpus_per_node(options, line, capsys):
    _, script, _ = submit(capsys, "qwen3/4B_finch", *options, "--dry-run")
    assert line in script.splitlines()
    assert "#SBATCH --gpus-per-node" not in script


def test_the_recipe_is_the_models(capsys):
    _, script, _ = submit(capsys, "qwen3/4B_finch", "method=finch+lora", "--dry-run")
    assert "RECIPE=finch_lora_finetune" in script.splitlines()


FAKE = """#!/usr/bin/env bash
[[ $1 == --parsable ]] || exit 3
cat > "$0.got"
{answer}
"""


def fake_sbatch(tmp_path, monkeypatch, answer):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(FAKE.format(answer=answer))
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "sbatch.got"


def test_submits_what_dry_run_prints(capsys, tmp_path, monkeypatch):
    got = fake_sbatch(tmp_path, monkeypatch, "echo '42;cluster'")
    _, script, _ = submit(capsys, "qwen3/4B_finch", "--dry-run", "output_dir=run")
    code, out, _ = submit(capsys, "qwen3/4B_finch", "output_dir=run")
    assert code == 0
    assert got.read_text() == script
    assert out.splitlines()[0] == f"job 42: 1 node with 1 rank, output_dir={tmp_path}/run"
    assert f"tail -F {tmp_path}/run/slurm/42.out" in out
    assert (tmp_path / "run" / "slurm").is_dir()


MISTAKES = {
    "unknown config": (("qwen3/4B_fnch",), "did you mean qwen3/4B_finch?"),
    "unknown key": (("qwen3/4B_finch", "optimizer.lrr=3"), "did you mean optimizer.lr?"),
    "value": (("qwen3/4B_finch", "epochs=0"), "epochs=0 must be at least 1"),
    "schedule": (("qwen3/4B_finch", "lr_scheduler.ema=2"), "ema"),
    "no override": (("qwen3/4B_finch", "--reservation", "mine"), "overrides are key=value"),
    "short option": (("qwen3/4B_finch", "-p", "gpu"), "-p: write options of sbatch in their long form, --option=value"),
    "gpus": (("qwen3/4B_finch", "--gpus-per-node", "many"), "--gpus-per-node many must be a number, or TYPE:NUMBER"),
    "nodes": (("qwen3/4B_finch", "--nodes", "0"), "--nodes 0 starts nothing; give at least 1"),
    "ranks": (("qwen3/4B_finch", "--ranks-per-node", "0"), "--ranks-per-node 0 starts nothing; give at least 1"),
    "setup": (("qwen3/4B_finch", "--setup", "absent.sh"), "--setup absent.sh is no file here; give one that is"),
    "time": (
        ("qwen3/4B_finch", "--time", "5:30"),
        "--time 5:30 is not a minute longer than the 300 s of its warning, --signal=B:USR1@300",
    ),
    "warning": (("qwen3/4B_finch", "--time=1:00:00", "--signal=B:USR1@3590"), "give a longer --time or a shorter warn"),
    "mesh": (
        ("qwen3/4B_finch", "--nodes=3", "data_parallel_replicate_dim=2"),
        "data_parallel_replicate_dim=2 x tensor_parallel_dim=1 does not divide the 3 ranks",
    ),
    "overwrite": (("qwen3/4B_finch", "overwrite=True"), "excludes overwrite=True"),
    "script": (("qwen3/4B_finch", "--script", "absent"), "--script absent cannot be read: No such file or directory"),
    "no slurm": (("qwen3/4B_finch",), "sbatch is not on this machine's PATH"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_at_once(name, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    words, answer = MISTAKES[name]
    code, out, err = submit(capsys, *words)
    assert (code, out) == (1, "")
    told = [line for line in err.splitlines() if line.startswith("finch: error: ")]
    assert len(told) == 1, err
    assert answer in told[0]
    assert "Traceback" not in err


def test_what_sbatch_refuses_is_handed_on(capsys, tmp_path, monkeypatch):
    fake_sbatch(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    code, _, err = submit(capsys, "qwen3/4B_finch", "--partition", "gpu")
    assert code == 1
    assert "finch: error: sbatch refuses: invalid partition specified: gpu" in err


OWN = (
    TEMPLATE.replace("#SBATCH --nodes=1\n", "#SBATCH --nodes=4\n#SBATCH --output=mine.%j\n")
    .replace("PYTHON=python", "PYTHON=/opt/conda/bin/python")
    .replace("CONTAINER=\n", "CONTAINER=/images/site.sqsh # ours\n")
    .replace("CONTAINER_MOUNTS=\n", 'CONTAINER_MOUNTS="$SCRATCH",/data\n')
    .replace("RANKS_PER_NODE=\n", "RANKS_PER_NODE=8\n")
    .replace("WITHOUT_PROGRESS=3", "WITHOUT_PROGRESS=7")
)


def test_a_script_of_ones_own_keeps_what_it_sets(capsys, tmp_path, monkeypatch):
    Path("mine.sbatch").write_text(OWN)
    fake_sbatch(tmp_path, monkeypatch, "echo 42")
    words = ("qwen3/4B_finch", "--script", "mine.sbatch", "tensor_parallel_dim=8")
    _, script, _ = submit(capsys, *words, "--dry-run")
    run, known = tmp_path / "out/qwen3/4B_finch", set(OWN.splitlines())
    assert [line for line in script.splitlines() if line not in known] == [
        f'CONTAINER_MOUNTS={tmp_path},{run},"$SCRATCH",/data',
        "RECIPE=finch_full_finetune",
        "ARGUMENTS=(",
        "  qwen3/4B_finch",
        f"  output_dir={run}",
        "  tensor_parallel_dim=8",
    ]
    _, out, _ = submit(capsys, *words)
    assert out.startswith(f"job 42: 4 nodes with 8 ranks, output_dir={run}\n")
    assert "tail -F mine.42\n" in out

    given = ("--nodes=2", "--ranks-per-node=1", "--python=other", "--container-mounts=/a:/b", "tensor_parallel_dim=2")
    _, script, _ = submit(capsys, *words[:3], *given, "--dry-run")
    for line in ("#SBATCH --nodes=2", "RANKS_PER_NODE=1", "PYTHON=other", f"CONTAINER_MOUNTS={tmp_path},{run},/a:/b"):
        assert line in script.splitlines()


def test_what_dry_run_prints_is_a_script_of_ones_own(capsys):
    _, script, _ = submit(capsys, "qwen3/4B_finch", "--dry-run", "epochs=1", "seed=2")
    Path("mine.sbatch").write_text(script)
    _, again, _ = submit(capsys, "qwen3/4B_finch", "--script", "mine.sbatch", "--dry-run", "epochs=1", "seed=2")
    assert again == script


@pytest.mark.parametrize("own", ["#SBATCH --nodes=2-4\n", "#SBATCH --gres=gpu:8\n"])
def test_a_number_of_ranks_that_only_slurm_knows(own, capsys):
    Path("mine.sbatch").write_text(TEMPLATE.replace("#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n", own))
    code, _, err = submit(capsys, "qwen3/4B_finch", "--script=mine.sbatch", "--dry-run", "tensor_parallel_dim=8")
    assert code == 0, err
