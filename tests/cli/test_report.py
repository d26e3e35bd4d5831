"""`finch report` as a command: what it prints and writes, runs still going, and mistakes in one line."""

import pytest
from helpers.evaluated_runs import make_base, make_run
from helpers.runs import finch

pytest.importorskip("matplotlib", reason="the report extra is not installed")


def error_of(capsys, *arguments):
    code, _, err = finch(capsys, "report", *map(str, arguments))
    lines = [line for line in err.splitlines() if line]
    assert (code, len(lines)) == (1, 1), err
    return lines[0]


def test_report_of_a_run_still_going(capsys, tmp_path):
    """No evaluation, one epoch of two, a torn last line."""
    run = make_run(tmp_path / "run", "finch", 3e-5, base=None)
    (run / "epoch_1").rmdir()
    (run / "best").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    code, out, err = finch(capsys, "report", str(run), "--out", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert out == f"{tmp_path}/out/report.html\n"
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1 of 1 runs have not ended their last epoch" in text
    assert "facts and stories: probes take the place of evaluations" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.md",
        "report.html",
        "summary.csv",
        "figures",
    }


def test_report_before_the_first_evaluation_of_a_probe(capsys, tmp_path):
    run = make_run(tmp_path / "run", "sft", 3e-5, base=None)
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "probe/" not in line]
    (run / "metrics.jsonl").write_text("\n".join(lines[:1]) + "\n")
    code, _, _ = finch(capsys, "report", str(run), "--out", str(tmp_path / "out"))
    assert code == 0
    assert "training curves only" in (tmp_path / "out" / "report.md").read_text()


def test_report_is_written_again_over_the_last_one(capsys, tmp_path):
    run = make_run(tmp_path / "run", "sft", 3e-5, base=None)
    texts = []
    for _ in range(2):
        finch(capsys, "report", str(run), "--out", str(tmp_path / "out"))
        texts.append({path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*.*") if path.is_file()})
    assert texts[0] == texts[1]


def test_mistakes_are_one_line(capsys, tmp_path):
    make_base(tmp_path / "base", n=20)
    make_base(tmp_path / "other", n=20, task="sciknoweval")
    one = make_run(tmp_path / "one", "sft", 1e-5, n=20, base="../../base")
    two = make_run(tmp_path / "two", "sft", 1e-5, n=20, base="../../other", task="sciknoweval")
    out = tmp_path / "out"
    assert "is no folder" in error_of(capsys, tmp_path / "absent", "--out", out)
    assert "is no run" in error_of(capsys, tmp_path / "base", "--out", out)
    assert "different new tasks" in error_of(capsys, one, two, "--out", out)
    assert "--new-task=mmul was not evaluated" in error_of(capsys, one, "--new-task", "mmul", "--out", out)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error_of(capsys, one, "--out", tmp_path / "file" / "out")
    assert not out.exists()
