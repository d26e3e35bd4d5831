"""The look of all figures: a colour, a marker and a label for each method, and SVG that follows a page's colours."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from finch.base import files
from finch.base.log import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

WIDTH = 4.7  # inches; a phone shows the text of a figure this narrow at 9 pixels
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


@dataclass(frozen=True)
class Style:
    """A method's label, colour (a key of ``COLOURS``) and matplotlib marker."""

    label: str
    colour: str
    marker: str | tuple[int, int, int]

    @property
    def hex(self) -> str:
        return COLOURS[self.colour]


PRETRAINED = Style("pretrained", "ink", "*")
STYLES = {
    "sft": Style("SFT", "vermilion", "o"),
    "small_lr": Style("SFT small lr", "amber", "h"),
    "finch": Style("FINCH", "blue", "D"),
    "constant": Style("constant", "grey", "s"),
    "flow": Style("FLOW", "lime", "<"),
    "dft": Style("DFT", "pink", ">"),
    "talr": Style("TALR", "brown", "8"),
    "stm": Style("STM", "teal", "X"),
    "eaft": Style("EAFT", "red", "p"),
    "l2": Style("L2", "olive", "d"),
    "kl": Style("KL", "sky", "^"),
    "asft": Style("ASFT", "rose", "H"),
    "self_replay": Style("self_replay", "green", "P"),
    "lora": Style("LoRA", "lavender", "*"),
    "wise_ft": Style("WiSE-FT", "violet", "v"),
    "lr_replay": Style("LR replay", "navy", (4, 1, 0)),
}
_DISTANCES, _NEAR, _CROWD = (4, 9, 16, 26, 40, 60, 90), 9, 14
"""Points between a place and its name; from further away a line joins them. Places in a crowd are avoided."""
_ANGLES = [number * math.pi / 8 for number in range(16)]
_SPARE = sorted(STYLES.values(), key=lambda style: list(COLOURS).index(style.colour))
_LABELS = ("magenta", "plum", "cobalt", "maroon")


def method_styles(methods: Iterable[str]) -> dict[str, Style]:
    """A style for each method, in their order; a combination such as ``finch+self_replay`` has its last part's, if that part is not there itself.

    Other names, such as a sweep's labels, have colours of no method while there are some, then what the methods of the figure leave.
    """
    methods = list(dict.fromkeys(methods))
    styles: dict[str, Style] = {}
    others = []
    for method in sorted(methods, key=lambda one: one not in STYLES):  # a method comes before its combinations
        style = STYLES.get(method.rpartition("+")[2])
        if style is None or style.colour in {one.colour for one in styles.values()}:
            others.append(method)
        else:
            styles[method] = replace(style, label=_label(method))
    colours = _unused_first([*_LABELS, *(one.colour for one in _SPARE)], {one.colour for one in styles.values()})
    markers = _unused_first([one.marker for one in _SPARE], {one.marker for one in styles.values()})
    styles |= {method: Style(_label(method), next(colours), next(markers)) for method in others}
    return {method: styles[method] for method in methods}


def _label(method: str) -> str:
    return " + ".join(STYLES[name].label if name in STYLES else name for name in method.split("+"))


def _unused_first(values: Iterable[Any], used: Set[Any]) -> Iterator[Any]:
    return itertools.cycle(sorted(values, key=lambda value: value in used))


@dataclass(frozen=True)
class Drawing:
    """A figure of the report.

    Attributes:
        name: of its files.
        title: a few words, above it.
        caption: what it shows and how to read it.
        svg: for the HTML page: without a size, and with colours that are CSS variables.
    """

    name: str
    title: str
    caption: str
    svg: str


