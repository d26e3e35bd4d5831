"""`finch slurm submit` without a Slurm: what it prints, hands to sbatch and refuses. Jobs: tests/slurm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from finch import cli
from finch.errors import UserError
from finch.slurm import SCRIPT, fill_in

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
    "nodes": (("qwen3/4B_finch", "--nodes", "0"), "--nodes 0 with 1 ranks each starts nothing"),
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


def test_filling_in_a_script_of_ones_own():
    script = "#!/bin/sh\n#SBATCH --time=1\n# why\n#SBATCH --gpus-per-node=1\necho\nA=1 # a\nA=2\n"
    filled = fill_in(script, {"time": "2", "gpus-per-node": None, "comment": "a b"}, {"A": r"'\1'"})
    assert filled == "#!/bin/sh\n#SBATCH --time=2\n# why\n#SBATCH --comment='a b'\necho\nA='\\1'\nA=2\n"
    with pytest.raises(UserError, match="no line B="):
        fill_in(script, {}, {"B": "1"})
    with pytest.raises(UserError, match="no #SBATCH lines"):
        fill_in("echo\n", {}, {})


def test_a_script_of_ones_own_is_taken(capsys):
    Path("mine.sbatch").write_text(TEMPLATE.replace("WITHOUT_PROGRESS=3", "WITHOUT_PROGRESS=7"))
    _, script, _ = submit(capsys, "qwen3/4B_finch", "--script", "mine.sbatch", "--dry-run")
    assert "MAX_RESTARTS_WITHOUT_PROGRESS=7" in script.splitlines()


def test_pyxis_is_given_image_mounts_and_place(capsys, tmp_path):
    """Down to the command of srun, by a program in its place: pyxis is a plugin of a site's own."""
    options = ("--nodes", "2", "--container", "nvcr.io#team/image:1", "--container-mounts", "/models,/data")
    _, script, _ = submit(capsys, "qwen3/4B_finch", *options, "--dry-run")
    (tmp_path / "srun").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > given\n')
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].endswith("done"), done.stdout + done.stderr
    given = (tmp_path / "given").read_text().splitlines()
    run = tmp_path / "out/qwen3/4B_finch"
    mounts = ",".join(f"{folder}:{folder}" for folder in (tmp_path, run, "/models", "/data"))
    for option in (
        "--container-image=nvcr.io#team/image:1",
        f"--container-workdir={tmp_path}",
        f"--container-mounts={mounts}",
        "--nodes=2",
        "--nproc-per-node=8",
    ):
        assert option in given
    assert given.index("--container-image=nvcr.io#team/image:1") < given.index("bash")
