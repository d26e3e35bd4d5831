"""The study's grids: their cells as README.md has them, and configs that the recipe accepts."""

import csv
from collections import Counter
from pathlib import Path

import pytest
from helpers.grids import arm

from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys
from finch.study.sweep.grid import RUN, cells_of, read_grid

STUDY = Path("studies/smollm2_tofu")
BREADTH = ("answers_1024", "rows_8", "rows_16", "skills", "skills_rows_16", "answers_1024_rows_16_decayed")
REPLAYED = (*BREADTH, "answers_1024_rows_16", "replay_0.1", "replay_0.3", "replay_file")
THREE = {"sft": 12, "finch": 12, "constant": 12}
CELLS = {
    "GRID.yaml": {
        **dict.fromkeys(("sft", "wise_ft", "finch", "constant"), 18),
        **dict.fromkeys(("replayed_curve", "linear_ramp", "mean_rate"), 12),
        **dict.fromkeys(("finch_cap_5e-5", "kl"), 4),
    },
    "GRID_blocks.yaml": THREE,
    "GRID_blocks_stories260k.yaml": {**THREE, "finch_ema_0": 12},
    "GRID_wrong.yaml": THREE,
    "GRID_replay.yaml": {
        **dict.fromkeys(("self_replay", "finch+self_replay", "wise_ft+self_replay", "wise_ft+finch+self_replay"), 6),
        **dict.fromkeys(("sft", "wise_ft"), 3),
    },
    "GRID_breadth.yaml": {
        f"{kind}{name}": number
        for name, number in {**dict.fromkeys(BREADTH, 2), "answers_1024_rows_16": 3, "cosine": 1}.items()
        for kind in ("", "average_of_")
    }
    | {"answers_1024_rows_16": 10, "average_of_answers_1024_rows_16": 10, "rows_16": 4, "average_of_rows_16": 4}
    | {"finch_answers_1024_rows_16": 2, "cosine_answers_1024_rows_16": 9},
    "GRID_equations.yaml": {
        "sft": 12,
        "self_replay": 6,
        "answers_1024_rows_16": 6,
        "cosine": 12,
        "cosine_answers_1024_rows_16": 6,
    },
    "GRID_replay_stories260k.yaml": dict.fromkeys(("sft", "finch", "constant", "kl_0.1", *REPLAYED[-3:]), 9),
    "GRID_quick.yaml": {"sft": 2, "wise_ft": 2, "finch": 1},
}
PRECISION, PRECISION_SMOLLM2 = "GRID_precision.yaml", "GRID_precision_smollm2.yaml"


def test_every_grid_is_listed():
    assert {path.name for path in STUDY.glob("GRID*.yaml")} == {*CELLS, PRECISION, PRECISION_SMOLLM2}


def seeds_of(name):
    """Seeds by arm and learning rate."""
    seeds = {}
    for cell in cells_of(read_grid(str(STUDY / name))):
        seeds.setdefault((arm(cell), cell.values["optimizer.lr"]), []).append(cell.values["seed"])
    return seeds


@pytest.mark.parametrize("name", CELLS)
def test_numbers_of_cells_and_seeds(name):
    cells = cells_of(read_grid(str(STUDY / name)))
    assert Counter(map(arm, cells)) == CELLS[name]
    assert len({cell.folder for cell in cells}) == len(cells)
    for (method, _), seeds in seeds_of(name).items():
        is_reference = name == "GRID_replay.yaml" and method in ("sft", "wise_ft")
        has_one = is_reference or name in ("GRID_quick.yaml", "GRID_breadth.yaml") or method in ("finch_cap_5e-5", "kl")
        has_one &= method.removeprefix("average_of_").removeprefix("cosine_") not in ("answers_1024_rows_16", "rows_16")
        assert sorted(set(seeds)) == ([0] if has_one else [0, 1, 2])


