"""Settings and their bootstrap against plain loops; the front at equal score against cases worked out by hand."""

import numpy as np
import pytest
from helpers.evaluated_runs import make_base, make_run

from finch.evaluation.statistics import mean_interval
from finch.study.report.front import (
    Point,
    Setting,
    TradeOff,
    _correct_bootstrap_variance,
    common_scores,
    compare_fronts,
    compare_pair,
    group_settings,
    interpolate,
    non_dominated,
    seed_points,
    trade_off,
)
from finch.study.report.measures import Estimate, compare
from finch.study.report.runs import read_runs


def trade_off_of(*folders):
    comparison = compare(read_runs(folders))
    return comparison, trade_off(comparison, group_settings(comparison))


def test_runs_of_one_seed_are_separate_settings(tmp_path):
    runs = [make_run(tmp_path / name, "sft", 1e-5, base=None) for name in ("one", "two")]
    settings = group_settings(compare(read_runs(runs)))
    assert [setting.values["folder"] for setting in settings] == ["one", "two"]


def test_runs_that_train_otherwise_are_separate_settings(tmp_path):
    """Also of other seeds; rows of a seed may be its own."""
    rows = {"dataset": {"_component_": "finch.data.rows.rows_dataset", "data_files": "rows_1.jsonl"}}
    runs = [
        make_run(tmp_path / "a", "sft", 1e-5, 0, base=None),
        make_run(tmp_path / "b", "sft", 1e-5, 1, base=None, config=rows),
    ]
    runs += [make_run(tmp_path / "c", "sft", 1e-5, 1, base=None, config={"epochs": 20, "dtype": "bf16"})]
    settings = group_settings(compare(read_runs(runs)))
    assert [
        (list(setting.runs), setting.values.get("epochs"), setting.values.get("dtype")) for setting in settings
    ] == [
        ([0, 1], 2, "fp32"),
        ([2], 20, "bf16"),
    ]


@pytest.mark.parametrize("key", ["model.lora_rank", "tokenizer.prompt_template"])
def test_models_and_tokenizers_of_other_settings_are_not_averaged(key, tmp_path):
    block, _, name = key.partition(".")
    for seed in (0, 1, 2):  # seed 2 is of other folders than seed 1
        content = {"_component_": "x", name: min(seed, 1), **({"path": f"{seed}"} if block == "tokenizer" else {})}
        make_run(tmp_path / str(seed), "sft", 1e-5, seed, base=None, config={block: content})
    settings = group_settings(compare(read_runs([tmp_path / str(seed) for seed in (0, 1, 2)])))
    assert [(setting.values[key], list(setting.runs)) for setting in settings] == [(0, [0]), (1, [1, 2])]


def test_settings_of_a_method_say_what_they_train_by(tmp_path):
    """Also where their values differ; not what all values name."""
    make_run(tmp_path / "a", "sft", 1e-5, base=None, config={"lr_scheduler": None})
    make_run(tmp_path / "b", "sft", 3e-5, base=None)
    schedules = ({"_component_": "finch.FinchLR", "eta_max": eta_max} for eta_max in (1e-4, 2e-4))
    for name, schedule in zip("cd", schedules, strict=True):
        cell = {"lr_scheduler.eta_max": schedule["eta_max"]}
        make_run(tmp_path / name, "finch", 1e-5, base=None, cell=cell, config={"lr_scheduler": schedule})
    settings = group_settings(compare(read_runs([tmp_path / name for name in "abcd"])))
    keys = [{key: setting.values.get(key) for key in setting.values if "lr_scheduler" in key} for setting in settings]
    assert keys == [
        {"lr_scheduler": None},
        {"lr_scheduler": "finch.cosine.cosine_with_warmup"},
        *({"lr_scheduler.eta_max": eta_max} for eta_max in (1e-4, 2e-4)),
    ]


def test_replayed_seeds_are_seeds(tmp_path):
    for seed in (0, 1):
        cell = {"method": "lr_replay", "lr_scheduler.log": {"cell": {"method": "finch", "seed": seed}}}
        make_run(tmp_path / str(seed), "sft", 1e-5, seed, base=None, cell=cell)
    assert len(group_settings(compare(read_runs([tmp_path])))) == 1


def test_bootstrap_equals_a_plain_one(sweep):
    """Documents and seeds drawn in loops: the same standard errors and percentiles, within the noise of the draws."""
    comparison, points = trade_off_of(sweep)
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
        ends = np.quantile(expected, (0.025, 0.975))
        assert estimate.ends == pytest.approx(ends, abs=0.2 * expected.std())
    pretrained = mean_interval(comparison.outcomes[0]["tofu"].base_samples)
    assert points.base.new.standard_error == pytest.approx(100 * pretrained.standard_error, rel=0.08)
    assert points.base.old.value == 0


