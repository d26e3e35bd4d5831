"""The paper's small learning rate: the largest one with less than 2 points of average forgetting."""

import json
import random
import re

import numpy as np
import pytest
from helpers.runs import finch

from finch.base.errors import UserError
from finch.evaluation.results import SuiteResult, TaskResult, write_result
from finch.study.report.report import write_report
from finch.study.sweep.select_lr import _is_reported, rates_of, select_rate


def write(folder, suite, scores, *, base=None, role="old"):
    """A suite's result; ``scores`` are of tasks: of each document, or one of all 40."""
    tasks, samples = {}, {}
    for name, values in scores.items():
        values = values if isinstance(values, list) else [values] * 40
        tasks[name] = TaskResult(role, "acc", "test", sum(values) / len(values), len(values), f"{suite}.{name}.jsonl")
        samples[name] = [{"doc_id": n, "doc_hash": f"{n}", "score": value} for n, value in enumerate(values)]
    base = None if base is None else f"{base}/{suite}.json"
    write_result(folder, SuiteResult(suite, "model", "hash", base is None, base, {"limit": None}, {}, tasks), samples)


def write_run(run, values, scores):
    write(run / "evaluation", "forgetting", scores, base="../../base-x")
    write(run / "evaluation", "knowledge", {"new": 0.9}, base="../../base-x", role="new")
    (run / "cell.json").write_text(json.dumps({"values": values}))
    return run


@pytest.fixture
def out(tmp_path):
    """Forgetting of rate 1e-5: 1 point in the mean of two seeds; of 2e-5: 1.9; of 5e-5: 2.0; the pretrained model's scores are 0.5 and 0.7."""
    write(tmp_path / "base-x", "forgetting", {"a": 0.5, "b": 0.7})
    write(tmp_path / "base-x", "knowledge", {"new": 0.1}, role="new")
    scores = {(1e-5, 0): (0.5, 0.7), (1e-5, 1): (0.48, 0.68), (2e-5, 0): (0.462, 0.7), (5e-5, 0): (0.4598, 0.7)}
    for (rate, seed), (a, b) in scores.items():
        values = {"method": "sft", "optimizer.lr": rate, "seed": seed}
        write_run(tmp_path / f"sft_{rate}_{seed}", values, {"a": a, "b": b})
    (tmp_path / "dft").mkdir()
    (tmp_path / "dft" / "cell.json").write_text(json.dumps({"values": {"method": "dft", "optimizer.lr": 1.0}}))
    return tmp_path


def test_one_half_of_the_documents_chooses_and_the_other_is_reported(tmp_path):
    """Of two tasks of 300 and 100 documents and two seeds, against plain loops over the seeded halves."""
    rng = random.Random(0)
    before = {name: [float(rng.random() < 0.7) for _ in range(number)] for name, number in (("a", 300), ("b", 100))}
    write(tmp_path / "base-x", "forgetting", before)
    write(tmp_path / "base-x", "knowledge", {"new": 0.1}, role="new")
    after = [{name: [float(rng.random() < 0.6) for _ in values] for name, values in before.items()} for _ in "01"]
    runs = [
        write_run(tmp_path / f"sft_{seed}", {"method": "sft", "optimizer.lr": 1e-5, "seed": seed}, after[seed])
        for seed in (0, 1)
    ]
    [rate] = rates_of(runs, "sft")
    sizes = {}
    for is_reported, found in ((False, rate.forgetting), (True, rate.reported)):
        means, errors = [], []
        for name, scores in before.items():
            half = [n for n in range(len(scores)) if _is_reported(name, f"{n} {n}") == is_reported]
            sizes[name, is_reported] = len(half)
            lost = np.array([100 * (scores[n] - (after[0][name][n] + after[1][name][n]) / 2) for n in half])
            means.append(lost.mean())
            errors.append(lost.std(ddof=1) ** 2 / len(lost))
        margin = 1.959964 * np.sqrt(sum(errors)) / 2
        assert (found.mean, found.low, found.high) == pytest.approx(
            (np.mean(means), np.mean(means) - margin, np.mean(means) + margin)
        )
    assert sizes["a", False] + sizes["a", True] == 300
    assert all(0.35 < size / len(before[name]) < 0.65 for (name, _), size in sizes.items())


