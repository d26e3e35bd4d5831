"""Every number of summary.csv and of the tables, derived again from the samples' files."""

import csv
import json
import math
import re
import statistics
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap, norm

OLD = ("hellaswag", "winogrande", "mmlu", "ifeval")
SUITES = {
    "tofu": "knowledge",
    **dict.fromkeys(OLD, "forgetting"),
    **dict.fromkeys(("truthfulqa", "halueval", "confidence"), "reliability"),
}
LABELS = {"sft": "SFT", "finch": "FINCH", "dft": "DFT"}
MINUS, NONE = "\N{MINUS SIGN}", "\N{EN DASH}"
NUMBER = rf"[+{MINUS}-]?\d+(?:\.\d+)?"


def samples(sweep, model, task):
    folder = sweep / "base" if model == "base" else sweep / model / "evaluation"
    lines = (folder / f"{SUITES[task]}.{task}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def cluster_means(values, documents):
    groups = defaultdict(list)
    for value, document in zip(values, documents, strict=True):
        groups[document.get("cluster", f"document {document['doc_id']}")].append(value)
    return [sum(group) / len(group) for group in groups.values()]


def score(sweep, model, task):
    known = [one for one in samples(sweep, model, task) if one["score"] is not None]
    return statistics.fmean(cluster_means([one["score"] for one in known], known))


def differences(sweep, run, task):
    pairs = [
        (before, after)
        for before, after in zip(samples(sweep, "base", task), samples(sweep, run, task), strict=True)
        if before["score"] is not None and after["score"] is not None
    ]
    return cluster_means([after["score"] - before["score"] for before, after in pairs], [one for one, _ in pairs])


def expected(sweep, run, task):
    """delta, its standard error, and p where the test is McNemar's."""
    values = differences(sweep, run, task)
    wins, losses = sum(value == 1 for value in values), sum(value == -1 for value in values)
    is_binary = task not in ("halueval", "confidence")
    p = (binomtest(wins, wins + losses).pvalue if wins + losses else 1.0) if is_binary else None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), p


