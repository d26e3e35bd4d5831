"""The rules of benchmarks.methods on made-up results: learning rates, stages, reruns, table."""

import json

import pytest

from benchmarks.methods import sweep
from benchmarks.methods.report import STYLES, make_table, pareto_front, write_report
from benchmarks.methods.results import (
    GRID,
    METHODS,
    PRETRAINED,
    Results,
    Row,
    Run,
    choose_rates,
    choose_small_rate,
    select_table_rows,
    stages,
)
from finch.config.parser import read
from finch.config.schema import FULL_FINETUNE
from finch.errors import UserError


def row(method, rate, seed, *, validation=2.0, accuracy=0.5, story=2.0):
    return Row(method, rate, seed, 2, validation, accuracy, accuracy, 0.25, story, 40.0)


@pytest.fixture
def results(tmp_path):
    """Seed 0 of SFT and FINCH. SFT's lowest validation loss is at 1e-3; the story loss stays within 2% of 1.5 up to 1e-4."""
    results = Results(tmp_path / "results.csv")
    results.add(
        [
            Row(PRETRAINED, 0.0, 0, None, None, 0.1, 0.1, 0.2, 1.5, 0.0),
            row("sft", 1e-5, 0, validation=4.0, accuracy=0.11, story=1.5),
            row("sft", 3e-5, 0, validation=1.0, accuracy=0.1, story=1.51),  # outside SFT's grid, only for small_lr
            row("sft", 1e-4, 0, validation=3.0, accuracy=0.2, story=1.5299),
            row("sft", 3e-4, 0, validation=2.5, accuracy=0.4, story=1.54),
            row("sft", 1e-3, 0, validation=2.2, accuracy=0.6, story=2.5),
            row("sft", 3e-3, 0, validation=2.4, accuracy=0.7, story=3.5),
            row("wise_ft", 1e-3, 0, validation=None, accuracy=0.5, story=1.8),
            row("finch", 1e-4, 0, validation=2.1, accuracy=0.35, story=1.7),
            row("finch", 3e-4, 0, validation=2.3, accuracy=0.45, story=2.0),
        ]
    )
    return results


def test_choose_rates_takes_seed_0s_lowest_validation_loss(results):
    results.add([row("finch", 3e-4, 1, validation=0.1)])
    assert choose_rates(results) == {"sft": 1e-3, "finch": 1e-4}


def test_choose_small_rate_takes_the_largest_within_2_percent(results):
    assert choose_small_rate(results) == 1e-4
    results.add([row("sft", rate, 0, story=1.6) for rate in (1e-5, 3e-5, 1e-4)])
    assert choose_small_rate(results) == 1e-5


def test_stages_ask_for_the_runs_that_follow(results, tmp_path):
    base, grid, seeds, replays = (stage(results) for stage in stages(METHODS))
    assert base == [Run(PRETRAINED, 0.0, 0)]
    assert len(grid) == len(set(grid)) == sum(map(len, GRID.values())) + 2
    assert {run.seed for run in grid} == {0}
    assert {(run.method, run.learning_rate) for run in seeds} == {("sft", 1e-3), ("finch", 1e-4), ("sft", 1e-4)}
    assert sorted(run.seed for run in seeds) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [run.replayed() for run in replays] == [Run("finch", 1e-4, seed) for seed in (1, 2, 0)]
    assert all(run.method == "talr" for stage in stages(["talr"])[1:] for run in stage(results))
    assert stages(["lr_replay"])[3](Results(tmp_path / "none.csv")) == []


def test_results_round_trip_through_the_file(results, tmp_path):
    reloaded = Results(tmp_path / "results.csv")
    assert reloaded.rows == results.rows
    assert reloaded.select(PRETRAINED)[0].validation_loss is None
    reloaded.add([row("sft", 1e-3, 0, accuracy=0.9)])
    assert len(Results(tmp_path / "results.csv").rows) == len(results.rows)
    assert Results(tmp_path / "results.csv").rows[Run("sft", 1e-3, 0)].accuracy == 0.9


