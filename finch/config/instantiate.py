"""What a config names: components by the dotted path under ``_component_``, and configs and grids by their file. Errors name the key and
the nearest known name."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_FOLDERS = [
    Path(__file__).parents[1] / "configs",  # in an installed wheel
    Path(__file__).parents[2] / "configs",  # in a checkout
]

GRIDS = "sweeps/"
"""The folder of grids of runs, which are no configs themselves."""


def component_of(node: Any) -> str | None:
    """The dotted path under ``_component_``, or of torchtune's short form ``loss: torch.nn.CrossEntropyLoss``; None without one."""
    if isinstance(node, str):
        return node
    return node.get("_component_") if isinstance(node, Mapping) else None


def locate(path: str, key: str) -> Any:
    """The object at a dotted path.

    Raises:
        UserError: it does not exist; names the nearest attribute.
    """
    from torchtune.config._errors import InstantiationError
    from torchtune.config._utils import _get_component_from_path

    try:
        return _get_component_from_path(path)
    except (InstantiationError, ValueError) as error:
        parent, _, name = path.rpartition(".")
        attributes = vars(sys.modules[parent]) if parent in sys.modules else {}
        hint = did_you_mean(name, [attribute for attribute, value in attributes.items() if callable(value)])
        if isinstance(error.__cause__, ImportError) and not isinstance(
            error.__cause__, ModuleNotFoundError
        ):  # it is broken
            hint = f" ({first_line(error.__cause__)}); check that its package fits the installed ones"
        raise UserError(
            f"{key}._component_={path} does not exist{hint or '; check the dotted path and that its package is installed'}"
        ) from error


def build(node: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """``torchtune.config.instantiate`` whose failures name the config key.

    Raises:
        UserError: the component does not exist, rejects its arguments, or needs a file that is missing.
    """
    from omegaconf import DictConfig, OmegaConf
    from torchtune import config

    node = node if isinstance(node, DictConfig) else OmegaConf.create(node)
    try:
        return config.instantiate(node, *args, **kwargs)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{key}: file not found: {error.filename or first_line(error)}; check the path") from error
    except ValueError as error:
        raise UserError(f"{key}: {first_line(error)}") from error
    except Exception as error:  # anything a user's component raises concerns this key
        raise UserError(
            f"{key}: {component_of(node)} cannot be built: {type(error).__name__}: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")


def load_config(path: Path) -> DictConfig:
    """The keys of a config's file. Raises UserError: it is no YAML, or no mapping."""
    from omegaconf import DictConfig, OmegaConf

    try:
        cfg = OmegaConf.load(path)
        if not isinstance(cfg, DictConfig):
            raise TypeError("it has no keys")
    except Exception as error:  # the YAML reader's and omegaconf's have no common class
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        reason = first_line(error) if problem is None or mark is None else f"{problem} in line {mark.line + 1}"
        raise UserError(f"{path} cannot be read as YAML ({reason}); correct the file") from error
    return cfg


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
    folder = next((folder for folder in CONFIG_FOLDERS if folder.is_dir()), CONFIG_FOLDERS[0])
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def _find(name: str, candidates: Iterable[str], known: Mapping[str, Path], message: str) -> Path:
    with contextlib.suppress(OSError):  # a name that no system takes
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


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """``", did you mean PREFIX.X?"`` for the nearest known name, whatever its case; an empty string if none is near."""
    by_lower_case = {known_name.lower(): known_name for known_name in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=cutoff)
    return f", did you mean {prefix}{by_lower_case[nearest[0]]}?" if nearest else ""
