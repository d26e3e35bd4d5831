"""summary.csv against numbers derived again from the samples' files; every table against summary.csv."""

import csv
import json
import math
import re
import statistics
from collections import defaultdict
from itertools import pairwise

import pytest
from scipy.stats import binomtest

from finch.evaluation.statistics import holm, mean_interval, paired_delta

OLD = ("hellaswag", "winogrande", "mmlu", "ifeval")
MEAN = "mean of old tasks"
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


@pytest.fixture(scope="module")
def rows(report):
    """(run's folder, task) to a row of summary.csv."""
    with (report / "summary.csv").open(newline="") as file:
        return {(row["run"].rpartition("/")[2], row["task"]): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def tables(report):
    """Title to the rows of each table of report.md, as lists of (column, text)."""
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


def percent(value):
    """As a table shows it."""
    return pytest.approx(100 * float(value), abs=0.051)


def run_of(label, seed):
    method, _, rate = label.partition(", lr ")
    return f"{next(key for key, value in LABELS.items() if value == method)}-{float(rate):g}-{seed}"


def over_seeds(rows, label, task, column):
    """In percent."""
    return [100 * float(rows[run_of(label, seed), task][column]) for seed in (0, 1)]


def test_summary_csv_equals_the_samples(rows, sweep):
    assert len(rows) == 12 * (len(SUITES) + 1)
    for (run, task), row in rows.items():
        if task == MEAN:
            continue
        values = differences(sweep, run, task)
        known = [one for one in samples(sweep, run, task) if one["score"] is not None]
        method, rate, seed = row["method"], float(row["learning_rate"]), int(row["seed"])
        assert run == f"{method}-{rate:g}-{seed}"
        assert int(row["n"]) == len(known)
        assert float(row["score"]) == pytest.approx(score(sweep, run, task))
        assert float(row["base_score"]) == pytest.approx(score(sweep, "base", task))
        assert float(row["delta"]) == pytest.approx(statistics.fmean(values), abs=1e-12)
        assert float(row["standard_error"]) == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)))
        if task not in ("halueval", "confidence"):  # scores of 0 and 1
            wins, losses = values.count(1), values.count(-1)
            assert row["test"] == "exact McNemar"
            assert float(row["p_value"]) == pytest.approx(binomtest(wins, wins + losses).pvalue if wins + losses else 1)


@pytest.mark.parametrize("run", ["sft-3e-05-0", "finch-0.0001-1"])
def test_summary_csv_has_the_intervals_of_statistics(rows, sweep, run):
    deltas = {task: paired_delta(samples(sweep, "base", task), samples(sweep, run, task)) for task in SUITES}
    adjusted = holm([delta.p_value for delta in deltas.values()])
    for (task, delta), p_holm in zip(deltas.items(), adjusted, strict=True):
        row, mean = rows[run, task], mean_interval(samples(sweep, run, task))
        expected = (delta.low, delta.high, delta.p_value, mean.low, mean.high, p_holm)
        columns = ("delta_low", "delta_high", "p_value", "score_low", "score_high", "p_holm")
        assert tuple(float(row[name]) for name in columns) == expected
    mean = statistics.fmean(deltas[task].delta for task in OLD)
    error = math.sqrt(sum(deltas[task].standard_error ** 2 for task in OLD)) / len(OLD)
    columns = ("delta", "standard_error", "delta_low", "delta_high")
    expected = (mean, error, mean - 1.959964 * error, mean + 1.959964 * error)
    assert tuple(float(rows[run, MEAN][name]) for name in columns) == pytest.approx(expected)


def test_settings_table(tables, rows, sweep):
    settings = [
        dict(cells) | {"ranges": [text for name, text in cells if name == "range"]} for cells in tables["Settings"]
    ]
    assert len(settings) == 7
    places = {}
    for row in settings[:-1]:
        new, old = over_seeds(rows, row["setting"], "tofu", "score"), over_seeds(rows, row["setting"], MEAN, "delta")
        places[row["setting"]] = statistics.fmean(new), statistics.fmean(old)
        assert row["seeds"] == "2"
        for text, range_, values in zip(
            (row["tofu, %"], row["old tasks, points"]), row["ranges"], (new, old), strict=True
        ):
            value, low, high = numbers(text)
            assert value == pytest.approx(statistics.fmean(values), abs=0.051)
            assert low < value < high
            assert numbers(range_) == pytest.approx([min(values), max(values)], abs=0.051)
    for row in settings[:-1]:
        new, old = places[row["setting"]]
        is_beaten = any(one >= new and other >= old and (one, other) != (new, old) for one, other in places.values())
        assert (row["not dominated"] == "yes") == (not is_beaten), row["setting"]
    assert numbers(settings[-1]["tofu, %"])[0] == percent(score(sweep, "base", "tofu"))


