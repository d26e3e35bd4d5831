"""What a tuned model forgot of each skill as a page: bars with intervals, and for each skill the answers that moved most, before and after.

The page is one file that needs nothing else. `finch report` shows several models by the same template.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finch.base.files import replace_text
from finch.base.log import printable
from finch.evaluation.skill_changes import Skill, table
from finch.training.style import COLOURS

PAGE = "skills.html"
MEASURE = "the KL divergence from the base on its own answers, in nats per token"
_BY_TEXT = "how much more the base's own answers cost as text, in nats per character"


def write_page(folder: Path, label: str, skills: Sequence[Skill], by_text: bool) -> Path:
    """Writes FOLDER/skills.html, over an earlier one, and returns its path."""
    text = template("skills.html.j2", "finch.evaluation").render(
        title=f"What {label} forgot",
        measure=_BY_TEXT if by_text else MEASURE,
        rows=table(skills, by_text),
        colours=COLOURS,
        **side_by_side({label: skills}),
    )
    replace_text(folder / PAGE, text)
    return folder / PAGE


def side_by_side(models: Mapping[str, Sequence[Skill]]) -> dict[str, Any]:
    """What the template's bars are made of: the skills by name, the most forgotten of all models first, and the end of the scale."""
    every = [each for skills in models.values() for each in skills]
    return {
        "names": list(dict.fromkeys(each.skill for each in sorted(every, key=lambda each: -each.kl))),
        "models": [(label, {each.skill: each for each in skills}) for label, skills in models.items()],
        "largest": max([each.kl_high for each in every], default=0.0) or 1.0,
    }


def plain(value: Any) -> Any:
    """Text without control characters; marked-up text as it is."""
    return printable(str(value)) if isinstance(value, (str, os.PathLike)) and not hasattr(value, "__html__") else value


def template(name: str, *packages: str, finalize: Callable[[Any], Any] = plain) -> Any:
    """A template of the first of the packages that has it, each with its folder ``templates``; a page's values are escaped."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loader = ChoiceLoader([PackageLoader(each) for each in packages])
    options: dict[str, Any] = {"finalize": finalize, "trim_blocks": True, "lstrip_blocks": True}
    options |= {"undefined": StrictUndefined, "autoescape": name.endswith(".html.j2")}
    return Environment(loader=loader, **options).get_template(name)
