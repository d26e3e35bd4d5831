"""How far a program is, for other programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from finch.base import status
from finch.base.errors import UserError, report_user_errors
from finch.base.progress import Progress


@pytest.fixture(autouse=True)
def own_status(monkeypatch):
    monkeypatch.setattr(status, "_status", status._Status())


def test_progress_is_written_at_most_every_other_second(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file = tmp_path / "status.json"
    status.follow(file)
    progress = Progress(4, is_shown=True)
    progress.set_title("epoch 1/1")
    assert status.read(file)["phase"] == ""
    now[0] += 2
    progress.advance(1)
    found = status.read(file)
    assert (found["phase"], found["done"], found["total"], found["error"]) == ("epoch 1/1", 1, 4, None)
    assert isinstance(found["seconds_left"], int)
    progress.advance(1)
    assert status.read(file)["done"] == 1
    status.report(now=True, is_finished=True)
    assert (status.read(file)["done"], status.read(file)["is_finished"]) == (2, True)


def test_error_is_in_the_file_that_the_environment_names(tmp_path):
    file = tmp_path / "status.json"
    command = [sys.executable, "-m", "finch.cli", "run", "--config", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, env={status.STATUS_FILE: str(file)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    error = status.read(file)["error"]
    assert "none.yaml" in error
    assert f"finch: error: {error}" in done.stderr


def test_nothing_depends_on_the_file(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    for name in ("status.json", "status.json.partial"):
        (tmp_path / name).symlink_to(elsewhere)
    status.follow(tmp_path / "status.json")
    assert elsewhere.read_text() == "kept"
    assert json.loads((tmp_path / "status.json").read_text())["done"] == 0
    (tmp_path / "status.json").write_text("{")
    assert status.read(tmp_path / "status.json")["total"] is None
    status.follow(tmp_path / "no folder" / "status.json")
    os.mkfifo(tmp_path / "pipe")  # it would keep its reader waiting
    assert status.read(tmp_path / "pipe")["total"] is None


def test_unexpected_error_is_named(tmp_path):
    def fail():
        raise LookupError("no such\nrow")

    status.follow(tmp_path / "status.json")
    with pytest.raises(LookupError):
        report_user_errors(fail)()
    assert status.read(tmp_path / "status.json")["error"] == "LookupError: no such\\nrow"


def test_errors_go_under_another_key():
    names = {"data_files": "probes.old.data_files"}
    for text, expected in (
        ("dataset.format=x must be y", "probes.old.format=x must be y"),
        ("dataset is empty", "probes.old is empty"),
        ("data_files=F: row 2", "probes.old.data_files=F: row 2"),
        ("datasets differ", "probes.old: datasets differ"),
    ):
        assert str(UserError(text).under("probes.old", **names)) == expected
