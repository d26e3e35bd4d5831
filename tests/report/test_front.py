"""The front at equal score, against cases worked out by hand."""

import numpy as np
import pytest

from finch.report.front import common_scores, compare_fronts, interpolate, non_dominated
from finch.report.measures import Estimate
from finch.report.settings import Point, Setting, TradeOff


def point(method, new, old, draws=None):
    """``draws``: (new, old) of each draw; without them the values are fixed."""
    drawn = np.array(draws if draws is not None else [(new, old)] * 4, dtype=float)
    setting = None if method is None else Setting(method, {}, [0])
    return Point(setting, Estimate(new), Estimate(old), drawn[:, 0], drawn[:, 1])


def test_non_dominated():
    #      kept        beaten by 2  kept       beaten by 2  same as 2
    new = [10.0, 20.0, 30.0, 30.0, 30.0]
    old = [-1.0, -4.0, -3.0, -5.0, -3.0]
    assert non_dominated(new, old) == [0, 2]


def test_interpolate_between_neighbours():
    new, old = [40.0, 60.0, 80.0, 70.0], [-2.0, -4.0, -12.0, -20.0]
    assert interpolate(new, old, 50.0) == pytest.approx(-3.0)
    assert interpolate(new, old, 65.0) == pytest.approx(-6.0)  # a quarter of the way from 60 to 80: 70 is dominated
    assert interpolate(new, old, 40.0) == pytest.approx(-2.0)
    assert interpolate(new, old, 30.0) == pytest.approx(-2.0)


def test_common_scores_are_reached_by_two_methods():
    points = {
        "a": [point("a", 40.0, -1), point("a", 90.0, -9)],
        "b": [point("b", 50.0, -1), point("b", 70.07, -3)],
        "c": [point("c", 20.0, -1)],
    }
    assert common_scores(points, 0.1) == [40.0, 47.5, 55.0, 62.5, 70.0]
    assert common_scores({"a": points["a"]}, 0.1) == []
    assert common_scores({"a": points["a"], "c": points["c"]}, 0.1) == [20.0]


def test_common_scores_start_where_fronts_do():
    """Not at settings that have learned less than nothing: the pretrained model has the score without forgetting."""
    base = point(None, 60.0, 0)
    points = {"a": [point("a", 40.0, -9), point("a", 62.0, -1), point("a", 90.0, -2)]}
    points["b"] = [point("b", 20.0, -9), point("b", 70.0, -1), point("b", 80.0, -2)]
    assert common_scores(points, 0.1, base) == [70.0, 72.5, 75.0, 77.5, 80.0]
    points["b"] = [point("b", 20.0, -9), point("b", 55.0, -5)]  # all beaten by the pretrained model
    assert common_scores(points, 0.1, base) == [55.0]


def test_compare_fronts_by_hand():
    trade_off = TradeOff(
        points=[
            point("sft", 40.0, -4.0),
            point("sft", 80.0, -20.0),
            point("finch", 60.0, -3.0),
            point("finch", 70.0, -5.0),
        ],
        base=point(None, 20.0, 0.0),
        runs=[],
        has_intervals=False,
    )
    front = compare_fronts(trade_off, resolution=0.1, order=["sft", "finch"])
    assert front.scores == [60.0, 62.5, 65.0, 67.5, 70.0]
    assert [value.change.value for value in front.methods["sft"]] == pytest.approx([-12.0, -13.0, -14.0, -15.0, -16.0])
    assert [value.change.value for value in front.methods["finch"]] == pytest.approx([-3.0, -3.5, -4.0, -4.5, -5.0])
    assert [value.difference.value for value in front.methods["finch"]] == pytest.approx([9.0, 9.5, 10.0, 10.5, 11.0])
    assert front.highest == {"sft": 80.0, "finch": 70.0}
    assert not any(value.is_extrapolated for values in front.methods.values() for value in values)


def test_method_of_one_setting_has_a_value_at_its_rounded_score():
    points = [point("a", 40.0, -1), point("a", 90.0, -9), point("b", 55.08, -5)]
    front = compare_fronts(TradeOff(points, point(None, 20.0, 0.0), [], False), resolution=0.1, order=["a", "b"])
    assert front.scores == [55.0]
    [value] = front.methods["b"]
    assert value.change.value == pytest.approx(-5, abs=0.02)
    assert not value.is_extrapolated


def test_front_below_the_mildest_setting_is_marked():
    trade_off = TradeOff(
        points=[point("sft", 40.0, -4.0), point("finch", 60.0, -3.0)],
        base=point(None, 20.0, 0.0),
        runs=[],
        has_intervals=False,
    )
    front = compare_fronts(trade_off, resolution=0.1, order=["sft", "finch"])
    assert front.scores == [40.0]
    [value] = front.methods["finch"]
    assert value.is_extrapolated
    assert value.change.value == pytest.approx(-1.5)  # half of the way from the pretrained model


def test_setting_that_beats_the_pretrained_model_reaches_lower_scores():
    points = [point("sft", 30.0, -1.0), point("finch", 60.0, 2.0)]
    front = compare_fronts(TradeOff(points, point(None, 20.0, 0.0), [], False), resolution=0.1, order=["sft", "finch"])
    [value] = front.methods["finch"]
    assert value.change.value == 2.0
    assert not value.is_extrapolated


def test_method_that_does_not_reach_a_score_has_no_value():
    points = [point("a", 40.0, -1), point("a", 90.0, -9), point("b", 90.0, -2), point("c", 80.0, -1)]
    front = compare_fronts(TradeOff(points, None, [], False), resolution=0.1, order=["a", "b", "c"])
    assert front.scores[-1] == 90.0
    assert front.methods["c"][-1].change is None
    assert front.methods["c"][-1].difference is None
    assert front.methods["b"][-1].difference.value == pytest.approx(7.0)


def test_interval_of_a_difference_is_paired():
    """Both methods move together from draw to draw: each is uncertain, their difference is not."""
    shifts = np.linspace(-3, 3, 200)
    draws = {old: [(50.0, old + shift) for shift in shifts] for old in (-8.0, -2.0)}
    trade_off = TradeOff([point("a", 50.0, -8.0, draws[-8.0]), point("b", 50.0, -2.0, draws[-2.0])], None, [], True)
    [value] = compare_fronts(trade_off, resolution=0.1, order=["a", "b"]).methods["b"]
    assert (value.change.low, value.change.high) == pytest.approx((-4.85, 0.85), abs=0.02)
    assert value.difference.value == pytest.approx(6.0)
    assert value.difference.low in (None, pytest.approx(6.0))
