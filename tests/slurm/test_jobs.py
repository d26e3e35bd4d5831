"""Jobs on a real Slurm of two nodes: submitted by `finch slurm submit`, disturbed in every way, and equal to one that was not."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from helpers.runs import ROOT, make_config, relative_l2, run_here, tune_run, weights
from helpers.slurm_lab import Lab, NoSlurm, processes_with

from finch.cli import main as cli

pytestmark = pytest.mark.slow

# Rows take as long as a file says, in seconds, while it is there.
SLOW_ROWS = """\
import os
import time
from pathlib import Path
from torchtune.datasets import instruct_dataset

FILE = Path(os.environ.get("SLOW_ROWS", "absent"))

class Slow:
    def __init__(self, inner):
        self.inner = inner
    def __len__(self):
        return len(self.inner)
    def __getitem__(self, index):
        if FILE.exists():
            time.sleep(float(FILE.read_text()))
        return self.inner[index]

def dataset(tokenizer, **kwargs):
    return Slow(instruct_dataset(tokenizer, **kwargs))
"""
# What it is given before the image is dropped; the rest runs as a child, which a signal to this process does not reach.
APPTAINER = """\
#!/usr/bin/env bash
echo "$*" >> "$APPTAINER_LOG"
until [[ $1 == image.sif ]]; do shift; done
shift
"$@"
"""


@pytest.fixture(scope="module")
def lab():
    try:
        try:
            started = Lab("cgroup")
        except NoSlurm:
            started = Lab("linuxproc")
    except NoSlurm as reason:
        pytest.skip(str(reason))
    yield started
    started.close()


def slow_file(run):
    return run.with_suffix(".slow")


class Job:
    """A submitted job."""

    def __init__(self, lab, number, run):
        self.lab, self.number, self.run = lab, number, run

    def hurry(self):
        """Its rows are slow no more."""
        slow_file(self.run).unlink(missing_ok=True)

    def show(self):
        """Slurm's fields of the job."""
        words = self.lab.run("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self):
        file = self.run / "slurm" / f"{self.number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def checkpoints(self):
        """The steps of its whole checkpoints."""
        return [int(path.name.split("_")[1]) for path in (self.run / "checkpoints").glob("step_*[0-9]")]

    def wait(self, condition, what, timeout=120):
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"no {what}: {self.show()}\n{self.output()[-6000:]}"
            time.sleep(0.2)

    def wait_for_step(self, step):
        file = self.run / "metrics.jsonl"
        self.wait(lambda: file.exists() and len(file.read_text().splitlines()) >= step, f"step {step}")

    def wait_for_restart(self, number=1):
        self.wait(lambda: int(self.show()["Restarts"]) >= number, f"restart {number}")

    def end(self):
        """The state that it ends in."""
        done = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.show()["JobState"] in done, "end")
        return self.show()["JobState"]

    def scontrol(self, *words):
        self.lab.run("scontrol", *words)

    def is_gone(self):
        """No process of any of its steps is left."""
        return not processes_with(f"SLURM_JOB_ID={self.number}")


@pytest.fixture(scope="module")
def config(tmp_path_factory, base_folder, rows_file):
    """Of a run of 33 steps, in a folder with slow_rows.py."""
    folder = tmp_path_factory.mktemp("slurm")
    config = make_config(base_folder, rows_file, folder / "run", epochs=3, batch_size=2, check_dataset=False)
    config["lr_scheduler"] = {**config["lr_scheduler"], "init": 4.0}
    config["dataset"] = {**config["dataset"], "_component_": "slow_rows.dataset"}
    config["checkpoint"] = {"every_n_steps": 4}
    (folder / "slow_rows.py").write_text(SLOW_ROWS)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return config


