"""Figures as files and as parts of the page."""

import re

import pytest

from finch.study.report.style import new_figure, save


@pytest.mark.parametrize("name", ['"><img src=x onerror=alert(1)>', r"a\1b", "\x1b]0;x\x07", "a/../b", "a\ud800b"])
def test_a_figure_of_any_name_puts_no_markup_into_the_page(name, tmp_path):
    figure, _ = new_figure(2, "x", "y")
    drawing = save(figure, tmp_path, f"probe_{name}_loss", "Probe", name)
    assert "<img" not in drawing.svg
    assert re.fullmatch(r"[\w.-]+", drawing.name)
    assert (tmp_path / f"{drawing.name}.svg").is_file()