def test_precision_has_four_rates_of_three_seeds():
    complete = Counter(method for (method, _), seeds in seeds_of(PRECISION).items() if sorted(seeds) == [0, 1, 2])
    arms = [f"{method}{dtype}" for method in ("sft", "finch") for dtype in ("", "_bf16", "_bf16_stochastic")]
    assert complete == dict.fromkeys(arms, 4)  # there may be other cells


def test_stored_precisions_are_the_grids():
    with (STUDY / "results/precision_smollm2.csv").open() as file:
        stored = [
            (line["method"], line["dtype"], float(line["optimizer.lr"]))
            for line in csv.DictReader(file)
            if line["dtype"] != "fp32"
        ]
    cells = cells_of(read_grid(str(STUDY / PRECISION_SMOLLM2)))
    assert stored == [tuple(cell.values[key] for key in ("method", "dtype", "optimizer.lr")) for cell in cells]


def test_controls_follow_finch_of_another_seed():
    cells = {cell.folder: cell for cell in cells_of(read_grid(str(STUDY / "GRID.yaml")))}
    shapes = {"replayed_curve": "curve", "linear_ramp": "linear", "mean_rate": "mean"}
    controls = [cell for cell in cells.values() if arm(cell) in shapes]
    for cell in controls:
        source = cells[cell.source]
        assert "label" not in source.values
        assert source.values["method"] == "finch"
        assert source.values["optimizer.lr"] == cell.values["optimizer.lr"]
        assert source.values["seed"] != cell.values["seed"]
        assert cell.values["lr_scheduler.shape"] == shapes[arm(cell)]
    for name in shapes:  # each seed's curve is used once per rate
        assert len({cell.source for cell in controls if arm(cell) == name}) == 12


def test_wise_ft_averages_sft_of_its_rate_and_seed():
    cells = {cell.folder: cell for cell in cells_of(read_grid(str(STUDY / "GRID.yaml")))}
    for cell in cells.values():
        if arm(cell) == "wise_ft":
            assert cells[cell.source].values == {**cell.values, "method": "sft"}


@pytest.mark.parametrize("name", [*CELLS, PRECISION])
def test_configs_of_all_arms_are_accepted(name, tmp_path):
    grid = read_grid(str(STUDY / name), [f"model_dir={tmp_path}", f"data={tmp_path}"], str(tmp_path))
    one_of_each = {arm(cell): cell for cell in cells_of(grid) if cell.kind == RUN}
    for method, cell in one_of_each.items():
        cfg = read(["--config", grid.config, *grid.overrides, *cell.overrides()], FullFinetuneKeys)
        found = (cfg.output_dir, cfg.optimizer.lr, cfg.seed, cfg.dtype)
        values = cell.values
        assert found == (str(cell.folder), values["optimizer.lr"], values["seed"], values.get("dtype", "fp32"))
        assert cfg.dataset.data_files.startswith(f"{tmp_path}/train")
        schedule = cfg.get("lr_scheduler")
        has_replay = method in (*REPLAYED, "cosine") or method.endswith(("self_replay", "rows_16"))
        is_constant = method in ("constant", "self_replay", "kl_0.1", *REPLAYED) and not method.endswith("decayed")
        assert (schedule is None) == is_constant
        assert (cfg.self_replay is not None) == has_replay
        assert schedule == {"decay": 0.33} or not method.endswith("decayed")
        if method.startswith("finch"):
            assert cfg.lr_scheduler._component_ == "finch.FinchLR"


def test_blocks_are_read_in_their_order(tmp_path):
    grid = read_grid(str(STUDY / "GRID_blocks.yaml"), [f"model_dir={tmp_path}", f"data={tmp_path}"])
    for seed, cell in enumerate(cells_of(grid)[:3]):
        cfg = read(["--config", grid.config, *grid.overrides, *cell.overrides()], FullFinetuneKeys)
        assert (cell.values["seed"], cfg.shuffle, cfg.epochs) == (seed, False, 1)
        assert cfg.dataset.data_files == f"{tmp_path}/train_blocks_{seed}.jsonl"