@pytest.fixture
def submit(lab, config, monkeypatch, capsys):
    """`finch slurm submit`: two nodes with a rank each, unless told otherwise."""
    folder = Path(config["output_dir"]).parent
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    for key, value in lab.environment.items():
        monkeypatch.setenv(key, value)
    jobs = []

    def start(name, *words, seconds=0.0, nodes=2):
        run = folder / name
        if seconds:
            slow_file(run).write_text(str(seconds))
        monkeypatch.setenv("SLOW_ROWS", str(slow_file(run)))  # sbatch hands it on
        capsys.readouterr()
        given = ("--nodes", str(nodes), "--gpus-per-node", "0", "--time", "60", *words)
        cli.main(["slurm", "submit", "config.yaml", *given, f"output_dir={run}"])
        jobs.append(Job(lab, capsys.readouterr().out.split()[1].rstrip(":"), run))
        return jobs[-1]

    yield start
    for job in jobs:
        lab.run("scancel", "--full", "--signal=KILL", job.number, check=False)
        lab.run("scancel", job.number, check=False)
        job.wait(job.is_gone, "end of its processes", timeout=60)


@pytest.fixture(scope="module")
def straight(config):
    """The folder of the run that nothing disturbs: two ranks of one torchrun, without Slurm."""
    run = Path(config["output_dir"])
    done = tune_run(run.parent, config, ranks=2)
    assert done.returncode == 0, done.output[-3000:]
    return run


def assert_same_weights(run, straight):
    for epoch in ("epoch_0", "epoch_1", "epoch_2"):
        one, other = weights(run / epoch), weights(straight / epoch)
        assert all(torch.equal(one[key], other[key]) for key in other), epoch


def test_two_nodes_to_the_end(submit, request):
    job = submit("whole")
    straight = request.getfixturevalue("straight")  # runs beside it
    assert job.end() == "COMPLETED", job.output()
    assert job.show()["NumNodes"] == "2"
    assert_same_weights(job.run, straight)
    assert job.output().rstrip().endswith("done")
    assert "2 ranks on cpu" in job.output()
    logs = {path.parent.parent.parent.parent.name for path in job.run.glob("slurm/*/start_0/*/*/*/0/stderr.log")}
    assert logs == {"node_0", "node_1"}


