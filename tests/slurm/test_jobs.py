"""Jobs on a real Slurm of two nodes: submitted by `finch run --slurm`, interrupted in every way, and equal to a run that was not."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.runs import (
    ROOT,
    assert_same_weights,
    environment,
    finished,
    make_config,
    relative_l2,
    run_here,
    wait_until,
    weights,
    write_config,
)
from helpers.slurm_lab import ENDED, processes_with

from finch.cli import main as cli
from finch.cli.slurm_submit import SCRIPT

pytestmark = pytest.mark.slow

# Logs its arguments and runs the command behind the image as a child, which a signal to this process does not reach.
APPTAINER = """\
#!/usr/bin/env bash
echo "$*" >> "$APPTAINER_LOG"
until [[ $1 == image.sif ]]; do shift; done
shift
"$@"
"""


JOBS_PATH = environment(ROOT / "tests")["PYTHONPATH"]


def slow_file(run):
    return run.with_suffix(".slow")


class Job:
    """A submitted job and its run's folder."""

    def __init__(self, lab, number, run):
        self.lab, self.number, self.run = lab, number, run

    def slow_down(self):
        """For what has to happen before the job ends, on a busy machine too: each step then takes seconds."""
        slow_file(self.run).write_text("2")

    def speed_up(self):
        slow_file(self.run).unlink(missing_ok=True)

    def show(self):
        """Slurm's fields of the job."""
        return self.lab.jobs(self.number)[0]

    def output(self):
        file = self.run / "slurm" / f"{self.number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def checkpoints(self):
        return [int(path.name.split("_")[1]) for path in (self.run / "checkpoints").glob("step_*[0-9]")]

    def wait(self, condition, what):
        wait_until(condition, lambda: f"no {what}: {self.show()}\n{self.output()[-6000:]}", pause=0.2)

    def wait_for_step(self, step):
        file = self.run / "metrics.jsonl"
        self.wait(lambda: file.exists() and len(file.read_text().splitlines()) >= step, f"step {step}")

    def wait_for_restart(self, number=1):
        self.wait(lambda: int(self.show()["Restarts"]) >= number, f"restart {number}")

    def end(self):
        """Waits, and returns the final state."""
        self.wait(lambda: self.show()["JobState"] in ENDED, "end")
        return self.show()["JobState"]

    def scontrol(self, *words):
        self.lab.run("scontrol", *words)

    def has_no_processes(self):
        return not processes_with(f"SLURM_JOB_ID={self.number}")


@pytest.fixture(scope="module")
def config(tmp_path_factory, base_folder, rows_file):
    """For 33 steps."""
    folder = tmp_path_factory.mktemp("slurm")
    config = make_config(base_folder, rows_file, folder / "run", epochs=3, batch_size=2, check_dataset=False)
    config["lr_scheduler"]["init"] = 4.0
    config["dataset"]["_component_"] = "helpers.acting_rows.dataset"
    config["checkpoint"] = {"every_n_steps": 4}
    write_config(folder, config)
    return config


@pytest.fixture
def submit(lab, config, monkeypatch, capsys):
    """`finch run --slurm`: by default two nodes with one rank each."""
    folder = Path(config["output_dir"]).parent
    monkeypatch.chdir(folder)
    for key, value in {**lab.environment, "PYTHONPATH": JOBS_PATH}.items():
        monkeypatch.setenv(key, value)
    jobs = []

    def start(name, *words, seconds=0.0, nodes=2):
        run = folder / name
        if seconds:
            slow_file(run).write_text(str(seconds))
        monkeypatch.setenv("SLOW_ROWS", str(slow_file(run)))  # inherited by the job
        capsys.readouterr()
        options = ("--nodes", str(nodes), "--gpus-per-node=0", "--time", "60")
        cli.main(["run", "--slurm", "config.yaml", *options, *words, f"output_dir={run}"])
        jobs.append(Job(lab, capsys.readouterr().out.split()[1].rstrip(":"), run))
        return jobs[-1]

    yield start
    for job in jobs:
        lab.run("scancel", "--full", "--signal=KILL", job.number, check=False)
        lab.run("scancel", job.number, check=False)
        job.wait(job.has_no_processes, "end of its processes")