@pytest.fixture(scope="module")
def rows(report):
    with (report / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def tables(report):
    """Title to the rows of each table of report.md, as dictionaries."""
    found, title, header = {}, None, None
    for line in (report / "report.md").read_text().splitlines():
        if match := re.fullmatch(r"\*\*(.*)\*\*", line):
            title, header = match.group(1), None
        elif line.startswith("| "):
            cells = [cell.strip().replace("\\", "") for cell in line.strip().strip("|").split(" | ")]
            cells = [cell.strip(" |") for cell in cells]
            if header is None:
                header = cells
                found[title] = []
            else:
                found[title].append(list(zip(header, cells, strict=True)))
    return found


def numbers(text):
    return [float(one.replace(MINUS, "-")) for one in re.findall(NUMBER, text)]


def run_of(label, seed):
    method, _, rate = label.partition(", lr ")
    return f"{next(key for key, value in LABELS.items() if value == method)}-{float(rate):g}-{seed}"


def runs_of(label):
    return [run_of(label, seed) for seed in (0, 1)]


def average(sweep, run):
    return statistics.fmean(expected(sweep, run, task)[0] for task in OLD)


def test_summary_has_a_row_for_each_run_and_task(rows):
    assert len(rows) == 12 * (len(SUITES) + 1)


def test_summary_scores_and_deltas(rows, sweep):
    for row in rows:
        run, task = row["run"].rpartition("/")[2], row["task"]
        if task == "mean of old tasks":
            continue
        delta, error, p = expected(sweep, run, task)
        assert float(row["score"]) == pytest.approx(score(sweep, run, task))
        assert float(row["base_score"]) == pytest.approx(score(sweep, "base", task))
        assert float(row["delta"]) == pytest.approx(delta, abs=1e-12)
        assert float(row["standard_error"]) == pytest.approx(error)
        if p is not None:
            assert float(row["p_value"]) == pytest.approx(p)
        known = [one for one in samples(sweep, run, task) if one["score"] is not None]
        assert int(row["n"]) == len(known)
        method, rate, seed = run.rsplit("-", 1)[0].partition("-")[0], float(row["learning_rate"]), int(row["seed"])
        assert (row["method"], run) == (method, f"{method}-{rate:g}-{seed}")
        assert float(row["delta_low"]) <= delta <= float(row["delta_high"])
        assert float(row["score_low"]) <= float(row["score"]) <= float(row["score_high"])


def test_summary_intervals(rows, sweep):
    """scipy's BCa bootstrap, which draws other resamples; means of n scores of 0 and 1 come in steps of 1 / n."""
    for row in [row for row in rows if row["run"].endswith("finch-0.0001-1") and row["task"] in SUITES]:
        values = differences(sweep, "finch-0.0001-1", row["task"])
        found = bootstrap((values,), np.mean, method="BCa", n_resamples=4000, random_state=0).confidence_interval
        tolerance = 0.1 * float(row["standard_error"]) + 1 / len(values)
        assert float(row["delta_low"]) == pytest.approx(found.low, abs=tolerance)
        assert float(row["delta_high"]) == pytest.approx(found.high, abs=tolerance)


def test_summary_holm(rows):
    by_run = defaultdict(list)
    for row in rows:
        if row["p_value"]:
            by_run[row["run"]].append(row)
    assert len(by_run) == 12
    for group in by_run.values():
        ordered = sorted(group, key=lambda row: float(row["p_value"]))
        assert len(ordered) == 8
        for index, row in enumerate(ordered):
            adjusted = max(min(1.0, (8 - rank) * float(ordered[rank]["p_value"])) for rank in range(index + 1))
            assert float(row["p_holm"]) == pytest.approx(adjusted)


def test_summary_mean_of_old_tasks(rows, sweep):
    means = [row for row in rows if row["task"] == "mean of old tasks"]
    assert len(means) == 12
    for row in means:
        found = [expected(sweep, row["run"].rpartition("/")[2], task) for task in OLD]
        delta, error = statistics.fmean(one[0] for one in found), math.sqrt(sum(one[1] ** 2 for one in found)) / 4
        assert float(row["delta"]) == pytest.approx(delta)
        assert float(row["standard_error"]) == pytest.approx(error)
        assert float(row["delta_low"]) == pytest.approx(delta - norm.ppf(0.975) * error)
        assert float(row["delta_high"]) == pytest.approx(delta + norm.ppf(0.975) * error)


def test_settings_table(tables, sweep):
    rows = [dict(cells) | {"ranges": [text for name, text in cells if name == "range"]} for cells in tables["Settings"]]
    assert len(rows) == 7
    places = {}
    for row in rows[:-1]:
        runs = runs_of(row["setting"])
        new = [100 * score(sweep, run, "tofu") for run in runs]
        old = [100 * average(sweep, run) for run in runs]
        places[row["setting"]] = statistics.fmean(new), statistics.fmean(old)
        assert row["seeds"] == "2"
        for text, values in ((row["tofu, %"], new), (row["old tasks, points"], old)):
            value, low, high = numbers(text)
            assert value == pytest.approx(statistics.fmean(values), abs=0.051)
            assert low < value < high
        for text, values in zip(row["ranges"], (new, old), strict=True):
            assert numbers(text) == pytest.approx([min(values), max(values)], abs=0.051)
    for row in rows[:-1]:
        new, old = places[row["setting"]]
        is_beaten = any(one >= new and other >= old and (one, other) != (new, old) for one, other in places.values())
        assert (row["not dominated"] == "yes") == (not is_beaten), row["setting"]
    assert numbers(rows[-1]["tofu, %"])[0] == pytest.approx(100 * score(sweep, "base", "tofu"), abs=0.051)


def test_front_table(tables, sweep):
    """By hand: the settings in order of their score, the pretrained model before them, and straight lines."""
    title = "Change of the old tasks, points, at equal tofu"
    base = (100 * score(sweep, "base", "tofu"), 0.0)
    fronts = {}
    for row in map(dict, tables["Settings"][:-1]):
        runs = runs_of(row["setting"])
        place = (
            statistics.fmean(100 * score(sweep, run, "tofu") for run in runs),
            statistics.fmean(100 * average(sweep, run) for run in runs),
        )
        fronts.setdefault(row["setting"].partition(",")[0], [base]).append(place)
    for points in fronts.values():
        points.sort()
        assert all(one[1] > other[1] for one, other in pairwise(points)), "the helper's settings do not beat each other"
    found = {}
    assert [dict(cells)["method"] for cells in tables[title]] == ["SFT", "FINCH", "DFT"]
    for row in map(dict, tables[title]):
        points = fronts[row["method"]]
        assert (row["settings"], row["runs"]) == ("2", "4")
        for name, text in row.items():
            if not name.startswith("at "):
                continue
            [at] = numbers(name)
            if text.startswith("reaches"):
                assert numbers(text)[0] == pytest.approx(points[-1][0], abs=0.051)
                assert at > points[-1][0]
                continue
            left, right = next((one, other) for one, other in pairwise(points) if one[0] <= at <= other[0])
            value = left[1] + (at - left[0]) / (right[0] - left[0]) * (right[1] - left[1])
            assert numbers(text)[0] == pytest.approx(value, abs=0.051)
            assert ("†" in text) == (at < points[1][0])
            found[row["method"], name] = value
    for row in map(dict, tables["Difference from SFT, points"]):
        for name, text in row.items():
            if name.startswith("at ") and text != NONE:
                assert numbers(text)[0] == pytest.approx(found[row["method"], name] - found["SFT", name], abs=0.051)


def test_old_tasks_table(tables, sweep):
    assert len(tables["Old tasks by setting"]) == 6
    for row in map(dict, tables["Old tasks by setting"]):
        for task in OLD:
            delta = statistics.fmean(expected(sweep, run, task)[0] for run in runs_of(row["setting"]))
            value, low, high = numbers(row[f"{task}, points"])
            assert value == pytest.approx(100 * delta, abs=0.051)
            assert low < value < high
        mean = statistics.fmean(average(sweep, run) for run in runs_of(row["setting"]))
        assert numbers(row["mean of old tasks"])[0] == pytest.approx(100 * mean, abs=0.051)


def test_changes_tables(tables, sweep):
    assert len(tables["Changes by run"]) == 12
    for row in map(dict, tables["Changes by run"]):
        run = run_of(row["run"], row["seed"])
        for task in ("tofu", *OLD):
            assert numbers(row[f"{task}, points"])[0] == pytest.approx(100 * expected(sweep, run, task)[0], abs=0.051)
        assert numbers(row["mean of old tasks"])[0] == pytest.approx(100 * average(sweep, run), abs=0.051)
    assert len(tables["Every change, with its tests"]) == 12 * 8
    for row in map(dict, tables["Every change, with its tests"]):
        run, task = run_of(row["run"], row["seed"]), row["task"]
        delta, error, p = expected(sweep, run, task)
        assert numbers(row["pretrained"])[0] == pytest.approx(100 * score(sweep, "base", task), abs=0.051)
        assert numbers(row["tuned"])[0] == pytest.approx(100 * score(sweep, run, task), abs=0.051)
        assert numbers(row["change"])[0] == pytest.approx(100 * delta, abs=0.051)
        assert numbers(row["SE"])[0] == pytest.approx(100 * error, abs=0.0051)
        if p is not None:
            assert numbers(row["p"])[0] == pytest.approx(max(p, 0.001), abs=0.00051)
            assert row["test"] == "exact McNemar"


def test_stars_are_for_adjusted_p(tables, rows):
    adjusted = {(row["run"].rpartition("/")[2], row["task"]): float(row["p_holm"]) for row in rows if row["p_holm"]}
    starred = 0
    for row in map(dict, tables["Changes by run"]):
        for task in ("tofu", *OLD):
            has_star = row[f"{task}, points"].endswith("*")
            assert has_star == (adjusted[run_of(row["run"], row["seed"]), task] < 0.05)
            starred += has_star
    assert 0 < starred < 60


def test_tasks_table(tables, sweep):
    rows = {row["task"]: row for row in map(dict, tables["Tasks"])}
    assert rows.keys() == SUITES.keys()
    for task, row in rows.items():
        independent = 45 if task == "halueval" else int(row["documents"])
        assert numbers(row["half-width"])[0] == pytest.approx(100 * 1.96 * 0.5 / math.sqrt(independent), abs=0.051)
        assert numbers(row["pretrained"])[0] == pytest.approx(100 * score(sweep, "base", task), abs=0.051)


def test_reliability_table(tables, sweep):
    assert len(tables["Reliability"]) == 13
    columns = {
        "truthfulqa": "truthfulqa, mc2",
        "halueval": "halueval, acc",
        "confidence": "confidence, brier (lower is better)",
    }
    for row in map(dict, tables["Reliability"]):
        model = "base" if row["run"] == "pretrained" else run_of(row["run"], row["seed"])
        for task, column in columns.items():
            value, *change = numbers(row[column])
            assert value == pytest.approx(100 * score(sweep, model, task), abs=0.051)
            if model != "base":
                assert change[0] == pytest.approx(100 * expected(sweep, model, task)[0], abs=0.051)
        bins = defaultdict(list)
        for one in samples(sweep, model, "confidence"):
            if one["is_parsed"]:
                bins[min(9, (one["confidence"] - 1) // 10)].append(
                    one["confidence"] / 100 - (one["letter"] == one["answer"])
                )
        total = sum(map(len, bins.values()))
        error = sum(abs(sum(gaps)) for gaps in bins.values()) / total
        assert numbers(row["ECE"])[0] == pytest.approx(100 * error, abs=0.051)


def test_summary_sentence_names_no_difference_with_0_inside(report, tables):
    text = (report / "report.md").read_text()
    [closing] = [line for line in text.splitlines() if line.startswith("At an equal ")]
    at = f"at {re.search(r'equal ([0-9.]+%)', closing).group(1)}"
    rows = list(map(dict, tables["Difference from SFT, points"]))
    assert 2 * sum(bool(numbers(row[at])) for row in rows) >= len(rows)
    for row in rows:
        clause = re.search(rf"{row['method']} by ({NUMBER}) \[({NUMBER}), ({NUMBER})\]", closing)
        if not numbers(row[at]):
            assert clause is None
            continue
        value, low, high = numbers(row[at])
        if low <= 0 <= high:
            assert clause is None
        else:
            bounds = sorted((abs(low), abs(high)))
            assert [float(one) for one in clause.groups()] == pytest.approx([abs(value), *bounds])
