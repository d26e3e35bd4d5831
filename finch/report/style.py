"""The look of all figures: a colour and a marker for each method, the same everywhere, and SVG that follows the page's colours."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.7  # inches; a phone shows the text of a figure this narrow at 9 pixels
ROW = 0.19  # inches, of a legend
LEGEND_COLUMNS = 3

# Name of a CSS variable to the colour on white; the page's style sheet has those for a dark screen. Hues that differ in lightness as well
# stay apart for colour-blind readers, and markers differ anyway.
COLOURS = {
    "ink": "#1f2328",
    "muted": "#69707a",
    "grid": "#d8dce1",
    "page": "#fefefe",
    "blue": "#0063a6",
    "vermilion": "#d04a02",
    "green": "#00845a",
    "pink": "#b5508f",
    "amber": "#b87a00",
    "sky": "#3c9fd6",
    "violet": "#6a4fc3",
}


@dataclass(frozen=True)
class Style:
    """A method's label, colour (a key of ``COLOURS``) and matplotlib marker."""

    label: str
    colour: str
    marker: str

    @property
    def hex(self) -> str:
        return COLOURS[self.colour]


STYLES = {
    "sft": Style("SFT", "vermilion", "o"),
    "small_lr": Style("SFT small lr", "amber", "v"),
    "finch": Style("FINCH", "blue", "D"),
    "flow": Style("FLOW", "green", "s"),
    "dft": Style("DFT", "pink", "^"),
    "talr": Style("TALR", "sky", "P"),
    "stm": Style("STM", "violet", "X"),
    "eaft": Style("EAFT", "green", "<"),
    "l2": Style("L2", "amber", "p"),
    "kl": Style("KL", "sky", "h"),
    "asft": Style("ASFT", "pink", ">"),
    "self_replay": Style("self-replay", "green", "*"),
    "lora": Style("LoRA", "muted", "d"),
    "wise_ft": Style("WiSE-FT", "violet", "*"),
    "lr_replay": Style("LR replay", "blue", "H"),
}
_SPARE_MARKERS = ("s", "^", "P", "X", "v", "p", "<", ">", "h", "d", "8")  # filled ones: their edges are light
_SPARE_COLOURS = ("green", "pink", "amber", "sky", "violet", "blue", "vermilion")


def method_styles(methods: Iterable[str]) -> dict[str, Style]:
    """A style for each method, in their order; a combination such as ``finch+talr`` has the colour of one and the marker of the other.

    Other names, such as a sweep's labels, have colours and markers that the known methods leave, while there are some.
    """
    methods = list(dict.fromkeys(methods))
    styles = {}
    known = [STYLES[name] for method in methods for name in method.split("+") if name in STYLES]
    colours = _unused_first(_SPARE_COLOURS, {one.colour for one in known})
    markers = _unused_first(_SPARE_MARKERS, {one.marker for one in known})
    for method in methods:
        if method in STYLES:
            styles[method] = STYLES[method]
            continue
        names = method.split("+")
        label = " + ".join(STYLES[name].label if name in STYLES else name for name in names)
        first, last = STYLES.get(names[0]), STYLES.get(names[-1])
        colour = first.colour if first is not None else next(colours)
        marker = last.marker if last is not None and len(names) > 1 else next(markers)
        styles[method] = Style(label, colour, marker)
    return styles


def _unused_first(values: Iterable[str], used: Set[str]) -> Iterator[str]:
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
    """Nothing of pyplot's is used: a notebook keeps its backend and figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    figure.set_layout_engine("constrained", w_pad=0.06, h_pad=0.06)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(COLOURS["muted"])
    axes.tick_params(colors=COLOURS["ink"], labelsize=9)
    axes.grid(color=COLOURS["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(_no_math(x_label), color=COLOURS["ink"], fontsize=9.5)
    axes.set_ylabel(_no_math(y_label), color=COLOURS["ink"], fontsize=9.5)
    return figure, axes


def _no_math(text: str) -> str:
    """Names are not TeX: what stands between two dollar signs, matplotlib would parse."""
    return text.replace("$", r"\$")


def _add_legend(figure: Figure) -> None:
    """Each label once, below the axes, so that it hides nothing; a figure with many rows of it is higher."""
    found: dict[str, Any] = {}
    for handle, label in zip(*figure.axes[0].get_legend_handles_labels(), strict=True):
        found.setdefault(label, handle)
    if found:
        rows = math.ceil(len(found) / LEGEND_COLUMNS)
        figure.set_figheight(figure.get_figheight() + ROW * max(0, rows - 2))
        figure.legend(
            list(found.values()),
            list(map(_no_math, found)),
            loc="outside lower center",
            ncols=min(LEGEND_COLUMNS, len(found)),
            frameon=False,
            fontsize=9,
            labelcolor=COLOURS["ink"],
            handlelength=1.8,
            columnspacing=1.4,
        )


def save(figure: Figure, folder: Path, name: str, title: str, caption: str) -> Drawing:
    """Writes NAME.svg and NAME.png, on white, with the legend below the axes."""
    import matplotlib

    _add_legend(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # once is enough
    vectors = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(vectors, format="svg", facecolor="white", metadata={"Date": None})  # equal runs give equal files
    with files.atomic_file(folder / f"{name}.svg") as partial:
        files.write_text(partial, vectors.getvalue())
    with files.atomic_file(folder / f"{name}.png") as partial:
        figure.savefig(partial, format="png", dpi=180, facecolor="white")
    return Drawing(name, title, caption, _inline(vectors.getvalue(), name, f"{title}. {caption}"))


def _inline(text: str, name: str, description: str) -> str:
    """An SVG document as an element of an HTML page: it refers to nothing outside, and its identifiers are its own."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    text = text.replace("#ffffff", "none")  # the page's background
    for variable, colour in COLOURS.items():
        text = re.sub(f"{colour}\\b", f"var(--{variable})", text, flags=re.IGNORECASE)
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(r'<svg width="[^"]*" height="[^"]*"', f'<svg role="img" aria-label="{label}"', text, count=1)
