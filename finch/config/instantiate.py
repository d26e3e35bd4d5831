"""What a config names: components by the dotted path under ``_component_``, and configs and grids by their file. Errors name the key and
the nearest known name."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib.util
import io
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch.base import files
from finch.base.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_FOLDERS = [
    Path(__file__).parents[1] / "configs",  # in an installed wheel
    Path(__file__).parents[2] / "configs",  # in a checkout
]

GRIDS = "sweeps/"
"""The folder of grids of runs, which are no configs themselves."""

MAX_SIZE, MAX_DEPTH = 2**20, 50
"""The limits of a config: bytes, and values in values; OmegaConf and the YAML reader's C code recurse."""
# With dots in front it is relative, as OmegaConf has it; behind a backslash it is text.
_REFERENCE = re.compile(r"(?<!\\)\$\{(\.*)([\w-]+(?:[.\[][\w-]+\]?)*)\}")


def component_of(node: Any) -> str | None:
    """The dotted path under ``_component_``, or of torchtune's short form ``loss: torch.nn.CrossEntropyLoss``; None without one."""
    if isinstance(node, str):
        return node
    return node.get("_component_") if isinstance(node, Mapping) else None


def find_users_components() -> None:
    """Lets a config that the user names import from the current folder as well, after everything else."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def locate(path: str, key: str) -> Any:
    """The object at a dotted path.

    Raises:
        UserError: it does not exist; names the nearest attribute.
    """
    found: Any = None
    try:
        for name in itertools.accumulate(path.split("."), "{}.{}".format):
            # An attribute comes before a module of its name, as the import statement has it.
            found = getattr(found, name.rpartition(".")[2], None) or importlib.import_module(name)
        return found
    except Exception as error:  # anything that a user's module raises concerns this key
        parent, _, name = path.rpartition(".")
        attributes = vars(sys.modules[parent]) if parent in sys.modules else {}
        hint = did_you_mean(name, [attribute for attribute, value in attributes.items() if callable(value)])
        # The module is there, and something that it imports is broken.
        if isinstance(error, ImportError) and not isinstance(error, ModuleNotFoundError):
            hint = f" ({first_line(error)}); check that its package fits the installed ones"
        raise UserError(
            f"{key}._component_={path} does not exist{hint or '; check the dotted path and that its package is installed'}"
        ) from error


def arguments_in_source(path: str, *importers: str) -> list[str] | None:
    """The names of a component's arguments, as its source has them; nothing is imported. None: it accepts any, or they are not plain to see.
    ``importers``: the paths under which sources have named it so far."""
    if path in importers:  # a module that its own package imports
        return None
    package, _, name = path.rpartition(".")
    top, *parts = package.split(".")
    try:
        spec = importlib.util.find_spec(top)  # of a package itself, which imports nothing
        place = Path(str(spec and spec.origin)).parent.joinpath(*parts)
        file = next(each for each in (place / "__init__.py", place.with_suffix(".py")) if each.is_file())
        nodes = ast.walk(_syntax(file))  # the outermost first
    except (ImportError, ValueError, StopIteration, OSError, SyntaxError):
        return None  # which is named where it is imported
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    own = package if file.name == "__init__.py" else package.rpartition(".")[0]
                    origin = importlib.util.resolve_name("." * node.level + (node.module or ""), own)
                    return arguments_in_source(f"{origin}.{alias.name}", path, *importers)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            function = node if isinstance(node, ast.FunctionDef) else inner[0] if inner else None
            if function is None or node.decorator_list or function.args.kwarg is not None:
                return None
            arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            return [each.arg for each in arguments if each.arg != "self"]
    return None


@functools.cache
def _syntax(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def build(node: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """What a block's component returns; as ``torchtune.config.instantiate``, which would also look for it in the current folder.

    Raises:
        UserError: the component does not exist, rejects its arguments, or needs a file that is missing.
    """
    from omegaconf import DictConfig, OmegaConf

    node = node if isinstance(node, DictConfig) else OmegaConf.create(node)
    try:
        arguments: Any = OmegaConf.to_container(node, resolve=True)
        return locate(arguments.pop("_component_"), key)(*args, **{**arguments, **kwargs})
    # It is a ValueError as well, and names its key already.
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
    """The keys of a config's file. Raises UserError: it is no YAML, no mapping, too deep, or too large once its references are replaced."""
    import yaml
    from omegaconf import DictConfig, OmegaConf

    try:
        content = files.read_bytes(path)
        if len(content) > MAX_SIZE:
            raise ValueError(f"it has more than {MAX_SIZE:,} bytes")
        depth = 0
        # Reading events does not recurse: the depth is known before something that does reads the file.
        for event in yaml.parse(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        cfg = OmegaConf.load(io.StringIO(content.decode()))
        if not isinstance(cfg, DictConfig):
            raise TypeError("it has no keys")
        # For its errors alone: references that have no end, or that multiply.
        replace_references(OmegaConf.to_container(cfg))
    except Exception as error:  # the YAML reader's and omegaconf's have no common class
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        reason = first_line(error) if problem is None or mark is None else f"{problem} in line {mark.line + 1}"
        raise UserError(f"{path} cannot be read as YAML ({reason}); correct the file") from error
    return cfg


def replace_references(blocks: Any) -> Any:
    """A config's keys with what ``${other.key}`` refers to in its place; all else that begins with ``${`` stays as it is. Raises ValueError
    where that has no end, or makes more than ``MAX_SIZE`` characters and values."""
    left = MAX_SIZE

    def replaced(node: Any, place: tuple[str, ...], depth: int) -> Any:
        nonlocal left
        left -= 1 + (len(node) if isinstance(node, str) else 0)
        if left < 0 or depth > 2 * MAX_DEPTH:
            raise ValueError("it is too large, or refers to itself")
        if isinstance(node, dict):
            return {str(key): replaced(value, (*place, str(key)), depth + 1) for key, value in node.items()}
        if isinstance(node, list):
            return [replaced(value, (*place, str(number)), depth + 1) for number, value in enumerate(node)]
        if not isinstance(node, str):
            return node

        def referred(match: re.Match[str]) -> Any:
            dots, names = len(match[1]), re.findall(r"[^.\[\]]+", match[2])
            found, names = blocks, [*place[: max(0, len(place) - dots) if dots else 0], *names]
            try:
                for name in names:
                    found = found[int(name) if isinstance(found, list) else name]
            except (LookupError, TypeError, ValueError):
                return match[0]
            # A relative reference in what is found counts from the place where that stands.
            return replaced(found, tuple(names), depth + 1)

        if whole := _REFERENCE.fullmatch(node):
            return referred(whole)
        text = _REFERENCE.sub(lambda match: str(referred(match)), node)
        left -= len(text)
        return text

    return replaced(blocks, (), 0)


def config_names() -> dict[str, Path]:
    """The file of each config that comes with finch, by its name, such as ``stories260k/tofu_finch``."""
    return {name: path for name, path in _packaged_files().items() if not name.startswith(GRIDS)}


def grid_names() -> dict[str, Path]:
    """The file of each grid that comes with finch, by its name, such as ``sweeps/qwen3_4B_knowledge``."""
    return {name: path for name, path in _packaged_files().items() if name.startswith(GRIDS)}


def find_config(name: str) -> Path:
    """The file that a command's CONFIG names: a path, or a config of finch.

    Raises:
        UserError: it is neither; names the nearest one.
    """
    if name.startswith(GRIDS) and name in grid_names() and not Path(name).is_file():
        raise UserError(f"{name} is a grid: finch sweep {name}")
    return _find(name, [name], config_names(), f"{name} is neither a file nor a config of finch")


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


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """``", did you mean PREFIX.X?"`` for the nearest known name, whatever its case; an empty string if none is near."""
    by_lower_case = {known_name.lower(): known_name for known_name in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=cutoff)
    return f", did you mean {prefix}{by_lower_case[nearest[0]]}?" if nearest else ""
