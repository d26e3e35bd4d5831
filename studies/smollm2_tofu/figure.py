"""The study's figure: the fronts of the primary measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finch.report.front import TradeOff, points_by_method
from finch.report.measures import Estimate

Array = NDArray[np.float64]


def draw(by_score: TradeOff, by_loss: TradeOff, path: Path) -> None:
    """The fronts of the primary measure: KL over six-way accuracy, and over the loss of the learned answers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "finch"  # the same picture, the same bytes
    from matplotlib import pyplot

    styles = {
        "sft": ("SFT, cosine", "#0072B2", "o"),
        "constant": ("constant rate", "#888888", "s"),
        "finch": ("FINCH", "#D55E00", "D"),
        "wise_ft": ("WiSE-FT of SFT", "#CC79A7", "v"),
        "kl": ("SFT + KL penalty, 1 seed", "#009E73", "^"),
    }
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for axes, points in zip(panels, (by_score, by_loss), strict=True):
        methods = points_by_method(points)
        for method in (name for name in styles if name in methods):
            label, color, marker = styles[method]
            ordered = sorted(methods[method], key=lambda point: -point.old.value)
            new, old = [abs(point.new.value) for point in ordered], [-point.old.value for point in ordered]
            axes.plot(new, old, marker=marker, color=color, label=label, markersize=5, linewidth=1.2)
            bars = {"yerr": _bars([point.old for point in ordered], -1)}
            if points is by_score:
                bars["xerr"] = _bars([point.new for point in ordered], 1)
            axes.errorbar(new, old, **bars, fmt="none", ecolor=color, alpha=0.3, linewidth=1)
        if points.base is not None:
            axes.plot(abs(points.base.new.value), 0, "k*", label="pretrained", markersize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("forgotten: KL from the pretrained model\non its own answers, nats per token")
    panels[0].set_ylim(-0.03, 1.3)
    panels[0].set_xlabel("learned: six-way accuracy on paraphrases, % (more is better)")
    panels[1].set_xlabel("learned: loss of the trained answers, nats per token (less is better)")
    panels[1].invert_xaxis()
    panels[1].legend(frameon=False, loc="upper left")
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=110, metadata={"Date": None} if suffix == ".svg" else None)
    pyplot.close(figure)


def _bars(estimates: Sequence[Estimate], sign: int) -> Array:
    """[2, points] from each value, shown times ``sign``, down and up to the ends of its interval."""
    bars = []
    for one in estimates:
        ends = (0.0, 0.0) if one.low is None or one.high is None else (one.value - one.low, one.high - one.value)
        bars.append(ends[::sign])
    return np.array(bars).T.clip(0)
