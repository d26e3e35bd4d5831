"""sweep.sbatch with programs in Slurm's place. On a real Slurm: test_sweep.py."""

import os
import signal
import subprocess

import pytest
from helpers.runs import ROOT, wait_until

SCRIPT = ROOT / "slurm" / "sweep.sbatch"
# In place of python: notes its arguments, and at SIGTERM ends as a sweep does.
PYTHON = """\
#!/usr/bin/env bash
trap 'echo stopped >> "$EVENTS"; exit 143' TERM
echo "$*" >> "$EVENTS"
if [[ -n $SLOW ]]; then sleep 30 >/dev/null 2>&1 & wait; fi
exit "${CODE:-0}"
"""


@pytest.fixture
def start(tmp_path):
    """Starts the script as a job; its programs write to tmp_path/events."""
    (tmp_path / "events").touch()
    for name, text in {"python": PYTHON, "scontrol": '#!/usr/bin/env bash\necho "scontrol $*" >> "$EVENTS"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start_script(*arguments, **variables):
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "EVENTS": str(tmp_path / "events")}
        command = ["bash", str(SCRIPT), *arguments]
        variables = {"SLURM_JOB_ID": "7", **variables}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env={**environment, **variables}, cwd=tmp_path, **pipe)

    return start_script


def events(tmp_path):
    return (tmp_path / "events").read_text().splitlines()


def test_task_runs_its_line_of_cells(start, tmp_path):
    (tmp_path / "cells").write_text(
        "recipe_a x 'a=1 2'\nrecipe_b 'my config' 'key=[\"it'\"'\"'s\", 2]' output_dir=out/b\n"
    )
    (tmp_path / "run.sbatch").write_text('echo "$FINCH_RECIPE"; printf "%s\\n" "$@"; exit 3\n')
    task = start("cells", "run.sbatch", SLURM_ARRAY_TASK_ID="1")
    assert task.communicate(timeout=600)[0].splitlines() == [
        "recipe_b",
        "my config",
        'key=["it\'s", 2]',
        "output_dir=out/b",
    ]
    assert task.returncode == 3
    output = start("cells", "run.sbatch", SLURM_ARRAY_TASK_ID="2").communicate(timeout=600)[0]
    assert "cells has no line for task 2" in output


def test_evaluation_has_the_exit_code_of_the_sweep(start, tmp_path):
    (tmp_path / "setup.sh").write_text("export CODE=5; set -- other\n")
    job = start("grid.yaml", "--out", "a b", "epochs=1", FINCH_SETUP=str(tmp_path / "setup.sh"))
    job.communicate(timeout=600)
    assert job.returncode == 5
    assert events(tmp_path) == ["-P -m finch.cli sweep grid.yaml --out a b epochs=1 --skip-training"]


@pytest.mark.parametrize(("number", "is_requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_evaluation_stops_and_is_requeued_at_its_time_limit(start, tmp_path, number, is_requeued):
    job = start("grid.yaml", SLOW="yes")
    wait_until(lambda: events(tmp_path))
    job.send_signal(number)
    job.communicate(timeout=600)
    assert job.returncode == 143
    assert events(tmp_path)[1:] == ["stopped", *(["scontrol requeue 7"] if is_requeued else [])]


def test_containers_get_the_command(start, tmp_path):
    (tmp_path / "apptainer").write_text('#!/usr/bin/env bash\necho "$*" >> "$EVENTS"\n')
    (tmp_path / "apptainer").chmod(0o755)
    settings = {"FINCH_CONTAINER": "image.sif", "FINCH_CONTAINER_MOUNTS": "/data,/a:/b"}
    start("grid.yaml", **settings, FINCH_CONTAINER_RUNTIME="apptainer").communicate(timeout=600)
    mounts = f"{tmp_path}:{tmp_path},/data:/data,/a:/b"
    command = "python -P -m finch.cli sweep grid.yaml --skip-training"
    assert events(tmp_path) == [f"exec --nv --pwd {tmp_path} --bind {mounts} image.sif {command}"]
    assert (
        "must be pyxis or apptainer" in start("g", **settings, FINCH_CONTAINER_RUNTIME="x").communicate(timeout=600)[0]
    )


def test_script_outside_of_a_job_fails(start):
    assert "submit it with finch sweep GRID --slurm" in start("grid.yaml", SLURM_JOB_ID="").communicate(timeout=600)[0]