def test_time_limit_and_scancel(submit, config, straight, tmp_path, monkeypatch):
    """Beside a job that waits for the warning of its time limit, one that is cancelled. The warning passes through a container's
    program, as the ranks are its children's children."""
    (tmp_path / "apptainer").write_text(APPTAINER)
    (tmp_path / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("APPTAINER_LOG", str(tmp_path / "log"))
    container = ("--container=image.sif", "--container-runtime=apptainer", f"--python={sys.executable}")
    limited = submit("limited", *container, "--signal=B:USR1@300", seconds=1)
    cancelled = submit("cancelled", seconds=0.5)
    limited.wait_for_step(2)
    limited.scontrol("update", f"JobId={limited.number}", "TimeLimit=5")  # less than 300 s are left now

    cancelled.wait_for_step(5)
    assert not cancelled.is_gone()
    cancelled.lab.run("scancel", cancelled.number)
    assert cancelled.end() == "CANCELLED"
    cancelled.wait(cancelled.is_gone, "end of its processes", timeout=10)

    limited.wait_for_restart()
    limited.scontrol("update", f"JobId={limited.number}", "TimeLimit=60")
    limited.hurry()

    assert (cancelled.show()["JobState"], cancelled.show()["Restarts"]) == ("CANCELLED", "0")
    steps = cancelled.checkpoints()
    assert steps
    cancelled.hurry()
    resumed = {**config, "output_dir": str(cancelled.run), "batch_size": 4, "resume_from_checkpoint": "auto"}
    run = run_here(tmp_path, resumed)
    assert f"resumed from step {max(steps)} of" in run.output
    assert relative_l2(weights(cancelled.run / "epoch_2"), weights(straight / "epoch_2")) < 1e-5

    assert limited.end() == "COMPLETED", limited.output()
    assert limited.show()["Restarts"] == "1"
    output = limited.output()
    assert "the time limit is near" in output
    stopped = output.split("stopped by a signal after step ")[1].split(";")[0]
    assert f"left before its end; this job starts again, from step {stopped}" in output
    assert f"resumed from step {stopped} of" in output
    assert "Traceback" not in output
    assert_same_weights(limited.run, straight)
    told = (tmp_path / "log").read_text().splitlines()
    assert len(told) == 4  # two nodes, two starts
    assert all(
        f"--bind {limited.run.parent},{limited.run} image.sif {sys.executable} -m torch" in line for line in told
    )


def test_lost(submit, straight, lab):
    """One node's launcher and rank are killed; once it runs again, Slurm loses the node."""
    job = submit("lost", seconds=0.2)
    job.wait_for_step(5)
    killed = processes_with(f"FINCH_NODE={job.number}.0.1")
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    job.wait_for_restart()
    assert "failed with exit code 137; this job starts again, from step " in job.output()

    job.wait(lambda: "resumed from step " in job.output(), "resume")
    resumed = int(job.output().split("resumed from step ")[1].split()[0])
    job.wait(lambda: max(job.checkpoints(), default=-1) > resumed, "checkpoint")
    job.scontrol("update", f"NodeName={lab.nodes[1]}", "State=DOWN", "Reason=test")
    job.wait_for_restart(2)
    job.hurry()
    lab.run(
        "scontrol", "update", f"NodeName={lab.nodes[1]}", "State=RESUME", check=False
    )  # it may have come back by itself
    assert job.end() == "COMPLETED", job.output()
    assert job.show()["Restarts"] == "2"
    assert_same_weights(job.run, straight)


def test_requeued_beside_two_that_fail(submit, straight, tmp_path):
    """`scontrol requeue` in the middle; a job of which each start fails at once, and may do so twice; a user's mistake."""
    template = (ROOT / "slurm" / "finch_full_finetune.sbatch").read_text()
    own = template.replace("MAX_RESTARTS_WITHOUT_PROGRESS=3", "MAX_RESTARTS_WITHOUT_PROGRESS=1")
    assert own != template
    (tmp_path / "own.sbatch").write_text(own)
    requeued = submit("requeued", seconds=0.5)
    hopeless = submit("hopeless", "--python", "false", "--script", str(tmp_path / "own.sbatch"), nodes=1)
    requeued.wait_for_step(5)
    requeued.scontrol("requeue", requeued.number)
    mistaken = submit("mistaken", "dataset.data_files=absent.jsonl", nodes=1)
    requeued.wait_for_restart()
    requeued.hurry()

    assert hopeless.end() == "FAILED"
    assert hopeless.show()["Restarts"] == "1"
    assert "gave up: no new checkpoint in 2 starts" in hopeless.output().splitlines()[-1]

    assert mistaken.end() == "FAILED"
    assert mistaken.show()["Restarts"] == "0"
    assert "not tried again: dataset" in mistaken.output().splitlines()[-1]

    assert requeued.end() == "COMPLETED", requeued.output()
    assert requeued.show()["Restarts"] == "1"
    stopped = requeued.output().split("stopped by a signal after step ")[1].split(";")[0]
    assert f"resumed from step {stopped} of" in requeued.output()
    assert_same_weights(requeued.run, straight)


def test_submitted_by_hand(submit, lab, config):
    """The script as it lies in the repository, without `finch slurm submit`; it demands output_dir."""
    script = str(ROOT / "slurm" / "finch_full_finetune.sbatch")
    folder = Path(config["output_dir"]).parent
    plain = ("--gpus-per-node=0", f"--output={folder}/by_hand.out", f"--chdir={folder}", "--wait")
    lab.run("sbatch", *plain, script, "config.yaml", check=False)
    assert "give CONFIG and output_dir=DIR after the script's name" in (folder / "by_hand.out").read_text()
