"""The comparison of studies/self_replay on fronts whose ratio is known."""

import csv
import json

import pytest
from helpers.runs import ROOT

from finch.base.run_files import AVERAGE, CELL, METRICS
from finch.study.report.front import compare_pair, seed_points
from studies.self_replay.run import FAMILIES, analyse, hull


def test_ratio_of_two_fronts(tmp_path, capsys):
    """log KL is linear in the loss, and the same less log 4 with self-replay; an arm of no family counts for nothing."""
    cells = []
    for seed in (0, 1):
        for arm, factor in (("sft", 1.0), ("constant", 1.5), ("replay_0.3", 0.25), ("replay_file", 1e-6)):
            for rate, losses in ((1e-4, (2.0, 3.0)), (2e-4, (1.0, 4.0))):
                cell = tmp_path / f"{arm}_{rate}_{seed}"
                (cell / AVERAGE).mkdir(parents=True)
                values = {"method": "sft", "label": arm, "optimizer.lr": rate, "seed": seed}
                (cell / CELL).write_text(json.dumps({"values": values}))
                points = [[1 - 0.5 * k, loss, factor * 2**-loss] for k, loss in enumerate(losses)]
                (cell / AVERAGE / "front.json").write_text(json.dumps({"points": [[0.0, 9.0, 0.0], *points]}))
                (cell / METRICS).write_text(
                    json.dumps({"step": 1, "probe/own/kl": 1.0, "probe/stories/loss_change": 0.5})
                )
                cells.append(cell)
    analyse(cells, tmp_path / "results")
    found = json.loads((tmp_path / "results" / "comparison.json").read_text())
    assert found["ratio"] == pytest.approx(0.25)
    assert found["by_seed"] == {"0": pytest.approx(0.25), "1": pytest.approx(0.25)}
    rows = list(csv.DictReader((tmp_path / "results" / "points.csv").open()))
    assert len(rows) == 2 * len(cells)
    assert [row["stories_rise"] for row in rows[:2]] == ["0.5", ""]
    assert (tmp_path / "results" / "front.png").read_bytes().startswith(b"\x89PNG")


def test_hull_is_below_all_points():
    assert hull([(0, 4), (1, 1), (2, 3), (3, 0), (1, 5)]) == [(0, 4), (1, 1), (3, 0)]


@pytest.mark.parametrize(("name", "ratio"), [("smollm2", "0.30, 0.25 to 0.36"), ("stories260k", "0.57, 0.53 to 0.60")])
def test_ratio_as_the_other_studies_read_it(name, ratio):
    study = ROOT / "studies" / "self_replay"
    rows = list(csv.DictReader((study / "results" / name / "points.csv").open(encoding="utf-8")))
    fronts = []
    for family, arms in FAMILIES.items():
        settings = {}
        for row in rows:
            if row["arm"] in arms:
                point = -float(row["training_loss"]), -float(row["own_kl"])
                settings.setdefault((row["arm"], row["rate"], row["alpha"]), []).append(point)
        fronts.append(seed_points(family, list(settings.values())))
    num_seeds = len({row["seed"] for row in rows})
    [start] = seed_points("pretrained", [[(-10.0, 0.0)] * num_seeds])  # a loss above all that are compared
    pair = compare_pair(*fronts, start)
    assert not pair.is_guess
    found = (pair.mean.ratio.value, *pair.ratios_without_one)
    assert "{:.2f}, {:.2f} to {:.2f}".format(*found) == ratio
    assert ratio in " ".join((study / "README.md").read_text(encoding="utf-8").split())