def test_largest_rate_that_forgets_less_is_chosen(out):
    rates = rates_of(sorted(out.glob("sft_*")), "sft")
    assert [rate.forgetting.mean for rate in rates] == pytest.approx([1.0, 1.9, 2.01])
    assert [rate.lr for rate in rates if select_rate([rate], 2.0)] == [1e-5, 2e-5]
    assert select_rate(rates, 1.95).lr == 2e-5
    assert select_rate(rates, 1.5).lr == 1e-5
    assert select_rate(rates, 0.5) is None


def test_rates_are_compared_on_the_same_tasks(out):
    run = write_run(out / "sft_2e-05_0", {"method": "sft", "optimizer.lr": 2e-5, "seed": 0}, {"a": 0.5})
    with pytest.raises(UserError, match=rf"^{run} has no result of b, by which other rates are compared"):
        rates_of(sorted(out.glob("sft_*")), "sft")


def test_labelled_runs_count_only_under_their_label(out):
    for rate in (1e-5, 2e-5):
        file = out / f"sft_{rate}_0" / "cell.json"
        values = json.loads(file.read_text())["values"]
        file.write_text(json.dumps({"values": {"label": "constant", **values}}))
    runs = sorted(out.glob("sft_*"))
    assert [(rate.lr, len(rate.runs)) for rate in rates_of(runs, "sft")] == [(1e-5, 1), (5e-5, 1)]
    rates = rates_of(runs, "constant")
    assert [(rate.lr, rate.values) for rate in rates] == [(1e-5, {}), (2e-5, {})]


def test_command_prints_all_rates_and_the_runs(out, capsys):
    code, printed, _ = finch(capsys, "report", "--select-lr", str(out), "--max-forgetting", "1.95")
    assert code == 0
    assert printed.splitlines()[1:4] == [
        "1e-05         1.00 [1.00, 1.00]  1.00 [1.00, 1.00]  2",
        "2e-05         1.90 [1.90, 1.90]  1.90 [1.90, 1.90]  1                   <-",
        "5e-05         2.01 [2.01, 2.01]  2.01 [2.01, 2.01]  1",
    ]
    last = "optimizer.lr=2e-05: 1.90 [1.90, 1.90] points of average forgetting on the documents that did not choose it"
    assert printed.endswith(f"{last}\n{out}/sft_2e-05_0\n")


def test_report_has_the_table_of_rates(out, tmp_path, undrawn):
    page = write_report([out], tmp_path / "report").with_name("report.md").read_text()
    _, _, section = page.partition("## SFT's learning rates")
    assert "forgets less than 2 points on average: 2e-05" in section
    assert re.findall(r"^\| (\S+) \| (\S+ \[.*?\]) \| (\S+ \[.*?\]) \| (\d) \|$", section, re.MULTILINE) == [
        (rate, *[f"{points} [{points}, {points}]"] * 2, runs)
        for rate, points, runs in (("1e-05", "1.00", "2"), ("2e-05", "1.90", "1"), ("5e-05", "2.01", "1"))
    ]


def test_no_rate_is_one_line(out, capsys):
    def error_of(*arguments):
        code, _, error = finch(capsys, "report", "--select-lr", *arguments)
        assert (code, error.count("finch: error: ")) == (1, 1)
        return error

    least = "no rate of sft forgets less on average, the least is 1.00 points at optimizer.lr=1e-05"
    assert least in error_of(str(out), "--max-forgetting", "0.5")
    assert "--method talr: no run has this method" in error_of(str(out), "--method", "talr")
    assert "holds no runs of a sweep" in error_of(str(out / "dft"))
    write(out / "base-x", "forgetting", {"a": [0.5] * 3})
    for folder in out.glob("sft_*/evaluation"):
        write(folder, "forgetting", {"a": [0.5] * 3}, base="../../base-x")
    assert "a has 3 documents, too few for two halves" in error_of(str(out))
    for folder in out.glob("sft_*/evaluation"):
        folder.rename(folder.with_name("elsewhere"))
    assert "no run is evaluated" in error_of(str(out))
