"""The paper's small learning rate: the largest one with less than 2 points of average forgetting."""

import json

import pytest
from helpers.runs import finch

from finch.evaluation.results import SuiteResult, TaskResult, write_result
from finch.sweep.select_lr import rates_of, select_rate


def result(suite, base, scores, role="old"):
    tasks = {
        name: TaskResult(role, "acc", "test", score, 10, f"{suite}.{name}.jsonl") for name, score in scores.items()
    }
    return SuiteResult(suite, "model", "hash", base is None, base, {"limit": None}, {}, tasks)


@pytest.fixture
def out(tmp_path):
    """Forgetting of rate 1e-5: 1 point in the mean of two seeds; of 2e-5: 1.9; of 5e-5: 2.0; the pretrained model's scores are 0.5 and 0.7."""
    write_result(tmp_path / "base-x", result("forgetting", None, {"a": 0.5, "b": 0.7}), {})
    write_result(tmp_path / "base-x", result("knowledge", None, {"new": 0.1}, "new"), {})
    scores = {(1e-5, 0): (0.5, 0.7), (1e-5, 1): (0.48, 0.68), (2e-5, 0): (0.462, 0.7), (5e-5, 0): (0.46, 0.7)}
    for (rate, seed), (a, b) in scores.items():
        run = tmp_path / f"sft_{rate}_{seed}"
        base = "../../base-x"
        write_result(run / "evaluation", result("forgetting", f"{base}/forgetting.json", {"a": a, "b": b}), {})
        write_result(run / "evaluation", result("knowledge", f"{base}/knowledge.json", {"new": 0.9}, "new"), {})
        values = {"method": "sft", "optimizer.lr": rate, "seed": seed}
        (run / "cell.json").write_text(json.dumps({"values": values}))
    (tmp_path / "dft").mkdir()
    (tmp_path / "dft" / "cell.json").write_text(json.dumps({"values": {"method": "dft", "optimizer.lr": 1.0}}))
    return tmp_path


def test_largest_rate_that_forgets_less_is_chosen(out):
    rates = rates_of(sorted(out.glob("sft_*")), "sft")
    assert [rate.forgetting for rate in rates] == pytest.approx([1.0, 1.9, 2.0])
    assert select_rate(rates, 1.95).lr == 2e-5
    assert select_rate(rates, 1.5).lr == 1e-5
    assert select_rate(rates, 0.5) is None


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
    code, printed, _ = finch(capsys, "select-lr", str(out), "--max-forgetting", "1.95")
    assert code == 0
    assert printed.splitlines()[1:4] == [
        "1e-05                 1.00     2",
        "2e-05                 1.90     1    <-",
        "5e-05                 2.00     1",
    ]
    assert printed.endswith(f"optimizer.lr=2e-05, 1.90 points of average forgetting\n{out}/sft_2e-05_0\n")


def test_no_rate_is_one_line(out, capsys):
    def error_of(*arguments):
        code, _, error = finch(capsys, "select-lr", *arguments)
        assert (code, error.count("finch: error: ")) == (1, 1)
        return error

    least = "no rate of sft forgets less on average, the least is 1.00 points at optimizer.lr=1e-05"
    assert least in error_of(str(out), "--max-forgetting", "0.5")
    assert "--method talr: no run has this method" in error_of(str(out), "--method", "talr")
    assert "holds no runs of a sweep" in error_of(str(out / "dft"))
    for folder in out.glob("sft_*/evaluation"):
        folder.rename(folder.with_name("elsewhere"))
    assert "no run is evaluated" in error_of(str(out))