@pytest.fixture(scope="module")
def uninterrupted(config):
    """The folder of a run that is not interrupted: two ranks, without Slurm."""
    return finished(Path(config["output_dir"]).parent, config, ranks=2).folder


def assert_same_epochs(run, uninterrupted):
    for epoch in ("epoch_0", "epoch_1", "epoch_2"):
        assert_same_weights(run / epoch, uninterrupted / epoch)


def test_job_on_two_nodes_completes(submit, request):
    job = submit("complete")
    uninterrupted = request.getfixturevalue("uninterrupted")  # runs at the same time
    assert job.end() == "COMPLETED", job.output()
    assert job.show()["NumNodes"] == "2"
    assert_same_epochs(job.run, uninterrupted)
    assert job.output().rstrip().endswith("done")
    assert "2 ranks on cpu" in job.output()
    logs = {path.parent.parent.parent.parent.name for path in job.run.glob("slurm/*/start_0/*/*/*/0/stderr.log")}
    assert logs == {"node_0", "node_1"}


def test_job_resumes_after_its_time_limit_and_scancel(submit, config, uninterrupted, tmp_path, monkeypatch):
    """One job gets the warning of its time limit, through a container's program; another job is cancelled meanwhile."""
    (tmp_path / "apptainer").write_text(APPTAINER)
    (tmp_path / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("APPTAINER_LOG", str(tmp_path / "log"))
    container = {"CONTAINER": "image.sif", "CONTAINER_RUNTIME": "apptainer", "CONTAINER_MOUNTS": "/data/a,/b:/c"}
    with monkeypatch.context() as settings:
        for key, value in {**container, "PYTHON": sys.executable}.items():
            settings.setenv(f"FINCH_{key}", value)
        limited = submit("limited", seconds=1)
    cancelled = submit("cancelled", seconds=0.5)
    limited.wait_for_step(2)
    limited.scontrol("update", f"JobId={limited.number}", "TimeLimit=5")  # less than 300 s are left now

    cancelled.wait_for_step(5)
    assert not cancelled.has_no_processes()
    cancelled.lab.run("scancel", cancelled.number)
    assert cancelled.end() == "CANCELLED"
    cancelled.wait(cancelled.has_no_processes, "end of its processes")

    limited.wait_for_restart()
    limited.scontrol("update", f"JobId={limited.number}", "TimeLimit=60")
    limited.speed_up()

    assert (cancelled.show()["JobState"], cancelled.show()["Restarts"]) == ("CANCELLED", "0")
    steps = cancelled.checkpoints()
    assert steps
    cancelled.speed_up()
    resumed = {**config, "output_dir": str(cancelled.run), "batch_size": 4, "resume_from_checkpoint": "auto"}
    run = run_here(tmp_path, resumed)
    assert f"resumed from step {max(steps)} of" in run.output
    assert relative_l2(weights(cancelled.run / "epoch_2"), weights(uninterrupted / "epoch_2")) < 1e-5

    assert limited.end() == "COMPLETED", limited.output()
    assert limited.show()["Restarts"] == "1"
    output = limited.output()
    assert "the time limit is near" in output
    stopped = output.split("stopped by a signal after step ")[1].split(";")[0]
    assert f"stopped early; requeued, to resume from step {stopped}" in output
    assert f"resumed from step {stopped} of" in output
    assert "Traceback" not in output
    assert_same_epochs(limited.run, uninterrupted)
    started = (tmp_path / "log").read_text().splitlines()
    assert len(started) == 4  # two nodes, two starts: the settings outlive the requeue
    binds = ",".join(f"{folder}:{folder}" for folder in (limited.run.parent, limited.run, "/data/a"))
    assert all(f"--bind {binds},/b:/c image.sif {sys.executable} -P -m torch" in line for line in started)


def test_job_resumes_after_a_killed_rank_and_a_lost_node(submit, uninterrupted, lab):
    """One node's launcher and rank are killed; after the restart Slurm loses the node."""
    job = submit("lost", seconds=0.2)
    job.wait_for_step(5)
    job.slow_down()
    killed = processes_with(f"FINCH_NODE={job.number}.0.1")
    assert len(killed) == 2
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):  # the rank dies with its launcher
            os.kill(pid, signal.SIGKILL)
    job.wait_for_restart()
    assert "failed with exit code 137; requeued, to resume from step " in job.output()

    job.wait(lambda: "resumed from step " in job.output(), "resume")
    resumed = int(job.output().split("resumed from step ")[1].split()[0])
    job.wait(lambda: max(job.checkpoints(), default=-1) > resumed, "checkpoint")
    job.scontrol("update", f"NodeName={lab.nodes[1]}", "State=DOWN", "Reason=test")
    job.wait_for_restart(2)
    job.speed_up()
    lab.run("scontrol", "update", f"NodeName={lab.nodes[1]}", "State=RESUME", check=False)  # may be back already
    assert job.end() == "COMPLETED", job.output()
    assert int(job.show()["Restarts"]) >= 2  # Slurm may start it once more while the node comes back
    assert_same_epochs(job.run, uninterrupted)


