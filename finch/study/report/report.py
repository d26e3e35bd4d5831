"""`finch report`: reads runs, compares them, and writes report.md, report.html, summary.csv and the figures.

report.html is one file that needs nothing else: no script, no font, no image from elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from finch import __version__
from finch.base import files
from finch.base.errors import writing
from finch.base.log import printable
from finch.evaluation.skills_page import plain, template
from finch.study.report.content import Report
from finch.study.report.measures import compare
from finch.study.report.runs import read_runs, sort_runs
from finch.study.report.sections import make_sections
from finch.study.report.summary import facts, join, left_out, notes, summarize
from finch.study.report.tables import summary_csv
from finch.training.style import COLOURS

FIGURES = "figures"
"""Folder of the figures, next to report.md."""
PAGE = "report.html"


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    new_task: str | None = None,
    old_tasks: Sequence[str] | None = None,
    base: Path | None = None,
) -> Path:
    """Writes a report, over an earlier one.

    Args:
        folders: runs or sweeps.
        out: folder for report.md, report.html, summary.csv and figures/.
        new_task: the evaluated task or probe that the runs learned, where it does not follow from the evaluations.
        old_tasks: the tasks and probes, of one unit, whose mean change is the trade-off's; None: all old ones, see ``compare``.
        base: folder of the pretrained model's results, where they have been moved.

    Returns:
        The path of report.html.

    Raises:
        UserError: the runs cannot be read or compared, or ``out`` cannot be written.
    """
    runs = sort_runs(read_runs(folders))
    comparison = compare(runs, new_task=new_task, old_tasks=old_tasks, base=base)
    options = [*map(os.fspath, folders), "--out", os.fspath(out)]
    options += ["--new-task", new_task] if new_task is not None else []
    options += ["--old-tasks", ",".join(old_tasks)] if old_tasks is not None else []
    options += ["--base", os.fspath(base)] if base is not None else []
    figures = out / FIGURES
    with writing(f"--out={out}"):
        figures.mkdir(parents=True, exist_ok=True)
        if not os.access(figures, os.W_OK):
            raise PermissionError(None, "permission denied")
        report = Report.of(comparison, figures)
        labels = report.names.labels
        methods = join(labels) if len(labels) <= 4 else f"{len(labels)} methods"
        page = {
            "title": f"Learned and forgotten: {methods}" + (f" on {comparison.new.name}" if comparison.new else ""),
            "facts": facts(comparison, date.today()),
            "summary": summarize(report),
            "notes": notes(comparison),
            "sections": make_sections(report, options),
            "left_out": left_out(report),
            "footer": f"Written by finch report {__version__}. Figures: {FIGURES}/*.svg and *.png; numbers: summary.csv.",
        }
        texts = {"summary.csv": summary_csv(comparison)} | {name: _render(name, page) for name in ("report.md", PAGE)}
        for name, text in texts.items():
            files.replace_text(out / name, text)
    return out / PAGE


def _render(name: str, page: Mapping[str, Any]) -> str:
    """The text of the template NAME.j2."""
    finalize = plain if name == PAGE else _markdown
    found = template(f"{name}.j2", "finch.study.report", "finch.evaluation", finalize=finalize)
    return found.render(page=page, figures=FIGURES, colours=COLOURS).strip() + "\n"


def _markdown(value: Any) -> str:
    """Names and numbers as Markdown that shows them as they are, in one line; what the template calls ``safe`` stays."""
    if hasattr(value, "__html__"):
        return printable(str(value))
    text = re.sub(r"[\\`*|<]|(?<!\w)_|_(?!\w)|\](?=[(\[:])", r"\\\g<0>", " ".join(printable(str(value)).split("\n")))
    return re.sub(r"^(?=[#>~=]|[-+]\s)", r"\\", text)
