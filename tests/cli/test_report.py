"""`finch report` as a command: what it prints and writes, runs still going, and mistakes in one line."""

import pytest
from helpers.evaluated_runs import make_run
from helpers.runs import finch

pytest.importorskip("matplotlib", reason="the report extra is not installed")


def report(capsys, *arguments):
    return finch(capsys, "report", *map(str, arguments))


def test_report_of_a_run_still_going(capsys, tmp_path):
    """No evaluation, one epoch of two, a torn last line; it is written again over the last one."""
    run, out = make_run(tmp_path / "run", "finch", 3e-5, base=None), tmp_path / "out"
    (run / "epoch_1").rmdir()
    (run / "best").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    contents = []
    for _ in range(2):
        assert report(capsys, run, "--out", out) == (0, f"{out}/report.html\n", "")
        contents.append({path.name: path.read_bytes() for path in out.rglob("*.*")})
    assert contents[0] == contents[1]
    text = (out / "report.md").read_text()
    assert "1 of 1 runs have not ended their last epoch" in text
    assert "facts and stories: probes take the place of evaluations" in text
    assert {path.name for path in out.iterdir()} == {"report.md", "report.html", "summary.csv", "figures"}


def test_report_before_the_first_evaluation_of_a_probe(capsys, tmp_path):
    run = make_run(tmp_path / "run", "sft", 3e-5, base=None)
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "probe/" not in line]
    (run / "metrics.jsonl").write_text(lines[0] + "\n")
    assert report(capsys, run, "--out", tmp_path / "out")[0] == 0
    assert "training curves only" in (tmp_path / "out" / "report.md").read_text()


def test_mistakes_are_one_line(capsys, tmp_path):
    run, out = make_run(tmp_path / "run", "sft", 1e-5, base=None), tmp_path / "out"
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ((tmp_path / "absent", "--out", out), "is no folder"),
        ((run, "--new-task", "mmul", "--out", out), "--new-task=mmul was not evaluated"),
        ((run, "--out", tmp_path / "file" / "out"), "cannot be written"),
    ):
        code, _, err = report(capsys, *arguments)
        assert (code, len(err.split("\n")), message in err) == (1, 3, True), err
    assert not out.exists()
