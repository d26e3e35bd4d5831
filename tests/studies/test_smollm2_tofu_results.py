"""The study's published numbers: those of its runs, and the same on every page."""

import csv
import re
import tarfile
from pathlib import Path

import pytest

from studies.smollm2_tofu.check import check_comparisons, check_probes

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
    assert check_comparisons(tmp_path, RESULTS) == 53
    assert check_probes(tmp_path)[0] == 72


@pytest.mark.parametrize(("page", "num_ratios"), [(STUDY / "README.md", 23), (ROOT / "docs" / "methods.md", 13)])
def test_ratios_of_a_page_are_those_of_the_comparisons(page, num_ratios):
    lines = list(csv.DictReader((RESULTS / "comparisons.csv").open(encoding="utf-8")))
    known = {
        (line["setting"], line["new"], line["one"], line["other"]): "{:.2f} [{:.2f}, {:.2f}]".format(
            *(float(line[key]) for key in ("ratio", "ratio_low", "ratio_high"))
        )
        for line in lines
        if line["ratio"]
    }
    found = 0
    for row in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        pair, _, setting = cells[0].removesuffix(" (one seed)").partition(", in ")
        one, _, other = pair.partition(" / ")
        if one not in NAMES or other not in NAMES:
            continue
        for new, cell in (("tofu", cells[1]), ("train", cells[-1])):
            if RATIO.fullmatch(cell):
                assert cell == known[setting or "smooth", new, NAMES[one], NAMES[other]]
                found += 1
    assert found == num_ratios
