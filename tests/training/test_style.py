"""The look of figures: no two methods of one colour, and names next to what they name that do not cover each other."""

import itertools
from importlib.resources import files

import pytest

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from matplotlib.text import Text

from finch.study.report.style import STYLES, Name, method_styles, name_places, new_figure
from finch.training.style import COLOURS, name_ends


def test_every_method_has_its_own_colour_and_marker():
    for part in ("colour", "marker"):
        assert len({getattr(style, part) for style in STYLES.values()}) == len(STYLES)
    assert {style.colour for style in STYLES.values()} <= COLOURS.keys() - {"ink", "muted", "grid", "page"}


def test_combinations_and_labels_have_colours_of_their_own():
    styles = method_styles(["sft", "finch+self_replay", "finch", "constant", "mean", "kl_0.1", "sft"])
    assert {name: styles[name] for name in ("sft", "finch", "constant")} == {
        name: STYLES[name] for name in ("sft", "finch", "constant")
    }
    assert [style.label for style in styles.values()] == [
        *("SFT", "FINCH + self_replay", "FINCH", "constant", "mean", "kl_0.1"),
    ]
    assert len({style.colour for style in styles.values()}) == len({style.marker for style in styles.values()}) == 6
    assert styles["finch+self_replay"].colour == STYLES["self_replay"].colour
    assert not {styles["mean"].colour, styles["kl_0.1"].colour} & {style.colour for style in STYLES.values()}
    both = method_styles(["finch+self_replay", "self_replay"])
    assert both["self_replay"] == STYLES["self_replay"] != both["finch+self_replay"]
    many = method_styles([*STYLES, *map(str, range(5))])  # one more than there are colours
    assert len({style.colour for style in many.values()}) == len(STYLES) + 4


def boxes(figure, axes):
    figure.draw_without_rendering()
    return [Text.get_window_extent(text) for text in axes.texts]  # without its line


def check_apart(found):
    assert not any(one.overlaps(other) for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize("ends", [[0.0, 0.01, 0.02, 1.0], [1.0] * 5, [0.0] * 3, [0.5], []])
@pytest.mark.parametrize("is_inverted", [False, True])
def test_names_at_ends_are_apart_and_in_the_order_of_the_lines(ends, is_inverted):
    figure, axes = new_figure(3.0, "x", "y")
    for number, end in enumerate(ends):
        axes.plot([0, 1], [0.5, end], label=f"line {number}")
    axes.plot([0, 1], [0.4, 0.6])  # without a name
    axes.yaxis.set_inverted(is_inverted)
    name_ends(axes)
    found = boxes(figure, axes)
    assert sorted(text.get_text() for text in axes.texts) == [f"line {number}" for number in range(len(ends))]
    check_apart(found)
    heights = {text.get_text(): box.y0 for text, box in zip(axes.texts, found, strict=True)}
    ordered = [heights[f"line {number}"] for number in range(len(ends))]
    if len(set(ends)) > 1:
        assert ordered == sorted(ordered, reverse=is_inverted)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in found)


def test_lines_of_one_label_have_one_name_at_their_mean():
    _, axes = new_figure(3.0, "x", "y")
    for end in (0.2, 0.6):
        axes.plot([0, 1], [0, end], color="#0063a6", label="FINCH")
    axes.plot([0, 0.5], [0, 1], label="FINCH")  # ended early
    axes.set_ylim(0, 1)
    name_ends(axes)
    (text,) = axes.texts
    assert text.xy == (1, pytest.approx(0.4))
    assert text.get_position()[1] == pytest.approx(0.4)
    assert text.get_color() == "#0063a6"


def test_names_at_places_cover_neither_each_other_nor_markers():
    figure, axes = new_figure(4.2, "x", "y")
    places = {"one": [(0, 0), (1, 1)], "another": [(0.02, 0.02), (0.5, 0.4)], "third": [(0.04, 0), (1, 0.98)]}
    for those in places.values():
        axes.plot(*zip(*those, strict=True), "o", markersize=6)
    name_places(axes, [Name(text, "#0063a6", those) for text, those in places.items()])
    found = boxes(figure, axes)
    assert [text.get_text() for text in axes.texts] == list(places)
    check_apart(found)
    markers = [axes.transData.transform(place) for those in places.values() for place in those]
    assert not any(box.contains(*place) for box in found for place in markers)
    assert all(axes.bbox.x0 <= box.x0 + 1 and box.x1 <= axes.bbox.x1 + 1 for box in found)


def test_dark_page_has_every_colour():
    sheet = (files("finch.evaluation") / "templates" / "style.css").read_text()
    dark = sheet[: sheet.index("box-sizing")]
    assert all(f"--{name}: #" in dark for name in COLOURS)
