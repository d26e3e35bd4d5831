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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data translate --out x.jsonl", "python examples/translate_rows.py"),
        ("gpu-check --quick", "finch doctor --gpu"),
        ("slurm submit my.yaml --nodes 2", "finch run --slurm"),
        ("wise-ft --base a --tuned b --out c", "finch average --base A --tuned B"),
        ("estimate auto --gpus 8", "finch check --exact"),
        ("judge RUN --base-url URL", "finch evaluate --judge URL"),
        ("select-lr out", "finch report --select-lr"),
        ("methods", "finch list methods"),
        ("models gemma", "finch list models"),
        ("keys", "finch list keys"),
        ("configs cp auto x", "finch list --copy NAME"),
    ],
)
def test_an_old_command_names_its_new_one(capsys, old, new):
    code, _, err = finch(capsys, *old.split())
    assert (code, err.count("\n")) == (2, 2)
    assert f"finch: error: finch {old.split()[0]}" in err
    assert new in err