def new_figure(height: float, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A figure with one axes, of the report's width."""
    figure, panels = new_panels((WIDTH, height), 1, 1)
    axes = panels[0]
    axes.set_xlabel(_no_math(x_label), color=COLOURS["ink"], fontsize=9.5)
    axes.set_ylabel(_no_math(y_label), color=COLOURS["ink"], fontsize=9.5)
    return figure, axes


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


def _no_math(text: str) -> str:
    """Names are not TeX: what stands between two dollar signs, matplotlib would parse; and XML has no control characters."""
    return printable(text).replace("$", r"\$")


@dataclass(frozen=True)
class Name:
    """The name of something drawn: a text in its colour, and the places that it may stand next to, in the axes' units."""

    text: str
    hex: str
    places: Sequence[tuple[float, float]]


def name_ends(axes: Axes) -> None:
    """Names the lines that have labels where they end, in the margin at the right; lines of one label have one name, and names that would overlap
    are moved apart. The limits of the axes have to be final.
    """
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
        last = max(x for x, _, _ in those)
        place = last, fmean(y for x, y, _ in those if x == last)
        found.append((float(to_shares.transform(place)[1]), Name(label, those[0][2], [place])))
    found.sort(key=lambda one: one[0])
    texts = [_annotate(axes, name, (1.03, height), name.places[0]) for height, name in found]
    figure = cast("Figure", axes.figure)
    figure.draw_without_rendering()  # gives the texts their margin, and the axes their height
    gap = 1.35 * TEXT_SIZE / 72 / (axes.get_position().height * figure.get_figheight())
    gaps = gap * np.arange(len(texts))  # below each name; without them heights need only not fall
    # It keeps the highest name within the axes; those below it then move down as well.
    room = max(0.0, 1.0 - gap * (len(texts) - 1))
    heights = np.maximum.accumulate(np.clip([height for height, _ in found], 0.0, None) - gaps).clip(max=room) + gaps
    for text, height in zip(texts, heights.tolist(), strict=True):
        text.set_position((1.03, height))


def name_places(axes: Axes, names: Iterable[Name]) -> None:
    """Writes each name where it covers least of what is drawn, next to one of its places, with a thin line to it.

    The figure has to be complete.
    """
    figure = axes.figure
    # A name may cover the grid: it does not count as drawn.
    grid = [line for line in (*axes.get_xgridlines(), *axes.get_ygridlines()) if line.get_visible()]
    for line in grid:
        line.set_visible(False)
    figure.canvas.draw()
    for line in grid:
        line.set_visible(True)
    pixels = np.asarray(figure.canvas.buffer_rgba())  # type: ignore[attr-defined]
    ink = (pixels[::-1, :, :3].min(axis=2) < 245).astype(float)  # from the bottom up
    unit = figure.dpi / 72  # pixels of a point
    frame = axes.get_window_extent()

    def covered(left: float, bottom: float, right: float, top: float) -> float:
        """Square points of ink in a box of pixels."""
        x0, x1, y0, y1 = (max(0, round(float(one))) for one in (left, right, bottom, top))
        return float(ink[y0:y1, x0:x1].sum()) / unit**2

    for name in names:
        # Written once to be measured: fonts decide its size.
        text = _annotate(axes, name, (0, 0))
        width, height = text.get_window_extent().width + 3 * unit, text.get_window_extent().height
        found = []
        for place in name.places:
            x, y = axes.transData.transform(place)
            crowd = 0.2 * covered(x - _CROWD * unit, y - _CROWD * unit, x + _CROWD * unit, y + _CROWD * unit)
            for distance, angle in itertools.product(_DISTANCES, _ANGLES):
                left = x + np.cos(angle) * (distance * unit + width / 2) - width / 2
                bottom = y + np.sin(angle) * (distance * unit + height / 2) - height / 2
                box = left, bottom, left + width, bottom + height
                if left >= frame.x0 and box[2] <= frame.x1 and bottom >= frame.y0 and box[3] <= frame.y1:
                    found.append((2 * covered(*box) + crowd + distance, distance, place, box))
        text.remove()
        if not found:
            continue
        _, distance, place, (left, bottom, right, top) = min(found)
        at = axes.transAxes.inverted().transform((left + 1.5 * unit, (bottom + top) / 2))
        _annotate(axes, name, (float(at[0]), float(at[1])), place if distance > _NEAR else None)
        # A name counts for more than a line: the next one rather covers a line than a name.
        ink[round(bottom) : round(top), round(left) : round(right)] = 4


def _annotate(axes: Axes, name: Name, at: tuple[float, float], place: tuple[float, float] | None = None) -> Annotation:
    """A text whose left end is ``at``, in shares of the axes, in the middle of its height, with a line from it to ``place``."""
    line = {"arrowstyle": "-", "color": name.hex, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3}
    return axes.annotate(
        _no_math(name.text),
        place or at,
        at,
        xycoords="data" if place else "axes fraction",
        textcoords="axes fraction",
        arrowprops={**line, "relpos": (0, 0.5)} if place else None,
        color=name.hex,
        fontsize=TEXT_SIZE,
        va="center",
        annotation_clip=False,
    )


def save(figure: Figure, folder: Path, name: str, title: str, caption: str) -> Drawing:
    """Writes NAME.svg and NAME.png, on white."""
    return Drawing(name, title, caption, _inline(write(figure, folder / name), name, f"{title}. {caption}"))


def write(figure: Figure, path: Path) -> str:
    """Writes PATH.svg, whose text is returned, and PATH.png: equal figures give equal files."""
    import matplotlib

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # once is enough
    vectors = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(vectors, format="svg", facecolor="white", metadata={"Date": None})
    with files.atomic_file(path.with_name(f"{path.name}.svg")) as partial:
        files.write_text(partial, vectors.getvalue())
    with files.atomic_file(path.with_name(f"{path.name}.png")) as partial:
        figure.savefig(partial, format="png", dpi=180, facecolor="white")
    return vectors.getvalue()


def _inline(text: str, name: str, description: str) -> str:
    """An SVG document as an element of an HTML page: it refers to nothing outside, and its identifiers are its own."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="|href="#|url\(#', rf"\g<0>{name}-", text)
    text = text.replace("#ffffff", "none")  # the page's background
    for variable, colour in COLOURS.items():
        text = re.sub(f"{colour}\\b", f"var(--{variable})", text, flags=re.IGNORECASE)
    label = printable(description).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(r'<svg width="[^"]*" height="[^"]*"', f'<svg role="img" aria-label="{label}"', text, count=1)
