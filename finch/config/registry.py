"""The configs that come with finch, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from finch.config.suggestions import did_you_mean
from finch.errors import UserError

CONFIG_FOLDERS = [
    Path(__file__).parents[1] / "configs",  # in an installed wheel
    Path(__file__).parents[2] / "configs",  # in a checkout
]

GRIDS = "sweeps/"
"""The folder of grids of runs, which are no configs themselves."""


def config_names() -> dict[str, Path]:
    """The file of each config that comes with finch, by its name, such as ``stories260k/tofu_finch``."""
    return {name: path for name, path in _packaged_files().items() if not name.startswith(GRIDS)}


def grid_names() -> dict[str, Path]:
    """The file of each grid that comes with finch, by its name, such as ``sweeps/qwen3_4B_knowledge``."""
    return {name: path for name, path in _packaged_files().items() if name.startswith(GRIDS)}


def find_config(name: str) -> Path:
    """The file that ``--config`` names: a path, or a config of finch.

    Raises:
        UserError: it is neither; names the nearest one.
    """
    return _find(name, [name], config_names(), f"--config {name} is neither a file nor a config of finch")


def find_grid(name: str) -> Path:
    """The file of a grid: a path, or a grid of finch, also without its folder.

    Raises:
        UserError: it is neither; names the nearest one.
    """
    return _find(name, [name, f"{GRIDS}{name}"], grid_names(), f"{name} is neither a file nor a grid of finch")


def _packaged_files() -> dict[str, Path]:
    folder = next((folder for folder in CONFIG_FOLDERS if folder.is_dir()), None)
    paths = [] if folder is None else sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths if folder is not None}


def _find(name: str, candidates: Iterable[str], known: Mapping[str, Path], message: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    for candidate in candidates:
        if candidate.removesuffix(".yaml") in known:
            return known[candidate.removesuffix(".yaml")]
    suggestion = did_you_mean(name, known, cutoff=0.5)
    raise UserError(f"{message}{suggestion or '; finch has ' + ', '.join(known)}")


def download_command(folder: Path) -> str | None:
    """The `tune download` command of a config of finch for the model that a folder is named after, with this folder as its output.

    None if no config's header downloads a model of that name.
    """
    for path in config_names().values():
        match = re.search(r"(tune download \S+/(\S+) --output-dir )\S+(.*)", path.read_text(encoding="utf-8"))
        if match is not None and match[2] == folder.name:
            return f"{match[1]}{folder}{match[3]}"
    return None
