"""A report whose old tasks are in nats, and what it says of them and of runs without all evaluations."""

import csv
import json
import re

import pytest
from helpers.evaluated_runs import add_losses, make_base, make_run, make_sweep

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from scipy.stats import binomtest

from finch.evaluation.statistics import holm
from finch.study.report.content import Names
from finch.study.report.front import Front, compare_pair, seed_points
from finch.study.report.measures import compare
from finch.study.report.report import write_report
from finch.study.report.runs import read_runs
from finch.study.report.selection import Measure
from finch.study.report.style import method_styles
from finch.study.report.summary import _conclusion, _pair_text, notes
from finch.study.report.tables import NONE


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Of two methods, two learning rates and two seeds; one run has only the losses, one has nothing."""
    folder = tmp_path_factory.mktemp("sweep")
    cells = make_sweep(folder, methods=("sft", "finch"), rates=(3e-5, 1e-4), n=20)
    add_losses(folder, cells)
    for path in [*(cells[0] / "evaluation").glob("[!l]*.json"), *(cells[1] / "evaluation").glob("*.json")]:
        path.unlink()
    return folder


@pytest.fixture(scope="module")
def nats(sweep):
    write_report([sweep], sweep / "nats", new_task="tofu", old_tasks=["own_answers_kl"])
    return sweep / "nats"


@pytest.fixture(scope="module")
def points(sweep):
    write_report([sweep], sweep / "points", new_task="tofu")
    return (sweep / "points" / "report.md").read_text()


def test_report_in_nats(nats):
    text = (nats / "report.md").read_text()
    assert (
        "The change of own_answers_kl, of each method and SFT where both have learned equally much (95% inter" in text
    )
    [line] = [line for line in text.splitlines() if line.startswith("- FINCH forgets ")]
    assert re.search(
        r"forgets at [\d.]+%, the highest score that both reach \(in \d\d% of the draws\), \d\.\d\d \[| on average",
        line,
    )
    assert len(re.findall(r"At an equal score on tofu: [^.]*\.", text)) == 1
    assert "change of own_answers_kl, nats per token" in (nats / "figures" / "trade_off.svg").read_text()
    assert "--old-tasks own_answers_kl" in text
    assert "0 before tuning, never less, so there is no test." in text
    assert f"| own_answers_kl | old | kl | losses | 30 (few) | {NONE} | {NONE} | 0.000 [0.000, 0.000] |" in text


def test_summary_csv_has_units(nats):
    with (nats / "summary.csv").open() as file:
        rows = {(row["run"], row["task"]): row for row in csv.DictReader(file)}
    units = {task: row["unit"] for (_, task), row in rows.items()}
    in_nats = {"own_answers", "own_answers_kl", "mean of old tasks"}
    assert units == {task: "nats" if task in in_nats else "points" for task in units}
    assert in_nats | {"tofu", "mmlu", "confidence"} < units.keys()
    tests = {task: row["test"] for (_, task), row in rows.items()}
    assert (tests["own_answers"], tests["mmlu"]) == ("sign-flip permutation", "exact McNemar")
    for (run, task), row in rows.items():
        if task == "own_answers_kl":  # it cannot fall: no test, and no part in Holm's correction
            assert {row[key] for key in ("test", "p_value", "p_holm")} == {""}
            tested = [row for (other, _), row in rows.items() if other == run and row["p_value"]]
            assert [float(row["p_holm"]) for row in tested] == holm([float(row["p_value"]) for row in tested])
        if task == "mean of old tasks":
            assert float(row["delta"]) == pytest.approx(float(rows[run, "own_answers_kl"]["score"]))


def test_notes_name_tasks_and_runs_outside_the_trade_off(nats, points):
    text = (nats / "report.md").read_text()
    assert "old task is own_answers_kl in nats. Only in the tables of changes: own_answers in nats, hellaswag" in text
    assert "\n> Without an evaluation: sft-3e-05-1.\n" in text
    assert "1 of 8 runs lacks tofu and is absent from the trade-off: SFT, lr 3e-5." in text
    assert "1 of 8 runs lacks tofu and own_answers_kl and is absent from the trade-off: SFT, lr 3e-5." in text
    assert "own_answers and own_answers_kl in nats, since a mean of points and nats says nothing" in points
    assert "2 of 8 runs lack tofu, hellaswag and mmlu and are absent" in points
    assert "SFT, lr 3e-5 (2 seeds)." in points


NEW = Measure("tofu", "new", "knowledge", "acc", "")
BASE = seed_points("pretrained", [[(20.0, 0.0)] * 5])[0]


def setting(method, new, old):
    """Of five seeds around a point, SFT's and the others' on opposite sides of it."""
    sides = (-2, -1, 0, 1, 2) if method == "sft" else (2, 1, 0, -1, -2)
    return seed_points(method, [[(new, old * (1 + side / 100)) for side in sides]])[0]


def test_methods_are_compared_at_equal_scores_in_words():
    sft = [setting("sft", 40.0, -0.4), setting("sft", 60.0, -0.8), setting("sft", 80.0, -1.2)]
    methods = {
        "finch": [setting("finch", 40.0, -0.2), setting("finch", 60.0, -0.4), setting("finch", 70.0, -0.5)],
        "eaft": [setting("eaft", 40.0, -0.5), setting("eaft", 80.0, -1.7)],
        "l2": [setting("l2", 50.0, -0.9)],
        "dft": [setting("dft", 40.0, -0.4), setting("dft", 60.0, -0.79), setting("dft", 80.0, -1.2)],
        "stm": [setting("stm", 30.0, -0.1)],
    }
    pairs = {method: compare_pair(points, sft, BASE) for method, points in methods.items()}
    highest = {method: max(one.new.value for one in points) for method, points in {"sft": sft, **methods}.items()}
    front = Front([], dict.fromkeys(("sft", *methods), ()), highest, pairs)
    names = Names(method_styles(front.methods), [])
    assert _conclusion(front, NEW, names) == (
        "At an equal score on tofu: FINCH forgets less than SFT; EAFT forgets more than SFT; of DFT no difference from SFT can be shown; "
        "of L2 nothing is concluded from one score, add learning rates; SFT has no common score with STM: differences marked † are extrapolated."
    )
    kl, points = (
        Measure("kl", "old", "losses", "kl", "", "nats", False),
        Measure("mmlu", "old", "forgetting", "acc", ""),
    )
    assert re.fullmatch(
        r"FINCH forgets 0\.50 \[0\.\d+, 0\.\d+\] times as much, from 40\.0% to 70\.0% on average, 0\.50 to 0\.50 without any one setting; "
        r"at 70\.0%, the highest score that both reach, 0\.50 \[0\.\d+, 0\.\d+\] times as much\.",
        _pair_text(names, front, "finch", NEW, kl),
    )
    assert re.fullmatch(
        r"L2 forgets at 50\.0%, the highest score that both reach, 1\.50 \[1\.\d+, 1\.\d+\] times as much\.",
        _pair_text(names, front, "l2", NEW, kl),
    )
    assert _pair_text(names, front, "stm", NEW, kl) == (
        "STM and SFT: at no common score; train SFT with fewer epochs or a lower rate too."
    )
    gains = [setting("finch", 40.0, 3.0), setting("finch", 80.0, 1.0)]
    pairs["finch"] = compare_pair(gains, sft, BASE, has_intervals=False)
    text = _pair_text(names, front, "finch", NEW, points)
    assert text.endswith("at 80.0%, the highest score that both reach, 2.2 points less.")
    assert " points less, from 40.0% to 80.0% on average; at" in text


def test_tasks_at_chance_are_marked_and_stay_out_of_the_mean(sweep, points, undrawn):
    base = json.loads(next(sweep.glob("base*/forgetting.json")).read_text())["tasks"]["winogrande"]
    interval = binomtest(round(20 * base["score"]), 20).proportion_ci(method="wilson")
    assert interval.low <= base["chance"] < base["score"]
    for words in (
        "winogrande: the pretrained model is not above chance (25.0%), so it can forget nothing there, and it is not in the mean.",
        "| winogrande (at chance) | old |",
        "Caution: fewer than 100 documents, so rough intervals: own_answers (30), own_answers_kl (30), tofu (20), ",
    ):
        assert words in points
    write_report([sweep], sweep / "named", new_task="tofu", old_tasks=["winogrande"])
    named = (sweep / "named" / "report.md").read_text()
    assert "so it can forget nothing there." in named
    assert "Old tasks: the change of winogrande." in named


def test_runs_that_are_left_out_are_folded_at_the_end(nats):
    for name in ("report.md", "report.html"):
        text = (nats / name).read_text()
        assert text.index("lacks tofu and is absent") > text.index("<summary>Left out") > text.index("finch report ")


def test_runs_at_their_cap_are_named(tmp_path, undrawn):
    """There FINCH's rate is constant: a comparison would say nothing of the schedule."""
    run, other = (make_run(tmp_path / name, name, 1e-5, base=None) for name in ("finch", "sft"))
    metrics = run / "metrics.jsonl"
    half = metrics.read_text().splitlines(keepends=True)
    half[::2] = [line.replace('"lr_is_capped": false', '"lr_is_capped": true') for line in half[::2]]
    metrics.write_text("".join(half))
    text = write_report([run, other], tmp_path / "report").with_name("report.md").read_text()
    assert "| facts (accuracy), points | stories (loss), nats per token |" in text
    assert "Without an evaluation" not in text
    share = re.search(r"FINCH was at its cap, lr_scheduler.eta_max, in 1 of 2 runs, in up to (\d+%) of", text)[1]
    assert 40 < int(share[:-1]) < 60
    assert re.search(rf"\| {share} of steps \|.*/finch \|$", text, re.M)
    assert re.search(rf"\| {NONE} \|.*/sft \|$", text, re.M)


def test_an_evaluation_of_a_model_that_was_replaced_is_named(tmp_path):
    runs = [make_run(tmp_path / name, "sft", rate) for name, rate in (("one", 1e-5), ("two", 2e-5))]
    make_base(tmp_path / "base")
    words = "two: evaluated was a model that the run has replaced since; evaluate again."
    assert words not in notes(compare(read_runs(runs)))
    (runs[1] / "best").unlink()
    (runs[1] / "best").symlink_to("epoch_0")
    assert words in notes(compare(read_runs(runs)))
