"""summary.csv against the statistics of the samples' files; every table against summary.csv."""

import csv
import json
import math
import re
from collections import defaultdict
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from helpers.evaluated_runs import BASE_WEIGHTS, make_run, write_suite

from finch.evaluation.statistics import holm, mean_interval, paired_delta
from finch.study.report.report import write_report

OLD = ("hellaswag", "winogrande", "mmlu", "ifeval")
MEAN = "mean of old tasks"
SUITES = {
    "tofu": "knowledge",
    **dict.fromkeys(OLD, "forgetting"),
    **dict.fromkeys(("truthfulqa", "halueval", "confidence"), "reliability"),
}
LABELS = {"SFT": "sft", "FINCH": "finch", "DFT": "dft"}
ONE = "sft-3e-05-0"
MINUS, NONE = "\N{MINUS SIGN}", "\N{EN DASH}"
NUMBER = rf"[+{MINUS}-]?\d+(?:\.\d+)?"


def samples(sweep, model, task):
    folder = sweep / "base" if model == "base" else sweep / model / "evaluation"
    lines = (folder / f"{SUITES[task]}.{task}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def rows(report):
    """(run's folder, task) to a row of summary.csv."""
    with (report / "summary.csv").open(newline="") as file:
        return {(row["run"].rpartition("/")[2], row["task"]): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def tables(report):
    """Title to the rows of each table of report.md."""
    found, title = {}, None
    for line in (report / "report.md").read_text().splitlines():
        if match := re.fullmatch(r"\*\*(.*)\*\*", line):
            title = match.group(1)
        elif line.startswith("| "):
            cells = [cell.strip(" |") for cell in line.replace("\\", "").strip().strip("|").split(" | ")]
            found.setdefault(title, []).append(cells)
    for title, (header, *lines) in found.items():
        found[title] = [dict(zip(header, cells, strict=True)) for cells in lines]
    return found


@pytest.fixture(scope="module")
def places(tables, rows):
    """Setting to its mean score and its mean change of the old tasks, in percent."""
    columns = (("tofu", "score"), (MEAN, "delta"))
    names = [row["setting"] for row in tables["Settings"][:-1]]
    return {name: tuple(fmean(over_seeds(rows, name, *column)) for column in columns) for name in names}


def numbers(text):
    return [float(one.replace(MINUS, "-")) for one in re.findall(NUMBER, text)]


def percent(value):
    """As a table shows it."""
    return pytest.approx(100 * float(value), abs=0.051)


def run_of(label, seed):
    method, _, rate = label.partition(", lr ")
    return f"{LABELS[method]}-{float(rate):g}-{seed}"


def over_seeds(rows, label, task, column):
    """In percent."""
    return [100 * float(rows[run_of(label, seed), task][column]) for seed in (0, 1)]


def test_summary_csv_has_the_statistics_of_the_samples(rows, sweep):
    assert len(rows) == 12 * (len(SUITES) + 1)
    for run in (ONE, "finch-0.0001-1"):
        deltas = {task: paired_delta(samples(sweep, "base", task), samples(sweep, run, task)) for task in SUITES}
        adjusted = holm([delta.p_value for delta in deltas.values()])
        for (task, delta), p_holm in zip(deltas.items(), adjusted, strict=True):
            row = rows[run, task]
            assert run == f"{row['method']}-{float(row['learning_rate']):g}-{row['seed']}"
            assert row["test"] == delta.test
            base, mean = (mean_interval(samples(sweep, model, task)) for model in ("base", run))
            known = {"n": mean.n, "score": mean.mean, "score_low": mean.low, "score_high": mean.high}
            known |= {"delta": delta.mean, "delta_low": delta.low, "delta_high": delta.high, "base_score": base.mean}
            known |= {"standard_error": delta.standard_error, "p_value": delta.p_value, "p_holm": p_holm}
            assert {name: float(row[name]) for name in known} == known
        mean = fmean(deltas[task].mean for task in OLD)
        error = math.sqrt(sum(deltas[task].standard_error ** 2 for task in OLD)) / len(OLD)
        columns = ("delta", "standard_error", "delta_low", "delta_high")
        expected = (mean, error, mean - 1.959964 * error, mean + 1.959964 * error)
        assert tuple(float(rows[run, MEAN][name]) for name in columns) == pytest.approx(expected)


def test_settings_table(tables, rows, places):
    *settings, base = tables["Settings"]
    assert len(settings) == 6
    for row in settings:
        assert row["seeds"] == "2"
        place = places[row["setting"]]
        titles = {"tofu, %": ("tofu", "score"), "old tasks, points": (MEAN, "delta")}
        for (title, column), mean in zip(titles.items(), place, strict=True):
            value, low, high = numbers(row[title])
            assert value == pytest.approx(mean, abs=0.051)
            assert low < value < high
            values = sorted(over_seeds(rows, row["setting"], *column))
            assert numbers(row[f"{title.partition(',')[0]}: range"]) == pytest.approx(values, abs=0.051)
        is_beaten = any(other != place and min(np.subtract(other, place)) >= 0 for other in places.values())
        assert (row["not dominated"] == "yes") == (not is_beaten), row["setting"]
    assert numbers(base["tofu, %"])[0] == percent(rows[ONE, "tofu"]["base_score"])


def test_front_table(tables, rows, places):
    """By hand: the settings in order of their score, the pretrained model before them, and straight lines."""
    table = tables["Change of the old tasks, points, at equal tofu"]
    assert [row["method"] for row in table] == list(LABELS)
    found = {}
    for row in table:
        points = [place for setting, place in places.items() if setting.startswith(row["method"])]
        points = [(100 * float(rows[ONE, "tofu"]["base_score"]), 0.0), *sorted(points)]
        assert all(one[1] > other[1] for one, other in pairwise(points)), "the helper's settings do not beat each other"
        assert (row["settings"], row["runs"]) == ("2", "4")
        for name in [name for name in row if name.startswith("at ")]:
            [at], value = numbers(name), numbers(row[name])[0]
            at = next((score for score, _ in places.values() if score == pytest.approx(at, abs=0.051)), at)
            if row[name].startswith("reaches"):
                assert value == pytest.approx(points[-1][0], abs=0.051)
                assert at > points[-1][0]
            else:
                found[row["method"], name] = np.interp(at, *zip(*points, strict=True))
                assert value == pytest.approx(found[row["method"], name], abs=0.051)
                assert ("†" in row[name]) == (at < points[1][0])
    marks = {(row["method"], name) for row in table for name, text in row.items() if "†" in text}
    assert marks
    for row in tables["Difference from SFT, points"]:
        for name, text in row.items():
            if name.startswith("at ") and text != NONE:
                assert numbers(text)[0] == pytest.approx(found[row["method"], name] - found["SFT", name], abs=0.051)
                assert ("†" in text) == (not marks.isdisjoint([(row["method"], name), ("SFT", name)]))


def test_old_tasks_table(tables, rows):
    assert len(tables["Old tasks by setting"]) == 6
    for row in tables["Old tasks by setting"]:
        for task in (*OLD, MEAN):
            value, low, high = numbers(row[task if task == MEAN else f"{task}, points"])
            assert value == pytest.approx(fmean(over_seeds(rows, row["setting"], task, "delta")), abs=0.051)
            assert low < value < high


def test_changes_tables(tables, rows):
    assert len(tables["Changes by run"]) == 12
    stars = set()
    for row in tables["Changes by run"]:
        run = run_of(row["run"], row["seed"])
        for task in ("tofu", *OLD):
            text = row[f"{task}, points"]
            assert numbers(text)[0] == percent(rows[run, task]["delta"])
            assert text.endswith("*") == (float(rows[run, task]["p_holm"]) < 0.05)
            stars.add(text.endswith("*"))
        assert numbers(row[MEAN])[0] == percent(rows[run, MEAN]["delta"])
    assert stars == {True, False}
    assert len(tables["Every change, with its tests"]) == 12 * 8
    for row in tables["Every change, with its tests"]:
        known = rows[run_of(row["run"], row["seed"]), row["task"]]
        for column, key in (("pretrained", "base_score"), ("tuned", "score"), ("change", "delta")):
            assert numbers(row[column])[0] == percent(known[key])
        assert numbers(row["SE"])[0] == pytest.approx(100 * float(known["standard_error"]), abs=0.0051)
        assert numbers(row["p"])[0] == pytest.approx(max(float(known["p_value"]), 0.001), abs=0.00051)
        assert row["test"] == known["test"]


def test_tasks_table(tables, rows):
    assert [row["task"] for row in tables["Tasks"]] == list(SUITES)
    for row in tables["Tasks"]:
        independent = 45 if row["task"] == "halueval" else int(row["documents"].removesuffix(" (few)"))
        assert numbers(row["half-width"])[0] == pytest.approx(100 * 1.96 * 0.5 / math.sqrt(independent), abs=0.051)
        assert numbers(row["pretrained"])[0] == percent(rows[ONE, row["task"]]["base_score"])


def test_reliability_table(tables, rows, sweep):
    assert len(tables["Reliability"]) == 13
    columns = ("truthfulqa, mc2", "halueval, acc", "confidence, brier (lower is better)")
    for row in tables["Reliability"]:
        model = "base" if row["run"] == "pretrained" else run_of(row["run"], row["seed"])
        for column in columns:
            known = rows[ONE if model == "base" else model, column.partition(",")[0]]
            expected = [known["base_score"]] if model == "base" else [known["score"], known["delta"]]
            assert numbers(row[column])[: len(expected)] == list(map(percent, expected))
        bins = defaultdict(list)
        for one in samples(sweep, model, "confidence"):
            if one["is_parsed"]:
                bins[(one["confidence"] - 1) // 10].append(one["confidence"] / 100 - (one["letter"] == one["answer"]))
        error = sum(abs(sum(gaps)) for gaps in bins.values()) / sum(map(len, bins.values()))
        assert numbers(row["ECE"])[0] == percent(error)


def test_skills_table(tmp_path, undrawn):
    """What `finch evaluate` prints of each skill, in both texts."""
    run = make_run(tmp_path / "one", "sft", 1e-4, base=None)
    for folder, base, kl, num_right in ((tmp_path / "base", None, 0.0, 6), (run / "evaluation", "../../base", 0.5, 2)):
        rows = [{"doc_id": n, "doc_hash": str(n), "score": kl, "right": float(n < num_right)} for n in range(8)]
        more = {"unit": "nats", "is_higher_better": False, "others": {"accuracy": num_right / 8}}
        tasks = {"code": ("old", "kl", rows, more)}
        write_suite(folder, "skills", base=base, weights=BASE_WEIGHTS, tasks=tasks)
    page = write_report([run], tmp_path / "report")
    text = page.with_name("report.md").read_text()
    assert re.search(
        rf"\| SFT, lr 1e-4 \| code \| 0\.500 \[0\.500, 0\.500\] \| 8 \| 75\.0 \| 25\.0 \| {MINUS}50\.0 \[.*\| 8 \|",
        text,
    )
    assert "right before, %" in page.read_text()
    with page.with_name("summary.csv").open() as file:
        rows = {row["task"]: (row["accuracy"], row["base_accuracy"]) for row in csv.DictReader(file)}
    assert (rows["code"], rows["facts"]) == (("0.25", "0.75"), ("", ""))


def test_probes_alone_come_without_words_of_intervals_and_tests(tmp_path):
    runs = [make_run(tmp_path / name, name, 1e-4, base=None) for name in ("sft", "finch")]
    write_report(runs, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "**Every change**" in text
    assert "since there are no intervals: probes have them from five seeds on" in text
    for words in ("Holm's correction for", "with its tests", "how far chance", "| SE |"):
        assert words not in text