def test_losses_of_probes_are_turned_so_that_more_is_better(tmp_path):
    comparison, points = trade_off_of(make_run(tmp_path / "one", "sft", 1e-4, base=None))
    [point] = points.points
    assert point.old.value == pytest.approx(-comparison.outcomes[0]["stories"].delta.value)
    assert point.new.value == pytest.approx(100 * comparison.outcomes[0]["facts"].score.value)
    assert point.old.low is None


def test_runs_that_lack_a_task_are_left_out(tmp_path):
    make_base(tmp_path / "base", n=20)
    one = make_run(tmp_path / "one", "sft", 1e-5, n=20)
    two = make_run(tmp_path / "two", "finch", 1e-5, n=20, suites=["knowledge"])
    [point] = trade_off_of(one, two)[1].points
    assert point.setting.method == "sft"


def test_variance_of_few_seeds_is_not_too_small():
    """Draws of a mean of k values have on average the variance s^2 / k, with s the sample's standard deviation."""
    for k in (2, 3, 5):
        values = np.random.default_rng(k).normal(size=k)
        counts = np.random.default_rng(0).multinomial(k, np.full(k, 1 / k), size=20_000) / k
        assert (_correct_bootstrap_variance(counts) @ values).var() == pytest.approx(values.var(ddof=1) / k, rel=0.03)


def test_probes_have_intervals_from_five_seeds_on(tmp_path):
    for seed in range(5):
        make_run(tmp_path / f"{seed}", "sft", 1e-4, seed, base=None)
        points = trade_off_of(*(tmp_path / str(one) for one in range(seed + 1)))[1]
        assert points.has_intervals == (seed == 4)


def point(method, new, old, draws=None):
    """``draws``: (new, old) of each draw; without them the values are fixed."""
    drawn = np.array(draws if draws is not None else [(new, old)] * 4, dtype=float)
    return Point(Setting(method, {}, [0]), Estimate(new), Estimate(old), drawn[:, 0], drawn[:, 1])


BASE = point("pretrained", 20.0, 0.0)


def test_non_dominated():
    #      kept        beaten by 2  kept       beaten by 2  same as 2
    new = [10.0, 20.0, 30.0, 30.0, 30.0]
    old = [-1.0, -4.0, -3.0, -5.0, -3.0]
    assert non_dominated(new, old) == [0, 2]


def test_interpolate_between_neighbours():
    new, old = [40.0, 60.0, 80.0, 70.0], [-2.0, -4.0, -12.0, -20.0]
    found = interpolate(new, old, [50.0, 65.0, 40.0, 30.0, 80.0])
    # 65 is a quarter of the way from 60 to 80: 70 is dominated.
    assert found == pytest.approx([-3.0, -6.0, -2.0, -2.0, -12.0])
    assert np.isnan(interpolate(new, old, [80.1])).all()


def test_equal_scores_are_equal_whatever_their_last_bits():
    new, old = [0.1, 0.1 + 0.2, 0.3], [-9.0, -2.0, -1.0]
    assert new[1] != new[2]
    for scores in (new, [0.1, new[2], new[1]]):
        assert non_dominated(scores, old) == [2]
        assert interpolate(scores, old, [max(new[1:])]) == -1.0


def test_common_scores_are_reached_by_two_methods():
    points = {
        "a": [point("a", 40.0, -1), point("a", 90.0, -9)],
        "b": [point("b", 50.0, -1), point("b", 70.07, -3)],
        "c": [point("c", 20.0, -1)],
    }
    assert common_scores(points, 0.1) == [40.0, 47.5, 55.0, 62.6, 70.07]
    assert common_scores({"a": points["a"]}, 0.1) == []
    assert common_scores({"a": points["a"], "c": points["c"]}, 0.1) == [20.0]


def test_common_scores_start_where_fronts_do():
    """Not at settings that have learned less than nothing: the pretrained model has the score without forgetting."""
    base = point("pretrained", 60.0, 0)
    points = {"a": [point("a", 40.0, -9), point("a", 62.0, -1), point("a", 90.0, -2)]}
    points["b"] = [point("b", 20.0, -9), point("b", 70.0, -1), point("b", 80.0, -2)]
    assert common_scores(points, 0.1, base) == [70.0, 72.5, 75.0, 77.5, 80.0]
    points["b"] = [point("b", 20.0, -9), point("b", 55.0, -5)]  # all beaten by the pretrained model
    assert common_scores(points, 0.1, base) == [55.0]


