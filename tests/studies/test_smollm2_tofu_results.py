"""The study's published numbers: those of its runs, and the same on every page."""

import csv
import re
import tarfile
from pathlib import Path

import pytest

from studies.smollm2_tofu.check import PRIMARY, check_comparisons, check_probes, check_runs, check_selection

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


def test_numbers_are_those_of_the_runs(tmp_path):
    with tarfile.open(RESULTS / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert check_comparisons(tmp_path, RESULTS) == 74
    assert check_selection(tmp_path, RESULTS) == 22
    assert check_runs(tmp_path, RESULTS) == 203
    assert check_probes(tmp_path)[0] == 72


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
    [finch] = [
        one
        for one in lines
        if [one[key] for key in ("setting", "selected_by", "method")] == ["smooth", "tofu", "finch"]
    ]
    assert f"FINCH forgets {float(finch['kl_over_sft']):.2f} times as much as SFT" in text
    assert "{:.2f} to {:.2f})".format(*(float(finch[f"kl_over_sft_{end}"]) for end in ("low", "high"))) in text
