"""The study's comparisons on sweeps whose fronts are known lines, and their independent check."""

import csv
import json

import pytest

from finch.evaluation.results import SuiteResult, TaskResult, write_result
from studies.smollm2_tofu.analyse import analyse, probe_rows
from studies.smollm2_tofu.check import check_comparisons, check_probes, check_selection

BASE_SCORE = 20  # percent of the new task
DOCUMENTS = 400
LINES = {  # KL per point of score above the pretrained model's, and the scores of the settings
    "sft": (0.01, (40, 60, 80)),
    "finch": (0.005, (50, 70, 90)),
    "kl": (0.02, (92, 95)),  # begins where sft and finch end
}
TASKS = {  # suite, role, is_higher_better, score at (percent of the new task, KL)
    "tofu": ("knowledge", "new", True, lambda score, kl: score / 100),
    "hellaswag": ("forgetting", "old", True, lambda score, kl: 0.6 - kl / 2),
    **dict.fromkeys(
        ("train", "paraphrases", "held_out"),
        ("losses", "new", False, lambda score, kl: 3 - (score - BASE_SCORE) / 40),
    ),
    "own_answers": ("losses", "old", False, lambda score, kl: 1 + 2 * kl),
    "own_answers_kl": ("losses", "old", False, lambda score, kl: kl),
}


def make_samples(task, mean, method_number):
    """Documents with this mean: right or wrong ones, or losses a tenth above or below it, other ones for each method."""
    samples = []
    for number in range(DOCUMENTS):
        if task in ("tofu", "hellaswag"):
            score = float(number < round(mean * DOCUMENTS))
        else:
            score = mean * (1 + 0.1 * (-1) ** (number >> method_number))
        samples.append({"doc_id": number, "doc_hash": str(number), "score": score})
    return samples


def write_suites(folder, base, score, kl, method_number=0):
    """
    Args:
        base: relative path of the folder of the pretrained model's results; None: these are they.
    """
    for suite, home in (("knowledge", "base-0123"), ("forgetting", "base-0123"), ("losses", "base_losses")):
        tasks, samples = {}, {}
        for name, (_, role, is_more, value) in (item for item in TASKS.items() if item[1][0] == suite):
            samples[name] = make_samples(name, value(score, kl), method_number)
            mean = sum(sample["score"] for sample in samples[name]) / DOCUMENTS
            metric, unit = ("acc", "points") if is_more else ("loss", "nats")
            place = (mean, DOCUMENTS, f"{suite}.{name}.jsonl")
            tasks[name] = TaskResult(role, metric, name, *place, is_higher_better=is_more, unit=unit)
        path = f"{base}/{home}/{suite}.json" if base else None
        result = SuiteResult(suite, "model", "0" * 64, base is None, path, {}, {}, tasks)
        write_result(folder if base else folder / home, result, samples)


def make_sweep(sweep, lines=LINES):
    """Two seeds per setting, on either side of a point of its line."""
    write_suites(sweep, None, BASE_SCORE, 0.0)
    for method_number, (method, (slope, scores)) in enumerate(lines.items()):
        for number, score in enumerate(scores):
            kl = max(slope * (score - BASE_SCORE), 0.01)
            for seed, side in enumerate((1, -1)):
                cell = sweep / f"{method}_{number}_{seed}"
                write_suites(cell / "evaluation", "../..", score + side, kl * (1 + 0.1 * side), method_number)
                values = {"method": method, "optimizer.lr": 1e-5 * 2**number, "seed": seed}
                content = {"values": values, "task": "knowledge", "source": None, "status": "evaluated"}
                (cell / "cell.json").write_text(json.dumps(content))


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    make_sweep(folder / "smooth")
    analyse(folder, folder / "results")
    return folder


@pytest.fixture(scope="module")
def comparisons(study):
    return {(line["new"], line["measure"]): line for line in read(study / "results" / "comparisons.csv")}


def numbers(line, *keys):
    return [float(line[key]) for key in keys]


@pytest.mark.parametrize(
    ("new", "measure", "scores", "difference"),
    [
        # At 50 to 80 percent, 45 points above the pretrained model on average
        ("tofu", "own_answers_kl", (50, 80), 45 * (0.005 - 0.01)),
        ("tofu", "own_answers", (50, 80), 2 * 45 * (0.005 - 0.01)),
        ("tofu", "hellaswag", (50, 80), 100 / 2 * 45 * (0.005 - 0.01)),
        ("train", "own_answers_kl", (1.5, 2.25), 45 * (0.005 - 0.01)),
    ],
)
def test_differences_of_known_lines(comparisons, new, measure, scores, difference):
    line = comparisons[new, measure]
    assert (line["setting"], line["one"], line["other"]) == ("smooth", "finch", "sft")
    assert (line["runs_of_one"], line["runs_of_other"]) == ("6", "6")
    assert numbers(line, "lowest_score", "highest_score") == list(scores)
    value, low, high = numbers(line, "difference", "difference_low", "difference_high")
    assert value == pytest.approx(difference, abs=6e-5)
    assert low < value < high
    if measure == "own_answers_kl":
        for name in ("ratio", "five_ratio"):
            ratio, low, high = numbers(line, name, f"{name}_low", f"{name}_high")
            assert ratio == 0.5
            assert low < 0.5 < high < 1
        ends = "ratio_at_lowest", "ratio_at_highest", "ratio_without_a_rate_low", "ratio_without_a_rate_high"
        assert numbers(line, *ends) == [0.5] * 4
    elif measure == "hellaswag":  # quotients of points of accuracy are not given
        assert line["ratio"] == line["ratio_at_highest"] == line["ratio_without_a_rate_low"] == ""


