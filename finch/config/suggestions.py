"""The nearest known name to a misspelt one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """``", did you mean PREFIX.X?"`` for the nearest known name, whatever its case; an empty string if none is near."""
    by_lower_case = {known_name.lower(): known_name for known_name in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=cutoff)
    return f", did you mean {prefix}{by_lower_case[nearest[0]]}?" if nearest else ""