def fronts(*points, base=BASE, has_intervals=False):
    order = dict.fromkeys(one.setting.method for one in points)
    return compare_fronts(TradeOff(points, base, has_intervals), resolution=0.1, order=list(order))


def test_compare_fronts_by_hand():
    finch = point("finch", 60.0, -3.0), point("finch", 70.0, -5.0)
    front = fronts(point("sft", 40.0, -4.0), point("sft", 80.0, -20.0), *finch)
    assert front.scores == [60.0, 62.5, 65.0, 67.5, 70.0]
    assert [value.change.value for value in front.methods["sft"]] == pytest.approx([-12.0, -13.0, -14.0, -15.0, -16.0])
    assert [value.change.value for value in front.methods["finch"]] == pytest.approx([-3.0, -3.5, -4.0, -4.5, -5.0])
    assert [value.difference.value for value in front.methods["finch"]] == pytest.approx([9.0, 9.5, 10.0, 10.5, 11.0])
    assert front.highest == {"sft": 80.0, "finch": 70.0}
    assert list(front.pairs) == ["finch"]
    assert front.pairs["finch"].highest.ratio.value == pytest.approx(5 / 16)
    assert not any(value.is_extrapolated for values in front.methods.values() for value in values)


@pytest.mark.parametrize(
    ("points", "score", "change", "is_extrapolated"),
    [
        ([point("a", 40.0, -1), point("a", 90.0, -9), point("b", 55.08, -5)], 55.08, -5, False),  # the setting's own
        ([point("a", 40.0, -4), point("b", 60.0, -3)], 40.0, -1.5, True),  # half of the way from the pretrained model
        ([point("a", 30.0, -1), point("b", 60.0, 2)], 30.0, 2, False),  # it beats the pretrained model
    ],
)
def test_method_of_one_setting_has_a_value_below_it(points, score, change, is_extrapolated):
    front = fronts(*points)
    assert front.scores == [score]
    [value] = front.methods["b"]
    assert value.change.value == pytest.approx(change, abs=0.02)
    assert value.is_extrapolated == is_extrapolated


def test_method_that_does_not_reach_a_score_has_no_value():
    points = [point("a", 40.0, -1), point("a", 90.0, -9), point("b", 90.0, -2), point("c", 80.0, -1)]
    front = fronts(*points, base=None)
    assert front.scores[-1] == 90.0
    assert (front.methods["c"][-1].change, front.methods["c"][-1].difference) == (None, None)
    assert front.methods["b"][-1].difference.value == pytest.approx(7.0)


def test_interval_of_a_difference_is_paired():
    """Both methods move together from draw to draw: each is uncertain, their difference is not."""
    shifts = np.linspace(-3, 3, 200)
    one, other = (
        point(name, 50.0, old, [(50.0, old + shift) for shift in shifts]) for name, old in (("a", -8), ("b", -2))
    )
    [value] = fronts(one, other, base=None, has_intervals=True).methods["b"]
    assert (value.change.low, value.change.high) == pytest.approx((-4.85, 0.85), abs=0.02)
    assert value.difference.value == pytest.approx(6.0)
    assert value.difference.low in (None, pytest.approx(6.0))


def test_pair_by_hand():
    """Lines from (20, 0): the one forgets 1 per 10 points up to 60 and 2 per 10 from there, the other 2 per 10 everywhere."""
    one = [point("a", 40.0, -2), point("a", 60.0, -4), point("a", 80.0, -8)]
    other = [point("b", 50.0, -6), point("b", 70.0, -10)]
    pair = compare_pair(one, other, BASE, num_scores=3)
    assert pair.scores.tolist() == [50, 60, 70]
    assert pair.mean.difference.value == pytest.approx((3 - 6 + 4 - 8 + 6 - 10) / 3)
    assert pair.mean.ratio.value == pytest.approx((3 / 6 * 4 / 8 * 6 / 10) ** (1 / 3))
    assert (pair.lowest.ratio.value, pair.highest.ratio.value) == pytest.approx((0.5, 0.6))
    assert not pair.is_guess
    # Without 40 the range begins at 60; without 60 the one has 3.5, 5 and 6.5; without 80 it ends at 60; without 50 or 70 one score is common.
    expected = [(4 / 8 * 5 / 9 * 6 / 10) ** (1 / 3), (3.5 / 6 * 5 / 8 * 6.5 / 10) ** (1 / 3), 0.5, 0.6, 0.5]
    assert [reading.ratio.value for reading in pair.without_one] == pytest.approx(expected)
    assert pair.ratios_without_one == pytest.approx((0.5, expected[1]))
    assert len(compare_pair(one, other, BASE).scores) == 101


