"""The `finch` command as a user types it."""

import subprocess
import sys

import pytest
from helpers.runs import finch

NEED_NO_TORCH = """\
import contextlib, sys
from finch.cli.main import main
for arguments in ("--help", "list configs", "list keys", "list methods", "list models", "run key=1", "run --config=no_config"):
    with contextlib.suppress(SystemExit):
        main(arguments.split())
    assert not {"torch", "omegaconf"} & set(sys.modules), arguments
"""


def test_commands_and_missing_configs_need_no_torch():
    subprocess.run([sys.executable, "-c", NEED_NO_TORCH], check=True, capture_output=True)


@pytest.mark.parametrize("command", ["chat RUN --prompt", "sweep", "list --show", "report", "run"])
def test_an_empty_word_is_a_mistake_in_a_line(capsys, command):
    """As of a variable of the shell that is not set."""
    code, _, err = finch(capsys, *command.split(), "")
    assert (code in (1, 2), "Traceback" in err, "finch: error: " in err) == (True, False, True), err
