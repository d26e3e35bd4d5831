"""The sbatch script with programs in Slurm's place. On a real Slurm: test_jobs.py."""

import os
import shutil
import socket
import subprocess

import pytest
from helpers.runs import ROOT

from finch.cli.slurm_submit import SCRIPT

SCRIPT = ROOT / "slurm" / SCRIPT


class Job:
    """Starts of one job in a folder of its own; ``srun`` and ``scontrol`` are shell lines that ``put`` sets."""

    def __init__(self, folder):
        self.folder, self.run, self.job = folder, folder / "run", folder / "run/slurm/7"
        (folder / "bin").mkdir()
        (folder / "requeues").touch()
        self.put("srun", 'printf "%s\\n" "$@" > srun_arguments')
        self.put("scontrol", 'echo "$@" >> requeues')
        self.put("sleep", "")

    def put(self, program, lines):
        (self.folder / "bin" / program).write_text(f"#!/bin/bash\n{lines}\n")
        (self.folder / "bin" / program).chmod(0o755)

    def add_checkpoint(self, step):
        (self.run / f"checkpoints/step_{step}").mkdir(parents=True)
        (self.run / f"checkpoints/step_{step}/manifest.json").touch()

    def start(self, number=0, *overrides, **variables):
        """The output and the exit code of the start after ``number`` requeues."""
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        slurm |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": str(number), "HOSTNAME": "login"}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        (self.folder / "srun_arguments").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(SCRIPT), "some.yaml", f"output_dir={self.run}", *overrides],
            env={**os.environ, **slurm, "PATH": path, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        return done.stdout + done.stderr, done.returncode

    def srun_arguments(self):
        return (self.folder / "srun_arguments").read_text().splitlines()

    def value(self, name):
        """Of the last argument ``name=value``."""
        return [word.partition("=")[2] for word in self.srun_arguments() if word.startswith(f"{name}=")][-1]

    def requeues(self):
        return (self.folder / "requeues").read_text().splitlines()


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.mark.parametrize("place", ["/other/checkpoints/step_9", "False"])
def test_script_resumes_from_path_until_first_checkpoint(job, place):
    """A start that is preempted before its first checkpoint must not make the next one begin elsewhere, or be refused for its lost steps."""
    other = f"resume_from_checkpoint={place}"
    for number in (0, 1):
        job.start(number, other)
        assert job.value("resume_from_checkpoint") == place
    (job.run / "metrics.jsonl").write_text("lost\n")  # steps that were done and not saved
    job.start(2, other)
    assert not (job.run / "metrics.jsonl").exists()
    assert (job.job / "start_2/metrics_of_lost_steps.jsonl").read_text() == "lost\n"
    (job.run / "metrics.jsonl").write_text("kept\n")
    job.add_checkpoint(4)
    job.start(3, other)
    assert job.value("resume_from_checkpoint") == "auto"
    assert (job.run / "metrics.jsonl").read_text() == "kept\n"


def test_script_starts_one_task_a_node_and_leaves_another_jobs_metrics(job):
    """However many tasks the job was submitted with; a run that is in the folder may be another job's, which trains."""
    job.start(0, SLURM_NTASKS="16", SLURM_NTASKS_PER_NODE="8")
    assert job.value("--ntasks") == "2"
    (job.run / "metrics.jsonl").write_text("theirs\n")
    job.start(1)
    assert (job.run / "metrics.jsonl").read_text() == "theirs\n"


@pytest.mark.parametrize("line", ['A="(x) $NOWHERE_SET"', "set -- other.yaml", "[[ -f absent ]] && source absent"])
def test_script_sources_setup_that_is_not_strict(line, job):
    (job.folder / "site.sh").write_text(f"export SITE=1\n{line}\n")
    job.put("srun", "echo SITE=$SITE")
    output, code = job.start(FINCH_SETUP="site.sh")
    assert (code, "SITE=1" in output, "some.yaml" in output) == (0, True, True), output
    assert "SETUP=absent.sh cannot be read" in job.start(FINCH_SETUP="absent.sh")[0]


def test_script_gives_up_where_progress_cannot_be_written(job):
    """As on a disk that is full for all starts but the first."""
    job.put("srun", "exit 9")
    job.start(0)
    assert (job.job / "progress").read_text() == "0 -1\n"
    job.put("mv", "exit 1")
    for number in (1, 2, 3):
        output, code = job.start(number)
        assert f"{job.job}/progress cannot be written" in output
    assert "gave up: no new checkpoint in 4 starts" in output
    assert (code, job.requeues()) == (9, ["requeue 7"] * 3)
    (job.job / "progress").write_text("")
    assert "gave up: no new checkpoint in 4 starts" in job.start(3)[0]
    (job.job / "progress").unlink()
    assert "gave up: no new checkpoint in 4 starts" in job.start(4)[0]


def test_script_counts_a_new_checkpoint_as_progress(job):
    """Also one that is below an earlier one, as after a rollback."""
    job.put("srun", "exit 9")
    for number in range(8):
        if number == 4:
            shutil.rmtree(job.run / "checkpoints")
        if number in (2, 5):
            job.add_checkpoint(12 - number)
        output, _ = job.start(number)
    assert (job.job / "progress").read_text() == "5 7\n"
    assert len(job.requeues()) == 8
    assert "failed with exit code 9; requeued, to resume from step 7" in output
    assert "gave up: no new checkpoint in 4 starts" in job.start(8)[0]


def test_a_task_of_an_array_requeues_itself_alone(job):
    """The task that starts last has the array's own number as its job's, by which Slurm would requeue every task."""
    job.put("srun", "exit 9")
    job.start(0, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    assert job.requeues() == ["requeue 7_2"]


def test_starts_that_others_end_are_not_without_progress(job):
    """As a preemption, or somebody's requeue: Slurm ends the script's shell, and starts it again."""
    job.put("srun", "kill -TERM $PPID; sleep 1; exit 143")
    for number in range(6):
        output, code = job.start(number)
        assert (code, "cancelled or preempted" in output) == (143, True), output
    job.put("srun", "exit 9")
    outputs = [job.start(number)[0] for number in range(6, 10)]
    assert ["gave up: no new checkpoint in 4 starts" in output for output in outputs] == [False, False, False, True]


def test_script_chooses_host_and_port_for_each_start(job):
    ports = set()
    for number in range(3):
        job.start(number)
        host, _, port = job.value("--rdzv-endpoint").partition(":")
        assert host == socket.gethostname()
        assert 10000 <= int(port) < 30000
        ports.add(port)
    assert len(ports) == 3


@pytest.mark.parametrize(("signal", "code", "requeues"), [("USR1", 0, ["requeue 7"]), ("TERM", 143, [])])
def test_script_handles_a_signal_before_ranks_start(signal, code, requeues, job):
    """A time limit that is no longer than its warning; a job that is cancelled while it waits for a file system."""
    (job.folder / "site.sh").write_text(f"kill -{signal} $$\n")
    output, returned = job.start(FINCH_SETUP="site.sh")
    assert (returned, job.requeues()) == (code, requeues), output
    assert not (job.folder / "srun_arguments").exists()


def test_script_needs_a_job_and_output_dir(job):
    output, code = job.start(SLURM_JOB_ID="")
    assert (code, "submit it with sbatch" in output) == (2, True)
    output, code = job.start(0, "output_dir=")
    assert (code, "give CONFIG and output_dir=DIR after the script's name" in output) == (2, True)


def test_script_passes_image_and_mounts_to_pyxis(job):
    """Up to srun's command line: pyxis is a plugin of the site."""
    mounts = f"/models,/a b:/data,{job.run}"
    output, _ = job.start(FINCH_CONTAINER="nvcr.io#team/image:1", FINCH_CONTAINER_MOUNTS=mounts)
    assert output.rstrip().endswith("done"), output
    arguments = job.srun_arguments()
    mounts = f"{job.folder}:{job.folder},{job.run}:{job.run},/models:/models,/a b:/data"
    options = {"image": "nvcr.io#team/image:1", "workdir": job.folder, "mounts": mounts}
    expected = {"--nodes=2", *(f"--container-{name}={value}" for name, value in options.items())}
    assert expected <= set(arguments[: arguments.index("bash")])
    assert "--nproc-per-node=8" in arguments
    assert "RUNTIME=docker must be" in job.start(FINCH_CONTAINER="i", FINCH_CONTAINER_RUNTIME="docker")[0]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_pass_shellcheck():
    subprocess.run(["shellcheck", str(SCRIPT), str(ROOT / "slurm" / "sweep.sbatch")], check=True)
