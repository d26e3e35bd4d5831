"""The sbatch script at work, with programs in Slurm's place. On a real Slurm: tests/slurm."""

import os
import re
import socket
import subprocess

import pytest
from helpers.runs import ROOT

from finch.cli import main as cli
from finch.cli.sbatch import fill_in
from finch.cli.slurm import SCRIPT

TEMPLATE = (ROOT / "slurm" / SCRIPT).read_text()


class Script:
    """The script in a folder of its own; ``srun`` and ``scontrol`` are shell lines that ``put`` sets."""

    def __init__(self, folder):
        self.folder, self.run, self.job = folder, folder / "run", folder / "run/slurm/7"
        (folder / "bin").mkdir()
        self.put("srun", 'printf "%s\\n" "$@" > given')
        self.put("scontrol", 'echo "$@" >> requeued')
        self.put("sleep", "")

    def put(self, program, lines):
        (self.folder / "bin" / program).write_text(f"#!/bin/bash\n{lines}\n")
        (self.folder / "bin" / program).chmod(0o755)

    def checkpoint(self, step):
        (self.run / f"checkpoints/step_{step}").mkdir(parents=True)
        (self.run / f"checkpoints/step_{step}/manifest.json").touch()

    def start(self, number=0, *overrides, script=TEMPLATE, **variables):
        """What it prints, and its exit code; ``variables``: of its first lines."""
        for name, value in variables.items():
            script = fill_in(script, {}, {name: value})
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        job |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": str(number), "HOSTNAME": "login"}
        (self.folder / "given").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-c", script, "script", "some.yaml", f"output_dir={self.run}", *overrides],
            env={**os.environ, **job, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout + done.stderr, done.returncode

    def given(self):
        """srun's arguments."""
        return (self.folder / "given").read_text().splitlines()

    def resumes(self):
        return [word.partition("=")[2] for word in self.given() if word.startswith("resume_from_checkpoint=")][-1]

    def requeues(self):
        file = self.folder / "requeued"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


def test_resumes_from_another_run_until_it_has_a_checkpoint(script):
    """A start that is preempted before its first checkpoint must not make the next one begin with the pretrained model."""
    other = "resume_from_checkpoint=/other/checkpoints/step_9"
    for number in (0, 1):
        script.start(number, other)
        assert script.resumes() == "/other/checkpoints/step_9"
    (script.run / "metrics.jsonl").write_text("lost\n")  # of steps that were taken and not saved
    script.start(2, other)
    assert not (script.run / "metrics.jsonl").exists()
    assert (script.job / "start_2/metrics_of_lost_steps.jsonl").read_text() == "lost\n"
    (script.run / "metrics.jsonl").write_text("kept\n")
    script.checkpoint(4)
    script.start(3, other)
    assert script.resumes() == "auto"
    assert (script.run / "metrics.jsonl").read_text() == "kept\n"


@pytest.mark.parametrize("lines", ['A="(x) $NOWHERE_SET"', "[[ -f absent ]] && source absent"])
def test_a_sites_file_need_not_be_strict(lines, script):
    (script.folder / "site.sh").write_text(f"export SITE=1\n{lines}\n")
    script.put("srun", "echo SITE=$SITE")
    printed, code = script.start(SETUP="site.sh")
    assert (code, "SITE=1" in printed) == (0, True), printed
    assert "SETUP=absent.sh cannot be read" in script.start(SETUP="absent.sh")[0]


def test_gives_up_where_progress_cannot_be_written(script):
    """Its disk is full for all starts but the first."""
    script.put("srun", "exit 9")
    script.start(0)
    assert (script.job / "progress").read_text() == "0 -1 0\n"
    script.put("mv", "exit 1")
    for number in (1, 2, 3):
        printed, code = script.start(number)
        assert f"{script.job}/progress cannot be written" in printed
    assert "gave up: no new checkpoint in 4 starts" in printed
    assert (code, script.requeues()) == (9, ["requeue 7"] * 3)
    (script.job / "progress").write_text("")  # as on a disk that was full
    assert "gave up: no new checkpoint in 4 starts" in script.start(3)[0]
    (script.job / "progress").unlink()
    assert "gave up: no new checkpoint in 4 starts" in script.start(4)[0]


def test_a_new_checkpoint_counts_as_progress(script):
    script.put("srun", "exit 9")
    for number in range(8):
        if number % 3 == 2:
            script.checkpoint(number)
        script.start(number)
    assert len(script.requeues()) == 8
    assert (script.job / "progress").read_text() == "7 5 2\n"


def test_each_start_has_its_own_port(script):
    ports = []
    for number in range(3):
        script.start(number)
        host, _, port = (
            next(w for w in script.given() if w.startswith("--rdzv-endpoint=")).partition("=")[2].partition(":")
        )
        assert host == socket.gethostname()
        ports.append(int(port))
    assert len(set(ports)) == 3
    assert all(10000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(("signal", "code", "requeues"), [("USR1", 0, ["requeue 7"]), ("TERM", 143, [])])
def test_a_signal_before_the_ranks_are_started(signal, code, requeues, script):
    """A time limit that is no longer than its warning; a job that is cancelled while it waits for a file system."""
    (script.folder / "site.sh").write_text(f"kill -{signal} $$\n")
    printed, left = script.start(SETUP="site.sh")
    assert (left, script.requeues()) == (code, requeues), printed
    assert not (script.folder / "given").exists()


def test_one_nodes_program(script):
    """With no container and no CPUs asked for, arrays are empty; bash before 4.4 takes them for unset under `set -u`."""
    script.start()
    assert script.given()[4] == "bash"
    assert not re.search(r"^\s*set -\S*u", TEMPLATE, flags=re.MULTILINE)


def test_it_is_a_jobs(script):
    printed, code = script.start(script="unset SLURM_JOB_ID\n" + TEMPLATE)
    assert (code, "hand it to sbatch" in printed) == (2, True)


def test_pyxis_is_given_image_mounts_and_place(capsys, script, tmp_path, monkeypatch):
    """Down to the command of srun: pyxis is a plugin of a site's own."""
    monkeypatch.chdir(tmp_path)
    options = ("--nodes", "2", "--container", "nvcr.io#team/image:1", "--container-mounts", "/models,/a b:/data")
    cli.main(["slurm", "submit", "qwen3/4B_finch", *options, "--dry-run"])
    filled = capsys.readouterr().out
    printed, _ = script.start(script=filled)
    assert printed.splitlines()[-1].endswith("done"), printed
    given = script.given()
    run = tmp_path / "out/qwen3/4B_finch"
    mounts = ",".join(f"{folder}:{folder}" for folder in (tmp_path, run, "/models"))
    for option in (
        "--container-image=nvcr.io#team/image:1",
        f"--container-workdir={tmp_path}",
        f"--container-mounts={mounts},/a b:/data",
        "--nodes=2",
        "--nproc-per-node=8",
    ):
        assert option in given
    assert given.index("--container-image=nvcr.io#team/image:1") < given.index("bash")
