"""What does not go together among optional packages."""

import subprocess
import sys

import pytest

from finch.base.extras import peft_conflict, version


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


@pytest.mark.skipif(
    peft_conflict(version("peft"), version("torchao")) is None, reason="peft and torchao go together here"
)
@pytest.mark.parametrize(("before", "is_error"), [("", True), ("import sys; sys.modules['torchao'] = None; ", False)])
def test_peft_refuses_this_torchao_and_the_way_out_works(before, is_error):
    done = subprocess.run([sys.executable, "-c", before + ASK], capture_output=True, text=True)
    assert (done.returncode != 0, "incompatible version of torchao" in done.stderr) == (is_error, is_error)
