"""The study's published numbers: those of its runs, and the same on every page."""

import csv
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from finch.objectives.divergence import STUDY as SCALE
from finch.study.report.front import compare_pair, seed_points
from finch.study.report.paper import paper_results
from finch.study.sweep.grid import cells_of as grid_cells
from finch.study.sweep.grid import read_grid
from studies.smollm2_tofu.check import PRIMARY, check_comparisons, check_probes, check_runs, check_selection
from studies.smollm2_tofu.shares import ENDS, fronts, shares, table

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "smollm2_tofu"
RESULTS = STUDY / "results"
NAMES = {  # of the pages' tables
    "FINCH": "finch",
    "SFT": "sft",
    "constant": "constant",
    "constant rate": "constant",
    "FINCH's mean rate": "mean_rate",
    "linear ramp": "linear_ramp",
    "FINCH's curve of another seed": "replayed_curve",
    "FINCH, cap 5e-5": "finch_cap_5e-5",
    "WiSE-FT": "wise_ft",
    "WiSE-FT of SFT": "wise_ft",
    "KL penalty": "kl",
    "SFT with KL penalty": "kl",
}
RATIO = re.compile(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]")


@pytest.mark.slow
def test_numbers_are_those_of_the_runs(tmp_path):
    for name in ("runs", "replay_runs", "breadth_runs", "equations_runs"):
        with tarfile.open(RESULTS / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
    for cell in tmp_path.glob("*/*/cell.json"):
        metrics, method = cell.with_name("metrics.jsonl"), json.loads(cell.read_text())["values"]["method"]
        assert not metrics.exists() or ("replay_kl" in metrics.read_text()) == ("self_replay" in method), cell
    assert check_comparisons(tmp_path, RESULTS) == 74
    assert check_selection(tmp_path, RESULTS) == 22
    assert check_runs(tmp_path, RESULTS) == 203
    assert check_probes(tmp_path)[0] == 123
    assert shares(tmp_path) == read_csv(RESULTS / "shares.csv")
    assert fronts(tmp_path) == read_csv(RESULTS / "fronts.csv")
    assert f"54 runs, R2 {fit_of_doses(tmp_path / 'smooth'):.3f}" in (ROOT / "docs" / "choose.md").read_text()
    for sweep in ("replay", "breadth", "equations"):  # what is published can be run again
        cells = [comparable(cell.values) for cell in grid_cells(read_grid(str(STUDY / f"GRID_{sweep}.yaml")))]
        for cell in (tmp_path / sweep).glob("*/cell.json"):
            assert comparable(json.loads(cell.read_text())["values"]) in cells, cell


def comparable(values):
    """A cell's, with the prompts by their file's name."""
    return {key: Path(value).name if key == "self_replay.prompts" else value for key, value in values.items()}


def fit_of_doses(sweep):
    """How well a line through log(KL at the end) over log(sum of rate x sqrt(loss)) fits the runs of cosine, FINCH and constant rates."""
    doses, forgotten = [], []
    for cell in sweep.glob("*/cell.json"):
        values = json.loads(cell.read_text())["values"]
        if values.get("label", values["method"]) in ("sft", "finch", "constant"):
            lines = map(json.loads, cell.with_name("metrics.jsonl").read_text().splitlines())
            doses.append(sum(line["lr"] * line["loss"] ** 0.5 for line in lines if {"lr", "loss"} <= line.keys()))
            scores = (cell.parent / "evaluation" / f"losses.{PRIMARY}.jsonl").read_text().splitlines()
            forgotten.append(np.mean([json.loads(line)["score"] for line in scores]))
    assert len(doses) == 54
    return np.corrcoef(np.log(doses), np.log(forgotten))[0, 1] ** 2


def ratio(line, name="ratio"):
    return "{:.2f} [{:.2f}, {:.2f}]".format(*(float(line[f"{name}{end}"]) for end in ("", "_low", "_high")))


def cells_of(line, new):
    """What the study's table has of a comparison, at equal six-way accuracy (tofu) or training loss (train)."""
    without = "{:.2f} to {:.2f}".format(*(float(line[f"ratio_without_a_rate_{end}"]) for end in ("low", "high")))
    if new == "tofu":
        scores = "{:.0f} to {:.0f}".format(*(float(line[f"{end}_score"]) for end in ("lowest", "highest")))
        return [ratio(line, "five_ratio"), ratio(line), without, scores]
    return [
        ratio(line),
        without,
        "{:.2f}, {:.2f}".format(*(float(line[f"ratio_at_{end}"]) for end in ("highest", "lowest"))),
    ]


@pytest.mark.parametrize(("page", "num_ratios"), [(STUDY / "README.md", 25), (ROOT / "docs" / "methods.md", 13)])
def test_ratios_of_a_page_are_those_of_the_comparisons(page, num_ratios):
    lines = list(csv.DictReader((RESULTS / "comparisons.csv").open(encoding="utf-8")))
    known = {(one["setting"], one["new"], one["one"], one["other"]): one for one in lines if one["measure"] == PRIMARY}
    found = 0
    for row in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        pair, _, setting = cells[0].removesuffix(" (one seed)").partition(", in ")
        one, _, other = pair.partition(" / ")
        if one not in NAMES or other not in NAMES:
            continue
        middle = 5 if page.name == "README.md" else 2
        for new, those in (("tofu", cells[1:middle]), ("train", cells[middle:])):
            if RATIO.fullmatch(those[0]):
                expected = cells_of(known[setting or "smooth", new, NAMES[one], NAMES[other]], new)
                assert those == (expected if middle == 5 else [expected[new == "tofu"]])
                found += 1
    assert found == num_ratios


def test_selection_of_the_page_is_that_of_the_runs():
    lines = list(csv.DictReader((RESULTS / "selection.csv").open(encoding="utf-8")))
    text = (STUDY / "README.md").read_text(encoding="utf-8")
    for line in lines:
        if (line["setting"], line["selected_by"]) == ("smooth", "tofu"):
            name = next(name for name, method in NAMES.items() if method == line["method"])
            rate = f"{float(line['optimizer.lr']):.0e}".replace("e-0", "e-")
            numbers = "{:.1f} | {:.2f} | {:+.1f}".format(*(float(line[key]) for key in ("score", PRIMARY, "hellaswag")))
            assert f"| {name} | {rate} | {numbers} |" in text
            if paper := paper_results("knowledge", "qwen3_4b").get(line["method"]):
                its = "{task:.1f} | {hellaswag:+.1f} | {avg_delta:+.1f}".format(**paper)
                assert re.search(rf"\| {name} \|.* {re.escape(its)} \|\n", text)
    [finch] = [
        one
        for one in lines
        if [one[key] for key in ("setting", "selected_by", "method")] == ["smooth", "tofu", "finch"]
    ]
    assert f"FINCH forgets {float(finch['kl_over_sft']):.2f} times as much as SFT" in text
    assert "{:.2f} to {:.2f})".format(*(float(finch[f"kl_over_sft_{end}"]) for end in ("low", "high"))) in text


def read_csv(path):
    return list(csv.DictReader(path.open(encoding="utf-8")))


def with_ends(values, places=2):
    return "{:.{p}f} [{:.{p}f}, {:.{p}f}]".format(*map(float, values), p=places)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/choose.md", "docs/limits.md", "docs/methods.md", "studies/long_runs/README.md"]
)
def test_every_ratio_of_a_page_is_of_a_study(page):
    known = set()
    for line in read_csv(RESULTS / "comparisons.csv"):
        known |= {ratio(line, name) for name in ("ratio", "five_ratio") if line[name]}
    for line in read_csv(ROOT / "studies/long_runs/results/comparisons.csv"):
        known.add(with_ends(line[key] for key in ("ratio", "smallest", "largest")))
    known |= {ratio(line, "kl_share") for line in read_csv(RESULTS / "shares.csv")}
    known |= {ratio(line) for line in read_csv(RESULTS / "fronts.csv")}
    text = (ROOT / page).read_text(encoding="utf-8")
    pattern = r"(\d\.\d\d)(?: times[^.;\[\]]*|\s)(\[\d\.\d\d, \d\.\d\d\])"
    found = {" ".join(each) for each in re.findall(pattern, text)}
    assert found <= known
    assert bool(found) == (page != "docs/limits.md")


