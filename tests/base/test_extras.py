"""What does not go together among optional packages."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from finch.base import extras
from finch.base.errors import UserError
from finch.base.extras import peft_conflict, version


@pytest.mark.parametrize(
    ("made_from", "command"),
    [
        ({"url": "file://{folder}/a%20b", "dir_info": {"editable": True}}, "pip install -e '{folder}/a b[hf,report]'"),
        ({"url": "file://{folder}/a%20b", "dir_info": {}}, "pip install '{folder}/a b[hf,report]'"),
        ({"url": "file://{folder}/f.whl", "archive_info": {}}, "pip install '{folder}/f.whl[hf,report]'"),
        ({"url": "file://{folder}/gone.whl", "archive_info": {}}, "pip install 'finch-finetune[hf,report]'"),
        (None, "pip install 'finch-finetune[hf,report]'"),
    ],
)
def test_install_command_is_of_the_checkout_or_wheel(tmp_path, monkeypatch, made_from, command):
    (tmp_path / "a b").mkdir()
    (tmp_path / "f.whl").touch()
    text = None if made_from is None else json.dumps(made_from).replace("{folder}", str(tmp_path))
    monkeypatch.setattr(extras.metadata, "distribution", lambda _: mock.Mock(read_text=lambda _: text))
    assert extras.install_command("hf", "report") == command.replace("{folder}", str(tmp_path))
    if "a b" in command:
        monkeypatch.chdir(tmp_path / "a b")
        assert extras.install_command("hf") == command.replace("{folder}/a b[hf,report]", ".[hf]")


def test_another_torchtune_is_refused(monkeypatch):
    extras.require_extras("x", "torchtune")
    for other in ("0.7.0.dev20250801", "0.0.0"):  # a nightly build, a checkout
        monkeypatch.setattr(extras.metadata, "version", lambda _, found=other: found)
        with pytest.raises(UserError, match=f"^x needs torchtune 0.6, not {other}: pip install 'torchtune==0.6.1'"):
            extras.require_extras("x", "torchtune")


def test_what_no_package_is_there_for_is_said_before_training(monkeypatch):
    assert extras.missing_after_training() is None
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    line = extras.missing_after_training()
    start = "without matplotlib, lm_eval, RUN/loss.png is not drawn and finch evaluate will not start: pip install "
    assert line.startswith(start)
    assert line.endswith("[report,evaluate]'")
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "lm_eval" else Path)
    assert extras.missing_after_training().startswith("without lm_eval, finch evaluate will not start: ")


@pytest.mark.parametrize(
    ("peft", "torchao", "is_conflict"),
    [
        ("0.19.1", "0.15.0", True),
        ("0.21.2", "0.15.0+cpu", True),
        ("0.21.2", "0.16.0", False),
        ("0.19.0", "0.15.0", False),
        (None, "0.15.0", False),
        ("0.21.2", None, False),
    ],
)
def test_peft_conflict(peft, torchao, is_conflict):
    text = peft_conflict(peft, torchao)
    assert (text is not None) == is_conflict
    if text:
        assert text.startswith(f"peft {peft} loads no adapter next to torchao {torchao}")


ASK = "from peft.import_utils import is_torchao_available; print(is_torchao_available())"


@pytest.mark.slow
@pytest.mark.skipif(
    peft_conflict(version("peft"), version("torchao")) is None, reason="peft and torchao go together here"
)
@pytest.mark.parametrize(("before", "is_error"), [("", True), ("import sys; sys.modules['torchao'] = None; ", False)])
def test_peft_refuses_this_torchao_and_the_way_out_works(before, is_error):
    done = subprocess.run([sys.executable, "-c", before + ASK], capture_output=True, text=True)
    assert (done.returncode != 0, "incompatible version of torchao" in done.stderr) == (is_error, is_error)
