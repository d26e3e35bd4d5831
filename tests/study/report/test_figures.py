"""The trade-off's figure: what it shows when some settings are far worse than the pretrained model."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the report extra is not installed")

from finch.study.report.content import Names, Report
from finch.study.report.figures import draw_trade_off
from finch.study.report.front import Point, Setting, TradeOff
from finch.study.report.measures import Estimate
from finch.study.report.selection import Measure
from finch.study.report.style import STYLES

NEW, OLD = (Measure(name, "", "losses", name, "", "nats", is_higher_better=False) for name in ("loss", "kl"))


def draw(folder, places):
    """In nats on both axes, which are inverted."""
    zeros = np.zeros(4)
    points = [
        Point(Setting("sft", {"optimizer.lr": rate}, [rate]), Estimate(new), Estimate(old), zeros, zeros)
        for rate, (new, old) in enumerate(places)
    ]
    base = Point(Setting("pretrained", {}, []), Estimate(-2.9), Estimate(0.0), zeros, zeros)
    comparison, names = SimpleNamespace(new=NEW, old=[OLD]), Names(STYLES, [])
    return draw_trade_off(Report(comparison, [], TradeOff(points, base, False), None, names, folder))


@pytest.mark.parametrize(
    ("place", "number", "outside"),
    [((-9.0, -8.0), 1, "a setting"), ((-9.0, -8.0), 2, "2 settings"), ((-3.01, -0.25), 1, None)],
)
def test_settings_that_would_take_most_of_the_figure_are_outside(tmp_path, place, number, outside):
    drawing = draw(tmp_path, [(-2.6, -0.1), (-2.5, -0.2), *[place] * number])
    last = max(map(float, re.findall(r">(\d+\.\d+)</text>", drawing.svg)))
    assert (last > 2.9) if outside is None else (last < 3)
    assert ("Outside" in drawing.caption) == (outside is not None)
    assert outside is None or f"Outside: {outside} that the pretrained model beats" in drawing.caption