def test_front_table(tables, rows, sweep):
    """By hand: the settings in order of their score, the pretrained model before them, and straight lines."""
    fronts = {}
    for row in map(dict, tables["Settings"][:-1]):
        new, old = over_seeds(rows, row["setting"], "tofu", "score"), over_seeds(rows, row["setting"], MEAN, "delta")
        points = fronts.setdefault(row["setting"].partition(",")[0], [(100 * score(sweep, "base", "tofu"), 0.0)])
        points.append((statistics.fmean(new), statistics.fmean(old)))
    for points in fronts.values():
        points.sort()
        assert all(one[1] > other[1] for one, other in pairwise(points)), "the helper's settings do not beat each other"
    found = {}
    table = tables["Change of the old tasks, points, at equal tofu"]
    assert [dict(cells)["method"] for cells in table] == ["SFT", "FINCH", "DFT"]
    for row in map(dict, table):
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


def test_old_tasks_table(tables, rows):
    assert len(tables["Old tasks by setting"]) == 6
    for row in map(dict, tables["Old tasks by setting"]):
        for task in (*OLD, MEAN):
            value, low, high = numbers(row[task if task == MEAN else f"{task}, points"])
            expected = statistics.fmean(over_seeds(rows, row["setting"], task, "delta"))
            assert value == pytest.approx(expected, abs=0.051)
            assert low < value < high


def test_changes_tables(tables, rows):
    assert len(tables["Changes by run"]) == 12
    starred = 0
    for row in map(dict, tables["Changes by run"]):
        run = run_of(row["run"], row["seed"])
        for task in ("tofu", *OLD):
            text = row[f"{task}, points"]
            assert numbers(text)[0] == percent(rows[run, task]["delta"])
            assert text.endswith("*") == (float(rows[run, task]["p_holm"]) < 0.05)
            starred += text.endswith("*")
        assert numbers(row[MEAN])[0] == percent(rows[run, MEAN]["delta"])
    assert 0 < starred < 60
    assert len(tables["Every change, with its tests"]) == 12 * 8
    for row in map(dict, tables["Every change, with its tests"]):
        known = rows[run_of(row["run"], row["seed"]), row["task"]]
        for column, key in (("pretrained", "base_score"), ("tuned", "score"), ("change", "delta")):
            assert numbers(row[column])[0] == percent(known[key])
        assert numbers(row["SE"])[0] == pytest.approx(100 * float(known["standard_error"]), abs=0.0051)
        assert numbers(row["p"])[0] == pytest.approx(max(float(known["p_value"]), 0.001), abs=0.00051)
        assert row["test"] == known["test"]


def test_tasks_table(tables, rows):
    found = {row["task"]: row for row in map(dict, tables["Tasks"])}
    assert found.keys() == SUITES.keys()
    for task, row in found.items():
        independent = 45 if task == "halueval" else int(row["documents"])
        assert numbers(row["half-width"])[0] == pytest.approx(100 * 1.96 * 0.5 / math.sqrt(independent), abs=0.051)
        assert numbers(row["pretrained"])[0] == percent(rows["sft-3e-05-0", task]["base_score"])


def test_reliability_table(tables, rows, sweep):
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
            assert value == percent(score(sweep, model, task))
            if model != "base":
                assert change[0] == percent(rows[model, task]["delta"])
        bins = defaultdict(list)
        for one in samples(sweep, model, "confidence"):
            if one["is_parsed"]:
                bins[(one["confidence"] - 1) // 10].append(one["confidence"] / 100 - (one["letter"] == one["answer"]))
        error = sum(abs(sum(gaps)) for gaps in bins.values()) / sum(map(len, bins.values()))
        assert numbers(row["ECE"])[0] == percent(error)


def test_summary_names_no_difference_with_0_inside(report, tables):
    text = (report / "report.md").read_text()
    [heading] = [line for line in text.splitlines() if line.startswith("At an equal ")]
    at = f"at {re.search(r'equal ([0-9.]+%)', heading).group(1)}"
    lines = text.partition(heading)[2].partition("##")[0]
    rows = list(map(dict, tables["Difference from SFT, points"]))
    assert 2 * sum(bool(numbers(row[at])) for row in rows) >= len(rows)
    for row in rows:
        method, cell = row["method"], numbers(row[at])
        if not cell:
            assert f"- {method} does not reach this score." in lines
        elif cell[1] <= 0 <= cell[2]:
            assert f"- {method}: no difference can be shown." in lines
        else:
            clause = re.search(rf"{method} forgets (\w+), by ({NUMBER}) points \[({NUMBER}), ({NUMBER})\]", lines)
            assert clause.group(1) == ("less" if cell[0] > 0 else "more")
            expected = [abs(cell[0]), *sorted(map(abs, cell[1:]))]
            assert [float(one) for one in clause.groups()[1:]] == pytest.approx(expected)