def test_no_pair_without_common_scores(study, comparisons):
    assert len(comparisons) == len(read(study / "results" / "comparisons.csv")) == 4  # of finch and sft, none of kl
    assert sum(line["method"] == "kl" for line in read(study / "results" / "results.csv")) == 4


def test_one_setting_gives_no_pair(tmp_path):
    make_sweep(tmp_path / "quick", {"finch": (0.005, (50,))})
    analyse(tmp_path, tmp_path / "results")
    assert read(tmp_path / "results" / "comparisons.csv") == []
    assert len(read(tmp_path / "results" / "results.csv")) == 2


def test_results_have_every_run(study):
    lines = read(study / "results" / "results.csv")
    assert len(lines) == 16
    keys = ("method", "seed", "optimizer.lr")
    [line] = [line for line in lines if [line[key] for key in keys] == ["finch", "0", "2e-05"]]
    assert numbers(line, "tofu", "own_answers_kl", "own_answers", "train") == [0.71, 0.275, 1.55, 1.725]


def test_scores_and_figure(study, comparisons):
    [line] = [
        one
        for one in read(study / "results" / "comparisons.csv")
        if (one["new"], one["measure"]) == ("train", "own_answers_kl")
    ]
    assert [line[key] for key in ("lowest_score", "highest_score", "runs_of_one", "ratio")] == [
        "1.50",
        "2.25",
        "6",
        "0.5000",
    ]
    assert {path.name for path in (study / "results").glob("front*")} == {"front_smooth.svg", "front_smooth.png"}


def test_range_begins_where_settings_have_learned_something(tmp_path):
    make_sweep(tmp_path / "blocks", {"sft": (0.01, (10, 40, 60)), "finch": (0.005, (15, 50, 60))})
    analyse(tmp_path, tmp_path / "results")
    line = read(tmp_path / "results" / "comparisons.csv")[0]
    assert (line["lowest_score"], line["ratio"]) == ("50.00", "0.5000")
    assert "nan" not in (tmp_path / "results" / "comparisons.csv").read_text()
    assert check_comparisons(tmp_path, tmp_path / "results") > 0  # finds the same numbers


def test_selection_takes_each_methods_best_rate(study):
    lines = {(one["selected_by"], one["method"]): one for one in read(study / "results" / "selection.csv")}
    assert len(lines) == 9
    sft, finch = lines["tofu", "sft"], lines["tofu", "finch"]
    assert [finch[key] for key in ("optimizer.lr", "share_of_draws", "score")] == ["4e-05", "4e-05 100.0%", "90.0000"]
    assert numbers(sft, "own_answers_kl", "hellaswag", "hellaswag_drawn") == pytest.approx([0.6, -30, -30], abs=0.1)
    assert numbers(finch, "own_answers_kl", "score_minus_sft") == [0.35, 10.0]
    value, low, high = numbers(finch, "kl_over_sft", "kl_over_sft_low", "kl_over_sft_high")
    assert value == pytest.approx(0.35 / 0.6, abs=0.01)
    assert low < value < high
    assert float(lines["paraphrases", "finch"]["score_minus_sft"]) == -0.25  # a loss: FINCH's is lower
    assert check_selection(study, study / "results") == 9


@pytest.mark.parametrize("factor", [1.1, float("nan")])
@pytest.mark.parametrize(
    "column",
    ["ratio", "five_ratio_low", "difference_high", "ratio_at_highest", "ratio_without_a_rate_low", "highest_score"],
)
def test_check_finds_a_changed_number(study, tmp_path, column, factor):
    lines = read(study / "results" / "comparisons.csv")
    changed = next(line for line in lines if line["ratio"])
    changed[column] = str(float(changed[column]) * factor)
    with (tmp_path / "comparisons.csv").open("w") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    with pytest.raises(SystemExit, match=f"finch / sft: {column} is"):
        check_comparisons(study, tmp_path)


def test_check_compares_probes_with_samples(tmp_path):
    run = tmp_path / "smooth" / "sft"
    (run / "evaluation").mkdir(parents=True)
    rows = [{"nats": 2.0 * number, "tokens": number} for number in range(1, 17)]
    rows.append({"nats": 900.0, "tokens": 1})  # the probe has 16 rows
    (run / "evaluation" / "losses.stories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [{"step": 0, "probe/stories/loss": 3.0}, {"step": 60, "probe/stories/loss": 2.0}, {"step": 60, "loss": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check_probes(tmp_path) == (1, 0)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 60, "probe/stories/loss": 2.001}) + "\n")
    with pytest.raises(SystemExit, match=r"a story loss differs by 5\.0e-04"):
        check_probes(tmp_path)


def test_probe_rows_are_the_last_probes_of_finished_runs(tmp_path):
    values = {"method": "sft", "dtype": "bf16", "optimizer.lr": 1e-3}
    for seed, status in enumerate(("finished", "waiting")):
        run = tmp_path / f"sft_{seed}"
        run.mkdir()
        (run / "cell.json").write_text(json.dumps({"values": {**values, "seed": seed}, "status": status}))
        lines = []
        for step, accuracy, loss in ((0, 0.1, 1.5), (1, 0.4, 1.75), (2, 0.7, 2.25)):
            lines += [{"step": step, "loss": 1.0, "lr": 1e-3}] if step else []
            lines.append({"step": step, "probe/paraphrases/accuracy": accuracy, "probe/stories/loss": loss})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = probe_rows(tmp_path)
    assert (row["dtype"], row["seed"], row["accuracy"], row["stories_rise"]) == ("bf16", 0, "0.7000", "0.7500")
