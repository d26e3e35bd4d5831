"""Settings and their bootstrap, against plain loops."""

import numpy as np
import pytest
from helpers.evaluated_runs import make_base, make_run

from finch.evaluation.statistics import mean_interval
from finch.report.measures import compare
from finch.report.runs import read_runs
from finch.report.settings import _stretch, group_settings, trade_off


@pytest.fixture(scope="module")
def comparison(sweep):
    return compare(read_runs([sweep]))


def test_group_settings_by_all_but_the_seed(comparison):
    settings = group_settings(comparison)
    assert len(settings) == 6
    for setting in settings:
        assert {comparison.runs[number].seed for number in setting.runs} == {0, 1}
        assert len({comparison.runs[number].learning_rate for number in setting.runs}) == 1


def test_runs_of_one_seed_are_settings_of_their_own(tmp_path):
    runs = [make_run(tmp_path / name, "sft", 1e-5, base=None) for name in ("one", "two")]
    settings = group_settings(compare(read_runs(runs)))
    assert [setting.values["folder"] for setting in settings] == ["one", "two"]


def test_replayed_seeds_are_seeds(tmp_path):
    import json

    for seed in (0, 1):
        run = make_run(tmp_path / str(seed), "sft", 1e-5, seed, base=None)
        values = {"method": "lr_replay", "seed": seed, "lr_scheduler.log": {"cell": {"method": "finch", "seed": seed}}}
        (run / "cell.json").write_text(json.dumps({"values": values}))
    assert len(group_settings(compare(read_runs([tmp_path])))) == 1


def test_points_are_means_over_seeds(comparison):
    settings = group_settings(comparison)
    for point in trade_off(comparison, settings).points:
        outcomes = [comparison.outcomes[number] for number in point.setting.runs]
        assert point.new.value == pytest.approx(100 * np.mean([one["tofu"].score.value for one in outcomes]))
        tasks = ("hellaswag", "winogrande", "mmlu", "ifeval")
        assert point.old.value == pytest.approx(
            100 * np.mean([one[task].delta.value for one in outcomes for task in tasks])
        )


def test_bootstrap_equals_a_plain_one(comparison):
    """Documents and seeds drawn in loops: the same standard errors and percentiles, within the noise of the draws."""
    settings = group_settings(comparison)
    points = trade_off(comparison, settings)
    point = points.points[0]
    runs = [comparison.outcomes[number] for number in point.setting.runs]
    rng = np.random.default_rng(1)
    tasks = ("hellaswag", "winogrande", "mmlu", "ifeval")
    scores = {
        task: [np.array([one["score"] for one in run[task].samples]) for run in runs] for task in ("tofu", *tasks)
    }
    base = {task: np.array([one["score"] for one in runs[0][task].base_samples]) for task in tasks}
    new, old = [], []
    for _ in range(6000):
        drawn = {task: rng.integers(90, size=90) for task in scores}
        score = [values[drawn["tofu"]].mean() for values in scores["tofu"]]
        change = [np.mean([(scores[task][run] - base[task])[drawn[task]].mean() for task in tasks]) for run in range(2)]
        seeds = rng.integers(2, size=2)
        for values, draws in ((score, new), (change, old)):
            mean = np.mean(values)
            draws.append(mean + 2**0.5 * (np.mean([values[seed] for seed in seeds]) - mean))
    for estimate, draws in ((point.new, new), (point.old, old)):
        expected = 100 * np.array(draws)
        assert estimate.standard_error == pytest.approx(expected.std(), rel=0.08)
        assert (estimate.low, estimate.high) == pytest.approx(
            np.quantile(expected, (0.025, 0.975)), abs=0.2 * expected.std()
        )


def test_pretrained_model_is_a_point(comparison, sweep):
    base = trade_off(comparison, group_settings(comparison)).base
    mean = mean_interval(comparison.outcomes[0]["tofu"].base_samples)
    assert base.old.value == 0
    assert base.new.value == pytest.approx(100 * mean.mean)
    assert base.new.standard_error == pytest.approx(100 * mean.standard_error, rel=0.08)


def test_losses_of_probes_are_turned_so_that_more_is_better(tmp_path):
    run = make_run(tmp_path / "one", "sft", 1e-4, base=None)
    comparison = compare(read_runs([run]))
    points = trade_off(comparison, group_settings(comparison))
    [point] = points.points
    assert point.old.value == pytest.approx(-comparison.outcomes[0]["stories"].delta.value)
    assert point.new.value == pytest.approx(100 * comparison.outcomes[0]["facts"].score.value)
    assert point.old.low is None
    assert not points.has_intervals


def test_runs_that_lack_a_task_are_left_out(tmp_path):
    make_base(tmp_path / "base", n=20)
    runs = [
        make_run(tmp_path / "one", "sft", 1e-5, n=20),
        make_run(tmp_path / "two", "finch", 1e-5, n=20, suites=["knowledge"]),
    ]
    comparison = compare(read_runs(runs))
    points = trade_off(comparison, group_settings(comparison)).points
    assert [point.setting.method for point in points] == ["sft"]


def test_variance_of_few_seeds_is_not_too_small():
    """Draws of a mean of k values have on average the variance s^2 / k, with s the sample's standard deviation."""
    for k in (2, 3, 5):
        values = np.random.default_rng(k).normal(size=k)
        counts = np.random.default_rng(0).multinomial(k, np.full(k, 1 / k), size=20_000) / k
        assert (_stretch(counts) @ values).var() == pytest.approx(values.var(ddof=1) / k, rel=0.03)


def test_probes_have_intervals_from_five_seeds_on(tmp_path):
    for seed in range(5):
        make_run(tmp_path / f"{seed}", "sft", 1e-4, seed, base=None)
        comparison = compare(read_runs([tmp_path / str(one) for one in range(seed + 1)]))
        assert trade_off(comparison, group_settings(comparison)).has_intervals == (seed == 4)
