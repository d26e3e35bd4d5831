"""The study's figure: the fronts of the primary measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finch.study.report.front import TradeOff, points_by_method
from finch.study.report.measures import Estimate
from finch.study.report.style import PRETRAINED, STYLES, name_places, write
from finch.training.style import LESS_FORGOTTEN, MORE_LEARNED, Name, new_panels

Array = NDArray[np.float64]
LABELS = {
    "sft": "SFT, cosine",
    "constant": "constant rate",
    "finch": "FINCH",
    "wise_ft": "WiSE-FT of SFT",
    "kl": "SFT + KL penalty, 1 seed",
}
MOST_FORGOTTEN = 1.3
"""Nats per token; the largest rates are outside."""


def draw(by_score: TradeOff, by_loss: TradeOff, path: Path) -> None:
    """The fronts of the primary measure: KL over six-way accuracy, and over the loss of the learned answers."""
    figure, panels = new_panels((10, 4.4), 1, 2, sharey=True)
    for axes, points in zip(panels, (by_score, by_loss), strict=True):
        methods = points_by_method(points)
        names = []
        for method in (name for name in LABELS if name in methods):
            style = STYLES[method]
            ordered = sorted(methods[method], key=lambda point: -point.old.value)
            new, old = [abs(point.new.value) for point in ordered], [-point.old.value for point in ordered]
            axes.plot(new, old, marker=style.marker, color=style.hex, markersize=5, linewidth=1.2)
            bars: dict[str, Any] = {"yerr": _bars([point.old for point in ordered], -1)}
            if points is by_score:
                bars["xerr"] = _bars([point.new for point in ordered], 1)
            axes.errorbar(new, old, **bars, fmt="none", ecolor=style.hex, alpha=0.3, linewidth=1)
            places = [(x, y) for x, y in zip(new, old, strict=True) if y < MOST_FORGOTTEN]
            names.append(Name(LABELS[method], style.hex, places))
        if points.base is not None:
            place = abs(points.base.new.value), 0.0
            axes.plot(*place, marker=PRETRAINED.marker, color=PRETRAINED.hex, markersize=9)
            names.append(Name(PRETRAINED.label, PRETRAINED.hex, [place]))
        axes.set_ylim(MOST_FORGOTTEN, -0.05)
        axes.xaxis.set_inverted(points is by_loss)
        name_places(axes, names)
    panels[0].set_ylabel(f"KL from the pretrained model\non its own answers, nats per token\n{LESS_FORGOTTEN}")
    panels[0].set_xlabel(f"six-way accuracy on paraphrases, %\n{MORE_LEARNED}")
    panels[1].set_xlabel(f"loss of the trained answers, nats per token\n{MORE_LEARNED}")
    write(figure, path)


def _bars(estimates: Sequence[Estimate], sign: int) -> Array:
    """[2, points] from each value, shown times ``sign``, down and up to the ends of its interval."""
    bars = []
    for one in estimates:
        ends = (0.0, 0.0) if one.low is None or one.high is None else (one.value - one.low, one.high - one.value)
        bars.append(ends[::sign])
    return np.array(bars).T.clip(0)
