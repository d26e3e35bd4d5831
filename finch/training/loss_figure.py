"""RUN/loss.png: loss, EMA, validation loss and learning rate over steps, where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch import files, run_files
from finch.log import logger

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that are told apart with any colour vision (Okabe and Ito, 2008)
_GREY, _BLUE, _ORANGE, _BLACK = "#9a9a9a", "#0072B2", "#D55E00", "#000000"
_MAX_STEPS_WITH_MARKERS = 60


def update_loss_figure(run: Path) -> None:
    """Draws a run's metrics.jsonl; called on one rank. Without matplotlib nothing happens, and a failure is only a warning."""
    if find_spec("matplotlib") is None:
        logger.debug(f"{run / run_files.LOSS_FIGURE} is not drawn: matplotlib is not installed")
        return
    try:
        draw(run_files.read_metrics(run / run_files.METRICS), run / run_files.LOSS_FIGURE)
    except Exception as error:  # the run matters more than its figure
        logger.warning(f"{run / run_files.LOSS_FIGURE} could not be drawn ({type(error).__name__}: {error})")


def draw(lines: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draws lines of a metrics.jsonl into a PNG file. Nothing of pyplot's is used: a notebook keeps its backend and figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if line.get("validation_loss") is not None]
    figure = Figure(figsize=(8, 5.6))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    FigureCanvasAgg(figure)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))

    x = [line["step"] for line in steps]
    few = {"marker": "."} if len(steps) <= _MAX_STEPS_WITH_MARKERS else {}
    ema = _column(steps, "ema_loss")
    has_ema = not all(math.isnan(value) for value in ema)
    colour, width = (_GREY, 0.8) if has_ema else (_BLUE, 1.4)
    losses.plot(x, _column(steps, "loss"), color=colour, linewidth=width, label="loss of the step", **few)
    if has_ema:
        losses.plot(x, ema, color=_BLUE, linewidth=1.8, label="EMA")
    if validations:
        at = [line["step"] for line in validations]
        values = _column(validations, "validation_loss")
        losses.plot(at, values, color=_ORANGE, linewidth=1.4, marker="o", markersize=5, label="validation")
    losses.set_ylabel("loss, nats a token")

    rates.plot(x, _column(steps, "lr"), color=_BLUE, linewidth=1.4, **few)
    caps = [line["lr"] for line in steps if line.get("lr_is_capped")]
    if caps:
        rates.axhline(max(caps), color=_BLACK, linestyle="--", linewidth=1.0, label=f"eta_max = {max(caps):.3g}")
    rates.set(xlabel="step", ylabel="learning rate")
    rates.set_ylim(0, 1.08 * max([line["lr"] for line in steps], default=1.0) or 1.0)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (losses, rates):
        tidy(axes)
        if axes.get_legend_handles_labels()[
            0
        ]:  # above the curves; on the left there is the exponent of the learning rate
            axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=3)
    with files.atomic_file(file) as partial:
        figure.savefig(partial, format="png", dpi=130)


def tidy(axes: Axes) -> None:
    """A light grid, and no frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [math.nan if line.get(key) is None else line[key] for line in lines]