class Pool:
    """Runs immediately, in this process; methods in ``failing`` fail."""

    def __init__(self, failing=()):
        self.submitted, self.failing = [], failing

    def submit(self, _, run):
        from concurrent.futures import Future

        self.submitted.append(run)
        future = Future()
        if run.method in self.failing:
            future.set_exception(RuntimeError("no room"))
        else:
            future.set_result([row(run.method, run.learning_rate, run.seed)])
        return future


def test_sweep_repeats_failed_runs_and_no_others(tmp_path, monkeypatch, capsys):
    (tmp_path / "tofu").mkdir()
    (tmp_path / "tofu" / "full.jsonl").write_text("\n".join(json.dumps({"question": str(n)}) for n in range(4000)))
    arguments = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--only", "dft", "stm"]
    pools = [Pool(failing=["stm"]), Pool(), Pool()]
    remaining = iter(pools)

    class Executor:
        def __init__(self, *_):
            self.pool = next(remaining)

        def __enter__(self):
            return self.pool

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(sweep, "ProcessPoolExecutor", Executor)
    with pytest.raises(SystemExit):
        sweep.main(arguments)
    assert "4 runs failed, the first with: Run(method='stm'" in capsys.readouterr().err
    sweep.main(arguments)
    sweep.main(arguments)
    assert [len(pool.submitted) for pool in pools] == [1 + 8 + 2, 4 + 2, 0]
    assert {run.method for run in pools[1].submitted} == {"stm"}
    held_out = json.loads((tmp_path / "out" / "held_out.json").read_text())
    trained = [json.loads(line)["question"] for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert (len(held_out), len(trained)) == (40, 360)
    assert {int(question) - 3600 for question in trained} == set(range(400)) - set(held_out)
    monkeypatch.setattr(sweep, "EPOCHS", 7)
    with pytest.raises(UserError, match="results of runs with other settings"):
        sweep.check_settings(tmp_path / "out")


def test_table_has_means_and_deviations_over_seeds(results):
    results.add([row("sft", 1e-3, 1, accuracy=0.62, story=2.6), row("sft", 1e-3, 2, accuracy=0.64, story=2.7)])
    lines = make_table(results).splitlines()
    assert lines[2] == "| pretrained | | 10.0 | 1.500 | | |"
    assert lines[3] == "| SFT | 0.001 | 62.0 ± 2.0 | 2.600 ± 0.100 | +1.100 | 2.067 ± 0.115 |"
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| FINCH", "| SFT, small lr", "| WiSE-FT"]
    assert lines[5].startswith("| SFT, small lr | 0.0001 | 20.0 | 1.530 |")
    assert len(select_table_rows(results)["sft"]) == 3


def test_pareto_front_holds_what_nothing_beats(results):
    rows = list(results.rows.values())
    best = pareto_front(rows)
    beaten = [
        one
        for one in rows
        if any(
            (other.accuracy >= one.accuracy and other.story_loss < one.story_loss)
            or (other.accuracy > one.accuracy and other.story_loss <= one.story_loss)
            for other in rows
        )
    ]
    assert {one.run for one in best} == {one.run for one in rows} - {one.run for one in beaten}


def test_write_report_writes_table_and_figure(results, tmp_path):
    write_report(tmp_path, results)
    assert (tmp_path / "front.png").stat().st_size > 10_000
    assert len((tmp_path / "front.csv").read_text().splitlines()) == 1 + len(results.rows)
    assert set(STYLES) == set(METHODS)


@pytest.mark.parametrize("method", ["sft", "finch", "flow", "dft", "talr", "stm", "lr_replay"])
def test_overrides_pass_the_recipes_config_checks(tmp_path, method):
    line = sweep.overrides(Run(method, 3e-4, 1), tmp_path / "data", tmp_path / "out")
    cfg = read(["--config", "stories260k/tofu_sft", *line], FULL_FINETUNE)
    assert (cfg.optimizer.lr, cfg.seed, cfg.epochs) == (3e-4, 1, sweep.EPOCHS)
    assert cfg.lr_scheduler.get("eta_max", "auto") == "auto"
    assert cfg.lr_scheduler.get("log", "finch_lr0.0003_seed2").endswith("finch_lr0.0003_seed2")
