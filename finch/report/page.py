"""The report as Markdown and as one HTML file that needs nothing else: no script, no font, no image from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from finch.report.figures.style import Drawing, Style
from finch.report.summary import Summary
from finch.report.tables import Table

if TYPE_CHECKING:
    from jinja2 import Environment

FIGURES = "figures"
"""Folder of the figures, beside report.md."""


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        identifier: of its heading, for links.
        text: paragraphs.
        lists: (title, items).
        commands: shown as code.
    """

    identifier: str
    title: str
    text: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The report.

    Attributes:
        notes: what a reader has to know before comparing numbers.
        method_styles: of the methods, for the page's key.
    """

    title: str
    summary: Summary
    notes: Sequence[str]
    sections: Sequence[Section]
    footer: str
    method_styles: Sequence[Style] = field(default_factory=tuple)


def render_markdown(page: Page) -> str:
    return _templates(is_html=False).get_template("report.md.j2").render(page=page, figures=FIGURES).strip() + "\n"


def render_html(page: Page) -> str:
    from finch.report.figures.style import COLOURS

    return _templates(is_html=True).get_template("report.html.j2").render(page=page, colours=COLOURS).strip() + "\n"


@cache
def _templates(*, is_html: bool) -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("finch.report"),
        autoescape=is_html,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["cell"] = _markdown_cell
    return environment


def _markdown_cell(text: Any) -> str:
    """Text that cannot end a cell of a Markdown table, or be read as emphasis."""
    escaped = str(text).replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
    return escaped.replace("<", "&lt;").replace("\n", " ")
