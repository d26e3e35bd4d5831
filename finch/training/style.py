"""The look of all figures: colours, axes, and names next to the lines."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from finch.base.log import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

TEXT_SIZE = 8.5  # of a line's name
LESS_FORGOTTEN, MORE_LEARNED = "less forgotten \N{RIGHTWARDS ARROW}", "more learned \N{RIGHTWARDS ARROW}"
"""Below an axis's label: on every figure up is less forgotten, and to the right or up is more learned."""

# Name of a CSS variable to the colour on white; the page's style sheet has those for a dark screen. No two methods have one colour; the first
# ones are furthest apart, in lightness as well, for colour-blind readers. Markers and names next to the lines differ anyway.
COLOURS = {
    "ink": "#1f2328",
    "muted": "#69707a",
    "grid": "#d8dce1",
    "page": "#fefefe",
    "vermilion": "#d04a02",
    "blue": "#0063a6",
    "grey": "#7f8790",
    "violet": "#6a4fc3",
    "green": "#00845a",
    "sky": "#2f93cc",
    "amber": "#b87a00",
    "pink": "#c4549b",
    "lime": "#75a000",
    "brown": "#6e4423",
    "teal": "#009b9b",
    "red": "#a8002e",
    "olive": "#5c6300",
    "rose": "#e8607f",
    "lavender": "#9a78d6",
    "navy": "#27306e",
    "magenta": "#d800e6",  # this and the next ones are labels'
    "plum": "#770080",
    "cobalt": "#2a2aff",
    "maroon": "#660029",
}


def new_panels(size: tuple[float, float], rows: int, columns: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with axes that have a light grid, and no frame above and to the right. Nothing of pyplot's is used: a notebook keeps its backend
    and figures.

    Args:
        size: in inches.
        options: of ``Figure.subplots``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    figure.set_layout_engine("constrained", w_pad=0.06, h_pad=0.06)
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        for spine in axes.spines.values():
            spine.set_color(COLOURS["muted"])
        axes.tick_params(colors=COLOURS["ink"], labelsize=9)
        axes.grid(color=COLOURS["grid"], linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def no_math(text: str) -> str:
    """Names are not TeX: what stands between two dollar signs, matplotlib would parse; and XML has no control characters."""
    return printable(text).replace("$", r"\$")


def name_ends(*panels: Axes) -> None:
    """Names the lines that have labels where they end, in the margin at the right; lines of one label have one name, and names that would overlap
    are moved apart. The panels are one figure's; the limits of their axes have to be final.
    """
    figure, named = cast("Figure", panels[0].figure), [_named(axes) for axes in panels]
    figure.draw_without_rendering()  # gives the texts their margin, and the axes their height
    for axes, found in zip(panels, named, strict=True):
        # Below each name; without them heights need only not fall.
        gaps = np.arange(len(found)) * (1.35 * TEXT_SIZE / 72 / axes.get_position().height / figure.get_figheight())
        # It keeps the highest name within the axes; those below it then move down as well.
        room = max(0.0, 1.0 - gaps.max(initial=0.0))
        heights = np.maximum.accumulate(np.clip([height for height, _ in found], 0.0, None) - gaps).clip(max=room)
        for (_, text), height in zip(found, (heights + gaps).tolist(), strict=True):
            text.set_position((1.03, height))


def _named(axes: Axes) -> list[tuple[float, Annotation]]:
    """The names of lines at the heights of their ends, in shares of the axes."""
    from matplotlib.colors import to_hex

    axes.autoscale_view()
    to_shares = axes.transData + axes.transAxes.inverted()
    ends: dict[str, list[tuple[float, float, str]]] = {}
    for line in axes.lines:
        known = [(x, y) for x, y in np.asarray(line.get_xydata(), dtype=float).tolist() if math.isfinite(y)]
        if known and not str(line.get_label()).startswith("_"):
            ends.setdefault(str(line.get_label()), []).append((*known[-1], to_hex(line.get_color())))
    found = []
    for label, those in ends.items():
        place = (last := max(x for x, _, _ in those)), fmean(y for x, y, _ in those if x == last)
        height = float(to_shares.transform(place)[1])
        found.append((height, annotate(axes, label, those[0][2], (1.03, height), place)))
    return sorted(found, key=lambda one: one[0])


def annotate(
    axes: Axes, text: str, colour: str, at: tuple[float, float], place: tuple[float, float] | None = None
) -> Annotation:
    """A text whose left end is ``at``, in shares of the axes, in the middle of its height, with a line from it to ``place``."""
    line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3}
    return axes.annotate(
        no_math(text),
        place or at,
        at,
        xycoords="data" if place else "axes fraction",
        textcoords="axes fraction",
        arrowprops={**line, "relpos": (0, 0.5)} if place else None,
        color=colour,
        fontsize=TEXT_SIZE,
        va="center",
        annotation_clip=False,
    )
