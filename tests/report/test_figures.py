"""The trade-off's figure: what it shows when some settings are far worse than the pretrained model."""

import re

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the report extra is not installed")

from finch.report.figures import draw_trade_off
from finch.report.front import Point, Setting, TradeOff
from finch.report.measures import Estimate
from finch.report.style import STYLES


def draw(folder, places):
    """In nats on both axes, which are inverted."""
    zeros = np.zeros(4)
    points = [
        Point(Setting("sft", {"optimizer.lr": rate}, [rate]), Estimate(new), Estimate(old), zeros, zeros)
        for rate, (new, old) in enumerate(places)
    ]
    base = Point(Setting("pretrained", {}, []), Estimate(-2.9), Estimate(0.0), zeros, zeros)
    trade_off = TradeOff(points, base, False)
    return draw_trade_off(trade_off, STYLES, folder, new_label="loss", old_label="kl", sign=(-1, -1))


def ticks(drawing):
    return [float(text) for text in re.findall(r">(\d+\.\d+)</text>", drawing.svg)]


@pytest.mark.parametrize("num_worse", [1, 2])
def test_settings_beaten_by_the_pretrained_model_are_outside(tmp_path, num_worse):
    drawing = draw(tmp_path, [(-2.6, -0.1), (-2.5, -0.2), *[(-9.0, -8.0)] * num_worse])
    assert max(ticks(drawing)) < 3
    assert (
        f"Outside: {'a setting' if num_worse == 1 else '2 settings'} that the pretrained model beats" in drawing.caption
    )


def test_settings_that_take_little_of_the_figure_are_inside(tmp_path):
    drawing = draw(tmp_path, [(-2.6, -0.1), (-2.5, -0.2), (-3.01, -0.25)])
    assert max(ticks(drawing)) > 2.9
    assert "Outside" not in drawing.caption