def test_numbers_of_the_readme_are_those_of_their_lines():
    """Each is the number of what its sentence names."""
    best, at = "answers_1024_rows_16", "0.0002"
    shared = {(line["setting"], line["optimizer.lr"]): line for line in read_csv(RESULTS / "shares.csv")}
    word, equations = shared[f"breadth: {best}, 1", at], shared[f"equations: {best}", at]
    pairs = {
        (one["setting"], one["new"], one["one"]): one for one in primary("comparisons.csv") if one["other"] == "sft"
    }
    equal = {one["setting"]: ratio(one) for one in read_csv(RESULTS / "fronts.csv") if one["new"] == "tofu"}
    keys = ("learned", "forgotten", "one", "other")
    longer = {
        line["runs"]: [f"{float(line[key]):.2f}" for key in ("ratio", "smallest", "largest")]
        for line in read_csv(ROOT / "studies/long_runs/results/comparisons.csv")
        if tuple(line[key] for key in keys) == ("train", "own_kl", "finch", "sft")
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for form, *values in (
        (
            "FINCH {}, a constant rate {}, averages of SFT {} |",
            *(ratio(pairs["smooth", "train", one]) for one in ("finch", "constant", "wise_ft")),
        ),
        ("at equal accuracy {}, which holds 1 |", ratio(pairs["smooth", "tofu", "finch"])),
        ("FINCH forgets {} times as much as cosine after 300 steps [{}, {}]", *longer["300"]),
        (", {} after 1,125 [{}, {}] |", *longer["1125"]),
        ("{} of cosine SFT's at equal training loss,", ratio(word, "kl_share")),
        ("accuracy {} points lower [{}, {}];", *(f"{float(word[f'points_below{end}']):.1f}" for end in ENDS)),
        ("; at equal accuracy {}, averaged {};", *(equal[f"breadth: {kind}{best}, 1"] for kind in ("", "average_of_"))),
        ("on chemical equations (two seeds) {} |", ratio(equations, "kl_share")),
        ("held-out equations are answered {:.2f} nats worse", float(equations["other_answers_above"])),
    ):
        assert form.format(*values) in text, form.format(*values)
    assert equations["runs"] == "2"
    others = ("smooth", "breadth: average", "replay: wise_ft")
    number = sum(int(line["runs"]) for (setting, _), line in shared.items() if not setting.startswith(others))
    assert f"| {number} runs, two tasks," in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


def primary(name):
    return [line for line in read_csv(RESULTS / name) if line["measure"] == PRIMARY]


def means(name, *keys):
    """Of each method, by rising rate, the means over seeds of a table of the results."""
    runs = {}
    for row in read_csv(RESULTS / name):
        if row.get("setting", "smooth") == "smooth" and all(row[key] for key in keys):
            rates = runs.setdefault(row["method"], {})
            rates.setdefault(float(row["optimizer.lr"]), []).append([float(row[key]) for key in keys])
    return {method: {rate: np.mean(rates[rate], axis=0) for rate in sorted(rates)} for method, rates in runs.items()}


def settings_of(archive, keys=("train", PRIMARY, "stories", "paraphrases", "tofu")):
    """Of each arm, strength and rate of an archive the means of the scores of its runs that have all of ``keys``, and the number of runs."""
    values, scores, runs = {}, {}, {}
    with tarfile.open(RESULTS / archive) as members:
        for member in members:
            path = Path(member.name)
            if path.name == "cell.json":
                values[path.parent] = json.load(members.extractfile(member))["values"]
            elif path.parent.name == "evaluation" and path.suffix == ".json":
                tasks = json.load(members.extractfile(member))["tasks"]
                scores.setdefault(path.parents[1], {}).update(
                    {key: tasks[key]["score"] for key in keys if key in tasks}
                )
    for cell, each in values.items():
        arm = f"{each.get('label', each['method'])}, {each.get('self_replay.strength', 0.3):g}"
        if scores[cell].keys() >= {*keys}:
            runs.setdefault((arm, f"{each['optimizer.lr']:g}"), []).append([scores[cell][key] for key in keys])
    return {key: (np.mean(found, axis=0), len(found)) for key, found in runs.items()}


def test_shares_are_those_of_the_runs():
    """Read again from the archives' means, at cosine SFT's training loss."""
    sft = means("results.csv", "train", PRIMARY, "stories", "paraphrases", "tofu")["sft"].values()
    known = settings_of("replay_runs.tar.xz") | settings_of("breadth_runs.tar.xz")
    lines = read_csv(RESULTS / "shares.csv")
    check_lines([line for line in lines if line["setting"].startswith(("replay", "breadth"))], known, sft)
    known = {
        (arm.partition(",")[0], rate): each
        for (arm, rate), each in settings_of(
            "equations_runs.tar.xz", ("train", PRIMARY, "stories", "held_out", "tofu")
        ).items()
    }
    sft = [known.pop(key)[0] for key in list(known) if key[0] == "sft"]
    check_lines([line for line in lines if line["setting"].startswith("equations")], known, sft)
    assert table(lines) in (STUDY / "README.md").read_text(encoding="utf-8")


def test_rise_of_the_right_endings():
    text = " ".join((STUDY / "README.md").read_text(encoding="utf-8").split())
    known = {}
    for archive in ("replay_runs.tar.xz", "breadth_runs.tar.xz"):
        known |= settings_of(archive, ("train", "endings"))
    start = 3.006026  # the pretrained model's
    (sft_loss, sft), number = known["sft, 0.3", "0.0004"]
    (_, best), _ = known["answers_1024_rows_16, 1", "0.0002"]
    assert number == 1
    assert (
        f"rise by {best - start:.3f} nats, those of cosine SFT at 4e-4 (one run, training loss {sft_loss:.3f}) by {sft - start:.3f}: "
        f"{(best - start) / (sft - start):.2f} of it"
    ) in text


def check_lines(lines, known, sft):
    """``known``: the means of each arm and rate; ``sft``: cosine SFT's, a rate after the other."""
    sft = np.array(sorted(sft, key=lambda each: each[0])).T
    stories = 2.32396  # the pretrained model's
    for line in lines:
        one, number = known.pop((line["setting"].partition(": ")[2], line["optimizer.lr"]))
        kl = np.exp(np.interp(one[0], sft[0], np.log(sft[1])))
        rise, paraphrases, accuracy = (np.interp(one[0], sft[0], each) for each in sft[2:])
        expected = {
            "runs": number,
            "training_loss": one[0],
            "kl": one[1],
            "kl_share": one[1] / kl,
            "stories_share": (one[2] - stories) / (rise - stories),
            "other_answers_above": one[3] - paraphrases,
            "points_below": 100 * (accuracy - one[4]),
        }
        if line["stories_share"] == "nan":  # SFT's stories may not have risen
            assert line["setting"].startswith("equations")
            expected["stories_share"] = np.nan
        assert {key: float(line[key]) for key in expected} == pytest.approx(expected, abs=2e-3, nan_ok=True)
    assert not known


def test_ratios_on_stories260k_are_those_of_its_runs():
    rows = read_csv(RESULTS / "replay_stories260k.csv")

    def front(arms, x, y, alphas):
        settings = {}
        for row in rows:
            if row["method"] in arms and row["alpha"] in alphas:
                point = -float(row[x]), -float(row[y])
                settings.setdefault((row["method"], row["optimizer.lr"], row["alpha"]), []).append(point)
        return seed_points(arms[0], list(settings.values()))

    [start] = seed_points("pretrained", [[(-10.0, 0.0)] * 3])  # a loss above all that are compared

    def ratio_of(arms, others, x, y, alphas=("1",)):
        pair = compare_pair(front(arms, x, y, alphas), front(others, x, y, alphas), start)
        assert not pair.is_guess
        return (pair.mean.ratio.value, *pair.ratios_without_one)

    text = " ".join((STUDY / "README.md").read_text(encoding="utf-8").split())
    readings = (("training_loss", "own_kl"), ("paraphrases_loss", "own_kl"), ("paraphrases_loss", "stories_rise"))
    for name, arm in (
        ("FINCH", "finch"),
        ("constant rate", "constant"),
        ("self_replay, strength 0.3", "replay_0.3"),
        ("the same, of a file of 64 instructions", "replay_file"),
    ):
        numbers = (f"{ratio_of((arm,), ('sft',), *each)[0]:.2f}" for each in readings)
        assert f"| {name} | {' | '.join(numbers)} |" in text
    others = ("sft", "finch", "constant", "kl_0.1")
    averages = ratio_of(("replay_0.3",), others, "training_loss", "own_kl", ("1", "0.5"))
    assert "{:.2f} ({:.2f} to {:.2f} without any one rate)".format(*averages) in text


def fronts_ratio(name, one, other):
    """The mean ratio of the stories' rise at five equal accuracies, and the single ones."""
    fronts = []
    for points in (means(name, "accuracy", "stories_rise")[method].values() for method in (one, other)):
        kept = [p for p in points if not any(q[0] >= p[0] and q[1] < p[1] for q in points)]
        fronts.append(np.array(sorted(map(tuple, kept))).T)
    at = np.linspace(max(x[0] for x, _ in fronts), min(x[-1] for x, _ in fronts), 5)
    single = np.divide(*(np.interp(at, *front) for front in fronts))
    return float(np.exp(np.log(single).mean())), single.min(), single.max()


def test_numbers_in_the_text_are_those_of_the_tables():
    text = " ".join((STUDY / "README.md").read_text(encoding="utf-8").split())

    def has(form, *values):
        assert form.format(*values) in text, form.format(*values)

    kl = {
        method: {rate: float(one[0]) for rate, one in rates.items()}
        for method, rates in means("results.csv", PRIMARY).items()
    }
    schedules = {method: list(kl[method].values()) for method in ("sft", "finch", "constant")}
    factors = [max(each) / min(each) for each in schedules.values()]
    has("by a factor of {:.0f} to {:.0f}", min(factors), max(factors))
    growth = [
        each[-1] / kl[method][rate] for (method, each), rate in zip(schedules.items(), (2e-4, 1e-4, 1e-4), strict=True)
    ]
    has("grows {:.1f} to {:.1f} times", min(growth), max(growth))

    rises = [
        (float(row["last_lr"]) / float(row["first_lr"]), float(row["optimizer.lr"]))
        for row in read_csv(RESULTS / "results.csv")
        if (row["setting"], row["method"]) == ("smooth", "finch")
    ]
    has(
        "rises {:.1f} to {:.1f} times in these 60 steps, at eta_base up to 5e-5 at most {:.1f}",
        min(rises)[0],
        max(rises)[0],
        max(rise for rise, rate in rises if rate <= 5e-5),
    )

    lines = {
        tuple(one[key] for key in ("new", "measure", "one", "other")): one
        for one in read_csv(RESULTS / "comparisons.csv")
        if one["setting"] == "smooth"
    }
    wise = [lines["train", PRIMARY, "wise_ft", other] for other in ("sft", "finch", "constant")]
    ends = [float(line["ratio_at_highest"]) for line in wise]
    has("it is {:.2f} of SFT, and none against FINCH ({:.2f}) and a constant rate ({:.2f})", *ends)
    has("lowest loss that it reaches, {:.2f},", float(wise[0]["lowest_score"]))
    has("{:.2f} times FINCH's rise", float(lines["train", "stories", "wise_ft", "finch"]["ratio_at_highest"]))
    difference = [
        -float(lines["tofu", "hellaswag", "finch", "sft"][f"difference{end}"]) for end in ("", "_high", "_low")
    ]
    has("HellaSwag differs by {:.1f} points [{:.2f}, {:.1f}]", *difference)

    chosen = {(one["setting"], one["selected_by"], one["method"]): one for one in read_csv(RESULTS / "selection.csv")}
    for by, form in (
        ("paraphrases", "FINCH is {:.3f} nats worse [{:.3f}, {:.3f}]"),
        ("held_out", "rows it is {:.3f} [{:.3f}, {:.3f}]"),
    ):
        has(form, *(float(chosen["smooth", by, "finch"][f"score_minus_sft{end}"]) for end in ("", "_low", "_high")))

    pairs = [fronts_ratio("precision.csv", f"{method}_bf16", method) for method in ("sft", "finch")]
    has(
        "single ratios of bf16 to fp32 go from {:.2f} to {:.2f}",
        min(one[1] for one in pairs),
        max(one[2] for one in pairs),
    )
    points = {}
    for line in read_csv(RESULTS / "precision_smollm2.csv"):
        name = "finch" if line["method"] == "finch" else line["dtype"]
        points.setdefault(name, {})[float(line["optimizer.lr"])] = line
    loss, kl, paraphrases, rate = (
        {dtype: np.array([float(line[column]) for line in lines.values()]) for dtype, lines in points.items()}
        for column in ("train", "own_answers_kl", "paraphrases", "optimizer.lr")
    )
    dtypes = ("bf16", "fp32", "bf16_mixed", "bf16_stochastic")
    losses, kls = ([column[dtype][rate[dtype] == 2e-4].item() for dtype in dtypes] for column in (loss, kl))
    has("at {:.2f} nats on the learned rows, next to {:.2f} in fp32, {:.2f} in bf16_mixed and {:.2f} with", *losses)
    has("whose KL are {:.3f}, {:.3f} and {:.3f}.", *kls[1:])
    unmoved = [float(points[dtype][2e-4]["unmoved"]) for dtype in ("bf16", "bf16_mixed", "bf16_stochastic")]
    has("{:.0%} of its weights equal the pretrained ones in bf16, of these two's {:.0%} and {:.0%}.", *unmoved)
    falling = {dtype: -np.log(column) for dtype, column in loss.items()}  # losses fall with the rate
    needed = np.exp(np.interp(falling["fp32"][3], falling["bf16"], np.log(rate["bf16"])))
    has("{:.1f} times the rate reaches fp32's loss", needed / 2e-4)
    equal = np.exp(np.interp(falling["bf16"], falling["fp32"], np.log(kl["fp32"])))
    has("is {:.2f}, {:.2f} and {:.2f} times fp32's at 2e-4, 4e-4 and 8e-4, and {:.2f} times at", *(kl["bf16"] / equal))
    gains = np.interp(np.log(kl["bf16"]), np.log(kl["fp32"]), paraphrases["fp32"]) - paraphrases["bf16"]
    has("is lower by {:.2f}, {:.2f} and {:.2f} nats at the first three", *gains[:3])
    equal = np.exp(np.interp(falling["finch"], falling["bf16"], np.log(kl["bf16"])))[1:]  # SFT learns more at any rate
    has("is at {:.2f} and {:.2f} at the training losses of FINCH's 2e-4 and 4e-4", *(kl["finch"][1:] / equal))
    has("at 1e-4 it hardly learns ({:.2f} nats)", loss["finch"][0])
    page = (RESULTS.parents[2] / "docs/precision.md").read_text(encoding="utf-8")
    for name, dtype, at in (*((each, each, 2e-4) for each in dtypes), ("bf16 at 8e-4", "bf16", 8e-4)):
        line = points[dtype][at]
        shown = f"{name:<16}{float(line['train']):14.2f}{float(line['own_answers_kl']):20.3f}"
        assert shown + (f"   {float(line['unmoved']):.0%}" if line["unmoved"] else "\n") in page

    names = (("finch", "constant"), ("finch_ema_0", "finch"), ("finch_ema_0", "constant"))
    ratios = [fronts_ratio("blocks_stories260k.csv", *pair) for pair in names]
    has("{:.2f} times the constant rate's (single ratios {:.2f} to {:.2f})", *ratios[0])
    has("{:.2f} times FINCH's ({:.2f} to {:.2f}) and {:.2f} times the constant rate's", *ratios[1], ratios[2][0])


def test_the_scale_of_a_runs_last_lines_is_the_studys():
    with (RESULTS / "results.csv").open() as file:
        runs = [run for run in csv.DictReader(file) if (run["setting"], run["method"]) == ("smooth", "sft")]
    rates = {float(run["optimizer.lr"]) for run in runs}
    means = {
        rate: np.mean([float(run["own_answers_kl"]) for run in runs if float(run["optimizer.lr"]) == rate])
        for rate in rates
    }
    assert means == pytest.approx(SCALE, abs=0.005)
