"""A colour, a marker and a label for each method, names next to points, and SVG that follows a page's colours."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finch.base import files
from finch.base.log import printable
from finch.training.style import COLOURS, annotate, new_panels, no_math

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.7  # inches; a phone shows the text of a figure this narrow at 9 pixels


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
    axes.set_xlabel(no_math(x_label), color=COLOURS["ink"], fontsize=9.5)
    axes.set_ylabel(no_math(y_label), color=COLOURS["ink"], fontsize=9.5)
    return figure, axes


@dataclass(frozen=True)
class Name:
    """The name of something drawn: a text in its colour, and the places that it may stand next to, in the axes' units."""

    text: str
    hex: str
    places: Sequence[tuple[float, float]]


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
        text = annotate(axes, name.text, name.hex, (0, 0))
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
        end = (float(at[0]), float(at[1]))
        annotate(axes, name.text, name.hex, end, place if distance > _NEAR else None)
        # A name counts for more than a line: the next one rather covers a line than a name.
        ink[round(bottom) : round(top), round(left) : round(right)] = 4


def save(figure: Figure, folder: Path, name: str, title: str, caption: str) -> Drawing:
    """Writes NAME.svg and NAME.png, on white."""
    # A probe may be called anything: the name is one of files, and of elements of the page.
    name = re.sub(r"[^\w-]", lambda sign: f".{ord(sign[0]):x}", name)
    return Drawing(name, title, caption, _inline(write(figure, folder / name), name, f"{title}. {caption}"))


def write(figure: Figure, path: Path) -> str:
    """Writes PATH.svg, whose text is returned, and PATH.png: equal figures give equal files."""
    import matplotlib

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # once is enough
    vectors = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(vectors, format="svg", facecolor="white", metadata={"Date": None})
    files.replace_text(path.with_name(f"{path.name}.svg"), vectors.getvalue())
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
    start = f'<svg role="img" aria-label="{label}"'
    return re.sub(r'<svg width="[^"]*" height="[^"]*"', lambda _: start, text, count=1)
