import os
import subprocess
import sys

import pytest

from finch.base.errors import HANG, NotFinite, Unavailable, UserError, report_user_errors


@report_user_errors
def fail(error):
    raise error


def exit_code_of(error):
    with pytest.raises(SystemExit) as exited:
        fail(error)
    return exited.value.code


def test_user_error_is_one_line_also_in_the_error_file(capsys, tmp_path, monkeypatch):
    for file in (tmp_path / "error", tmp_path / "absent" / "error"):
        monkeypatch.setenv("FINCH_ERROR_FILE", str(file))
        assert exit_code_of(UserError("epochs=0 must be at least 1")) == 1
        assert capsys.readouterr().err == "\nfinch: error: epochs=0 must be at least 1\n"
    assert (tmp_path / "error").read_text() == "epochs=0 must be at least 1\n"


def test_what_may_pass_leaves_the_error_file_empty(capsys, tmp_path, monkeypatch):
    """The job script tries again."""
    monkeypatch.setenv("FINCH_ERROR_FILE", str(tmp_path / "error"))
    assert exit_code_of(Unavailable("output_dir=x is in use")) == 1
    assert "finch: error: output_dir=x is in use" in capsys.readouterr().err
    assert (tmp_path / "error").read_bytes() == b""


def test_values_of_others_cannot_break_the_line_or_fill_the_screen():
    assert str(UserError("a=\x1b[31m\0\n: b")) == r"a=\x1b[31m\x00\n: b"
    path = "/data/" + "x" * 400 + "/rows.jsonl"
    message = str(UserError(f"data_files={path} does not exist; correct the path"))
    assert message.startswith("data_files=/data/xxx")
    assert message.endswith("xxx/rows.jsonl does not exist; correct the path")
    assert len(message) < 150
    assert str(UserError(path[:80] + " and " + "word " * 20)).startswith(path[:80])
    assert len(str(UserError("word " * 1000))) == 275


def test_ctrl_c_exits_with_130(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FINCH_ERROR_FILE", str(tmp_path / "error"))
    assert exit_code_of(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip() == "finch: interrupted"
    assert not (tmp_path / "error").exists()


def test_output_that_nobody_reads_any_more_is_no_error():
    program = """
from finch.base.errors import report_user_errors

@report_user_errors
def main():
    while True:
        print("a line")

main()
"""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ, **pipe) as process:
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("error", [BrokenPipeError(), RuntimeError("Connection closed by peer")])
def test_other_errors_keep_their_traceback(error):
    """Also a pipe of somebody else; without torchrun there is no peer."""
    with pytest.raises(type(error)):
        fail(error)


@pytest.mark.parametrize(
    ("error", "waits", "is_traceback", "message"),
    [
        (BrokenPipeError("of somebody else"), [], True, ""),
        ("[gloo] Connection closed by peer [127.0.0.1]:1", [5], False, "rank 1 stopped because another rank did"),
        (
            "Application timeout caused pair closure",
            [],
            True,
            "rank 1 has waited for another rank longer than distributed",
        ),
        ("Timed out waiting 8000ms for recv", [], True, "rank 1 has waited for another rank longer than distributed"),
        ("shapes do not match", [], True, ""),
    ],
)
def test_rank_reports_its_own_error_before_a_lost_peer(error, waits, is_traceback, message, capsys, monkeypatch):
    waited = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("finch.base.errors.time.sleep", waited.append)
    code = exit_code_of(RuntimeError(error) if isinstance(error, str) else error)
    assert code == (HANG if "has waited" in message else 1)
    assert waited == waits
    stderr = capsys.readouterr().err
    assert message in stderr
    assert ("Traceback" in stderr) == is_traceback


@pytest.mark.parametrize(("restarts", "is_written"), [("0", True), ("3", False)])
def test_step_that_is_not_finite_counts_as_a_mistake_unless_ranks_are_restarted(
    restarts, is_written, tmp_path, monkeypatch
):
    monkeypatch.setenv("FINCH_ERROR_FILE", str(tmp_path / "error"))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    assert exit_code_of(NotFinite("the loss was not finite")) == 1
    assert (tmp_path / "error").exists() == is_written