def test_job_resumes_after_requeue_and_gives_up_on_failures(submit, uninterrupted, monkeypatch):
    """`scontrol requeue`; meanwhile a job whose starts all fail and that may restart once, and a user's mistake."""
    requeued = submit("requeued", seconds=0.5)
    with monkeypatch.context() as settings:
        settings.setenv("FINCH_PYTHON", "false")
        settings.setenv("FINCH_MAX_RESTARTS_WITHOUT_PROGRESS", "1")
        hopeless = submit("hopeless", nodes=1)
    requeued.wait_for_step(5)
    requeued.scontrol("requeue", requeued.number)
    mistaken = submit("mistaken", "dataset.data_files=absent.jsonl", nodes=1)
    requeued.wait_for_restart()
    requeued.speed_up()

    assert hopeless.end() == "FAILED"
    assert hopeless.show()["Restarts"] == "1"
    assert "gave up: no new checkpoint in 2 starts" in hopeless.output().splitlines()[-1]

    assert mistaken.end() == "FAILED"
    assert mistaken.show()["Restarts"] == "0"
    assert "not retried: dataset" in mistaken.output().splitlines()[-1]

    assert requeued.end() == "COMPLETED", requeued.output()
    assert requeued.show()["Restarts"] == "1"
    stopped = requeued.output().split("stopped by a signal after step ")[1].split(";")[0]
    assert f"resumed from step {stopped} of" in requeued.output()
    assert_same_epochs(requeued.run, uninterrupted)


def test_job_submitted_by_hand_completes(lab, config):
    """sbatch alone, with a site's copy of the script and none of the environment."""
    folder = Path(config["output_dir"]).parent
    (folder / "setup.sh").write_text(f"export PYTHONPATH={JOBS_PATH}\n")
    text = (ROOT / "slurm" / SCRIPT).read_text().replace("${FINCH_PYTHON:-python}", sys.executable)
    (folder / "own.sbatch").write_text(text.replace("${FINCH_SETUP:-}", f"{folder}/setup.sh"))
    run = folder / "by_hand"
    (run / "slurm").mkdir(parents=True)
    sbatch = ("sbatch", "--parsable", "--export=NONE", f"--output={run}/slurm/%j.out", f"--chdir={folder}")
    arguments = (str(folder / "own.sbatch"), "config.yaml", "output_dir=by_hand", "epochs=1")
    job = Job(lab, lab.run(*sbatch, *arguments).strip(), run)
    assert job.end() == "COMPLETED", job.output()
    assert job.output().rstrip().endswith("done")
