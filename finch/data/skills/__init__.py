"""Rows of twelve skills, of finch's own writing: what a model could do before it is tuned. Needs only the standard library."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any


def skill_rows(number: int | None = None) -> list[dict[str, Any]]:
    """The first ``number`` rows, of each ``skill`` one in turn; None: all.

    A row has ``question``, or ``messages`` that end with a user's turn, and where one answer is right ``choices`` and ``answer``. Rows of safety say
    whether they are ``harmful``.
    """
    files = sorted(Path(__file__).parent.glob("*.jsonl"))
    skills = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    return [row for turn in zip_longest(*skills) for row in turn if row is not None][:number]
