"""Errors, help and completion that all commands share, as a user meets them."""

import os
import re
import subprocess
import sys

import pytest

from finch.cli import main as cli


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "finch rnu does not exist, did you mean run? see finch --help"),
        (["list", "confixs"], "finch list confixs does not exist, did you mean configs? see finch list --help"),
        (["evaluate", "--base", "x", "--tuend", "y"], "finch evaluate does not take --tuend, did you mean --tuned?"),
        (["chat"], "the following arguments are required: RUN; see finch chat --help"),
        (["run"], "CONFIG is missing: finch run [torchrun options] CONFIG"),
        (["run", "--config"], "CONFIG is missing: finch run [torchrun options] CONFIG"),
        (["check", "method=finch"], "CONFIG is missing: finch check"),
        (["check", "auto", "--model_dir", "/m"], "--model_dir is no option of torchrun; write model_dir=/m"),
        (["run", "auto", "--learning_rate=1"], "--learning_rate is no option of torchrun; use optimizer.lr"),
        (["check", "--exact", "--gpus", "2"], "CONFIG is missing: finch check --exact CONFIG"),
        (
            ["check", "--exact", "auto", "--gpus", "0"],
            "argument --gpus/--nproc_per_node/--nproc-per-node: 0 must be a whole number of at least 1; see finch check",
        ),
        (
            ["check", "--exact", "auto", "--matmul-tflops", "x"],
            "argument --matmul-tflops: x must be a number above 0; see",
        ),
        (["run", "qwen3/4B_finch", "epochs"], "Command-line overrides must be in the form of key=value, got epochs;"),
        (["--foo"], "finch does not take --foo; see finch --help"),
        (["list", "--show"], "argument --show: expected at least one argument; see finch list"),
        (["sweep", "x", "--dryrun"], "--dryrun is not an option of finch sweep, did you mean --dry-run?"),
        (["run", "--slurm"], "CONFIG is missing: finch run --slurm CONFIG"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(capsys, words, message):
    with pytest.raises(SystemExit) as error:
        cli.main(words)
    assert error.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"\nfinch: error: {message}")
    assert printed.count("\n") == 2


@pytest.mark.parametrize("words", [["CONFIG"], ["--config", "CONFIG"]])
@pytest.mark.parametrize("command", ["run", "check", "check --exact", "run --slurm"])
def test_config_is_an_option_or_the_first_word(capsys, command, words):
    with pytest.raises(SystemExit) as error:
        cli.main([*command.split(), *words, "epochs=1"])
    assert error.value.code == 1  # what the words name is wrong, not the words
    assert "CONFIG is neither a file nor a config of finch" in capsys.readouterr().err


def test_wrong_key_of_auto_is_named(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "auto", "model_dr=/m"])
    assert "model_dir is not set: model_dr=/m is no key; add model_dir=DIR" in capsys.readouterr().err


def test_help_lists_every_command_once_in_its_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    listed = [match[1] for line in lines if (match := re.match(r"  ([a-z][\w-]*) {2,}\S", line))]
    assert sorted(listed) == sorted(cli.build_parser()[1])
    assert [line for line in lines if line in ("train:", "measure:", "look up:", "machine and cluster:")] == [
        "train:",
        "measure:",
        "look up:",
        "machine and cluster:",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("finch doctor --g", {"--gpu "}),
        ("finch run qwen3/4B_f", {"qwen3/4B_finch "}),
        ("finch sweep sweeps/qwen3_4B_kn", {"sweeps/qwen3_4B_knowledge "}),
        ("finch check auto lr_scheduler.eta", {"lr_scheduler.eta_max="}),
        ("finch run auto optimizer.l", {"optimizer.lr="}),
        ("finch list --show sweeps/quic", {"sweeps/quickstart "}),
    ],
)
def test_shells_are_answered(tmp_path, line, expected):
    answers = tmp_path / "answers"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answers),
        "_ARGCOMPLETE_SUPPRESS_SPACE": "0",
        "IFS": "\n",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-m", "finch.cli"], env=environment, check=True, timeout=120)
    assert expected <= set(answers.read_text().split("\n"))
