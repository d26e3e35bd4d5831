"""The configs that come with finch, by name."""

from __future__ import annotations

import re
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
    folder = next((folder for folder in CONFIG_FOLDERS if folder.is_dir()), None)
    if folder is None:
        return {}
    names = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    return {name: path for name, path in names.items() if not name.startswith(GRIDS)}


def find_config(name: str) -> Path:
    """The file that ``--config`` names: a path, or a config of finch.

    Raises:
        UserError: it is neither; names the nearest one.
    """
    if Path(name).is_file():
        return Path(name)
    known = config_names()
    if name.removesuffix(".yaml") in known:
        return known[name.removesuffix(".yaml")]
    suggestion = did_you_mean(name, known, cutoff=0.5)
    raise UserError(
        f"--config {name} is neither a file nor a config of finch{suggestion or '; finch has ' + ', '.join(known)}"
    )


def download_command(folder: Path) -> str | None:
    """The `tune download` command of a config of finch for the model that a folder is named after, with this folder as its output.

    None if no config's header downloads a model of that name.
    """
    for path in config_names().values():
        match = re.search(r"(tune download \S+/(\S+) --output-dir )\S+(.*)", path.read_text(encoding="utf-8"))
        if match is not None and match[2] == folder.name:
            return f"{match[1]}{folder}{match[3]}"
    return None
