"""The commands that a report prints, run."""

import shlex
import shutil

import pytest
from helpers.evaluation import read_lines, write_data_root
from helpers.runs import finch
from transformers import AutoTokenizer

from finch.evaluation.results import read_result

pytest.importorskip("matplotlib", reason="the report extra is not installed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_commands_of_a_report_repeat_what_it_shows(tiny, trained, base_folder, tmp_path, capsys, monkeypatch):
    """The training, in another folder, each evaluation, and the report."""
    monkeypatch.chdir(tmp_path)
    run, base = tmp_path / "a run", tmp_path / "base"
    shutil.copytree(trained(tiny(epochs=1, max_steps_per_epoch=3, overwrite=True)).folder, run)
    shutil.copytree(base_folder, base)
    for folder in (base, run / "epoch_0"):  # for skills
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    root, models = write_data_root(tmp_path / "data"), ("--base", str(base), "--tuned", str(run))
    tasks = ("--suite", "forgetting", "--tasks", "hellaswag,winogrande", "--data-root", str(root), "--limit", "6")
    for words in (tasks, ("--limit", "8")):
        code, _, error = finch(capsys, "evaluate", *models, "--out", "evaluated", *words)
        assert code == 0, error
    results = {path.name: read_result(path) for path in (run / "evaluation").glob("*.json")}
    assert results.keys() == {"forgetting.json", "skills.json"}
    assert finch(capsys, "report", str(run), "--out", "report")[0] == 0

    text = (tmp_path / "report" / "report.md").read_text()
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("finch ")]
    assert [words[1] for words in commands] == ["run", "evaluate", "evaluate", "report"]
    shutil.rmtree(run / "evaluation")
    for words in commands:
        code, _, error = finch(capsys, *words[1:])
        assert code == 0, (words, error)
    assert {path.name: read_result(path) for path in (run / "evaluation").glob("*.json")}.keys() == results.keys()
    for name, before in results.items():
        after = read_result(run / "evaluation" / name)
        assert (after.settings, after.tasks) == (before.settings, before.tasks)
    losses = [[line["loss"] for line in read_lines(each / "metrics.jsonl")] for each in (run, tmp_path / "a run_again")]
    assert losses[0] == losses[1]
