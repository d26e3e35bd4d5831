"""Names: the configs that come with finch, and the nearest known word to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from finch.errors import UserError

CONFIG_FOLDERS = [
    Path(__file__).parents[1] / "configs",  # in an installed wheel
    Path(__file__).parents[2] / "configs",  # in a checkout
]


def config_names() -> dict[str, Path]:
    """The configs that come with finch: name, such as ``stories260k/tofu_finch``, to file."""
    folder = next((folder for folder in CONFIG_FOLDERS if folder.is_dir()), None)
    if folder is None:
        return {}
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_config(name: str) -> Path:
    """The file behind ``--config``: a path, or the name of a config of finch.

    Raises:
        UserError: neither; names the nearest ones.
    """
    if Path(name).is_file():
        return Path(name)
    known = config_names()
    if name.removesuffix(".yaml") in known:
        return known[name.removesuffix(".yaml")]
    near = did_you_mean(name, known, cutoff=0.5)
    raise UserError(
        f"--config {name} is neither a file nor a config of finch{near or '; finch has ' + ', '.join(known)}"
    )


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """``", did you mean PREFIX.X?"`` for the nearest known word, whatever its case; an empty string if none is near."""
    by_lower_case = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=cutoff)
    return f", did you mean {prefix}{by_lower_case[near[0]]}?" if near else ""
