"""The lab where Slurm is installed and does not answer: tests skip, and no process or file remains."""

import subprocess
import tempfile

import pytest
from helpers import slurm_lab as lab
from helpers.runs import wait_until

pytestmark = pytest.mark.slow


def test_lab_cleans_up_where_slurm_does_not_answer(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in lab.PROGRAMS:
        (programs / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(lab, "_PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("THIS_LAB", str(tmp_path))

    def no_answer(self, *command, **options):
        wait_until(lambda: len(lab.processes_with(f"THIS_LAB={tmp_path}")) == 4)  # munge, the controller and two nodes
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(lab.Lab, "run", no_answer)
    with pytest.raises(lab.NoSlurm, match="sinfo does not answer here"):
        lab.Lab()
    assert lab.processes_with(f"THIS_LAB={tmp_path}") == []
    assert list(tmp_path.iterdir()) == [programs]