def test_scores_beyond_a_draws_front_are_left_out():
    """In the second draw the one ends at 60: of 50, 60 and 70 only two count, with other ratios than the third; in the third draw at 40."""
    draws = [(70, -10), (60, -2), (40, -1)]
    one = [point("a", 50.0, -3, [(50, -3), (50, -1), (40, -1)]), point("a", 70.0, -10, draws)]
    other = [point("b", 50.0, -6, [(50, -6)] * 3), point("b", 70.0, -10, [(70, -10)] * 3)]
    base = point("pretrained", 20.0, 0.0, [(20.0, 0.0)] * 3)
    pair = compare_pair(one, other, base, num_scores=3)
    first = np.log(3 / 6) + np.log(6.5 / 8) + np.log(10 / 10)
    assert pair.draws[:2] == pytest.approx([first / 3, (np.log(1 / 6) + np.log(2 / 8)) / 2])
    assert np.isnan(pair.draws[2])
    assert pair.mean.ratio.low > np.exp(pair.draws[:2].min())
    assert pair.mean.ratio.high < np.exp(pair.draws[:2].max())


@pytest.mark.parametrize("old", [0.0, 2.0])
def test_no_ratio_where_nothing_is_forgotten(old):
    one = [point("a", 40.0, old), point("a", 60.0, -4)]
    other = [point("b", 40.0, -2), point("b", 60.0, -4)]
    pair = compare_pair(one, other, BASE)
    assert pair.lowest.ratio is pair.mean.ratio is None
    assert pair.lowest.difference.value == -2 - old
    assert pair.highest.ratio.value == 1


def test_no_ratio_where_a_draw_in_fifty_has_none():
    for bad, has_ratio in ((1, True), (2, False)):
        draws = [(50.0, 0.0)] * bad + [(50.0, -2.0)] * (100 - bad)
        other, base = (point("b", new, old, [(new, old)] * 100) for new, old in ((50.0, -4.0), (20.0, 0.0)))
        pair = compare_pair([point("a", 50.0, -2, draws)], [other], base)
        assert (pair.mean.ratio is not None) == has_ratio


def test_pair_without_a_common_range_is_a_guess():
    pair = compare_pair([point("a", 30.0, -1)], [point("b", 60.0, -8)], BASE)
    assert (pair.is_guess, pair.scores.tolist(), pair.verdict) == (True, [30.0], None)
    assert pair.mean.ratio.value == pytest.approx(1 / 2)  # a quarter of the way to 60 is -2


def test_verdict_needs_the_interval_and_every_rate():
    def seeds(*olds):
        return [[(new, old + shift) for shift in (-0.2, 0.0, 0.2)] for new, old in zip((40, 50, 60), olds, strict=True)]

    base = point("pretrained", 20.0, 0.0, [(20.0, 0.0)] * 3)
    straight, lower = seed_points("b", seeds(-4, -6, -8)), seed_points("a", seeds(-2, -3, -4))
    pair = compare_pair(lower, straight, base)
    assert pair.verdict == -1
    assert compare_pair(straight, lower, base).verdict == 1
    assert compare_pair(straight, straight, base, has_intervals=False).verdict is None
    # Less on average, and in each seed, but only by one setting.
    bent = seed_points("a", seeds(-4.3, -4.5, -8.3))
    pair = compare_pair(bent, straight, base)
    assert pair.mean.ratio.high < 1 < pair.ratios_without_one[1]
    assert pair.verdict == 0


def test_draws_of_seed_points_are_the_seeds():
    one = seed_points("a", [[(-2.0, -0.1), (-2.0, -0.3)], [(-1.0, -0.4), (-1.0, -0.6)]])
    other = seed_points("b", np.array([[(-2.0, -0.2), (-2.0, -0.2)], [(-1.0, -0.4), (-1.0, -0.4)]]))
    base = seed_points("pretrained", [[(-3.0, 0.0), (-3.0, 0.0)]])[0]
    pair = compare_pair(one, other, base, num_scores=2)
    assert pair.mean.ratio.value == pytest.approx((0.2 / 0.2 * 0.5 / 0.4) ** 0.5)
    assert np.exp(pair.draws) == pytest.approx([(0.1 / 0.2 * 0.4 / 0.4) ** 0.5, (0.3 / 0.2 * 0.6 / 0.4) ** 0.5])
