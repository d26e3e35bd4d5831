"""GRID.yaml: a config, the values that its keys take, and how the runs are evaluated.

config: qwen3/4B_sft                 a file, or a name of `finch configs`
out: out/sweeps/mine                 each cell is a folder in it
overrides: {epochs: 3}               of all cells
grid:                                a mapping, or a list of them: the union of their cells
  - method: [finch, dft]
    optimizer.lr: [1.0e-5, 2.0e-5]
    seed: [0, 1]
  - label: constant                  optional: the method's name in reports
    method: [sft]
    lr_scheduler: [null]
    seed: [0, 1]
evaluate:                            arguments of `finch evaluate`, after training
  suites: [knowledge, forgetting]
  data_root: data
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from finch.config.instantiate import did_you_mean, find_grid
from finch.config.methods import METHODS, OLD_NAMES, split_name
from finch.config.schema import RECIPES
from finch.errors import UserError
from finch.evaluation.results import NEW
from finch.evaluation.tasks.registry import ALL, SUITES, TASKS
from finch.sweep.cells import (
    ALPHA,
    LABEL,
    LOG,
    LR,
    METHOD,
    RUN,
    SEED,
    SMALL_LR,
    WISE_FT,
    Cell,
    cell_names,
    override_words,
)

KEYS = ("recipe", "config", "out", "overrides", "grid", "evaluate")
CUSTOM = "custom"
"""The suite of lm-eval's tasks that finch does not know."""
_OWN_KEYS = {
    "output_dir": "each cell has its own folder in out",
    "resume_from_checkpoint": "a cell that was cut off is resumed",
    "overwrite": "give overwrite=True on the command line",
    "config": "a grid has one config",
}
_RESERVED_LABELS = {*METHODS, *OLD_NAMES, "base", "pretrained"}  # the last two are the pretrained model in a report

Values = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """The arguments of `finch evaluate`.

    Attributes:
        base: the pretrained model's folder; None: the config's ``checkpointer.checkpoint_dir``.
        suites, tasks: at least one of them is given; tasks may be others of lm-eval, and of the user's own in ``include_path``.
        data_root, limit, include_path, new_task: as `finch evaluate` has them.
    """

    base: str | None = None
    suites: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    data_root: str | None = None
    limit: int | None = None
    include_path: str | None = None
    new_task: str | None = None

    def results(self) -> dict[str, set[str]]:
        """The suites that it writes, each a JSON in RUN/evaluation, and their tasks."""
        suites = ALL if "all" in self.suites else self.suites
        results = {suite: set(SUITES[suite]) for suite in suites}
        for task in self.tasks:
            suite = TASKS[task].suite if task in TASKS else CUSTOM
            results.setdefault(suite, set()).add(task)
        return results

    @property
    def task(self) -> str | None:
        """What the runs learn: the suite of a new task, or the name of one of the user's."""
        tasks = [task for names in self.results().values() for task in names if task in TASKS]
        return next((TASKS[task].suite for task in tasks if TASKS[task].role == NEW), self.new_task)


@dataclass(frozen=True)
class Grid:
    """A grid as read.

    Attributes:
        path: of the file.
        recipe: the name that every cell's must be; None: each cell's is chosen by its model.
        config: a path or a name of `finch configs`.
        out: the cells' parent folder, an absolute path.
        overrides: ``key=value`` of all cells.
        mappings: of key to values; the cells are the union of their products.
        evaluation: None: the cells are not evaluated.
    """

    path: Path
    recipe: str | None
    config: str
    out: Path
    overrides: tuple[str, ...]
    mappings: tuple[Mapping[str, Sequence[Any]], ...]
    evaluation: Evaluation | None

    @property
    def task(self) -> str | None:
        return None if self.evaluation is None else self.evaluation.task


def read_grid(name: str, overrides: Sequence[str] = (), out: str | None = None) -> Grid:
    """
    Args:
        name: a path, or a grid of finch.
        overrides: the command line's, for all cells; ``evaluate.KEY=value`` changes the grid's block ``evaluate``.
        out: in place of the file's.

    Raises:
        UserError: the file cannot be read, has an unknown key, or a value of the wrong kind.
    """
    path = find_grid(name)
    content = _load(path)
    _check_keys(content, KEYS, f"{path}: ")
    for key in ("config", "out", "grid"):
        if not content.get(key):
            raise UserError(f"{path}: {key} is missing; a grid has config, out and grid")
    recipe = content.get("recipe")
    if recipe is not None and recipe not in RECIPES:
        raise UserError(
            f"{path}: recipe={recipe} is not known{did_you_mean(str(recipe), RECIPES) or '; known are ' + ', '.join(RECIPES)}; without the key the "
            "model decides"
        )
    blocks = content["grid"] if isinstance(content["grid"], list) else [content["grid"]]
    mappings = tuple(_mapping(block, path) for block in blocks)
    _check_labels(mappings, path)
    run_overrides = [word for word in overrides if not word.startswith("evaluate.")]
    for word in run_overrides:
        key = word.removeprefix("~").partition("=")[0]
        if any(key in mapping for mapping in mappings):
            raise UserError(f"{word}: the grid has values of {key}; change them in {path}")
        if key in ("output_dir", "resume_from_checkpoint"):
            raise UserError(f"{word}: {_OWN_KEYS[key]}; leave it out")
    fixed = content.get("overrides") or {}
    if not isinstance(fixed, dict):
        raise UserError(f"{path}: overrides must be a mapping of key to value")
    for key in fixed:
        if key in _OWN_KEYS:
            raise UserError(f"{path}: overrides.{key}: {_OWN_KEYS[key]}; leave it out")
    return Grid(
        path=path,
        recipe=recipe,
        config=str(content["config"]),
        out=Path(os.path.abspath(out or content["out"])),
        overrides=(*override_words(fixed), *run_overrides),
        mappings=mappings,
        evaluation=_evaluation(content.get("evaluate"), overrides, path),
    )


def cells_of(grid: Grid) -> list[Cell]:
    """The grid's cells, each once, those that others wait for before them.

    A cell of WiSE-FT waits for the cell with the same values and its method without ``wise_ft`` (sft), which is added where the grid
    does not have it; one with a label counts only where there is no other. A cell of lr_replay waits for the cell that
    ``lr_scheduler.log: {cell: VALUES}`` describes. A cell of small_lr without optimizer.lr is the SFT cell of the rate that
    `finch select-lr` chooses, if the grid evaluates SFT cells without a label.

    Raises:
        UserError: an unknown method; no cell, or several, that a cell of lr_replay could replay.
    """
    all_values = _unique(_products(grid))
    all_values = _unique([*all_values, *_sources_of_wise_ft(all_values)])
    folders = [grid.out / name for name in cell_names(all_values)]
    cells = []
    for values, folder in zip(all_values, folders, strict=True):
        methods = _methods(values)
        if WISE_FT in methods:
            source = folders[all_values.index(_tuned_values(values, all_values))]
            cells.append(Cell(values, folder, WISE_FT, source))
        elif isinstance(values.get(LOG), Mapping):
            source = folders[all_values.index(_replayed(values, all_values))]
            cells.append(Cell(values, folder, RUN, source))
        elif methods == [SMALL_LR] and LR not in values and grid.evaluation is not None:
            candidates = _sft_cells(values, all_values)
            cells.append(
                Cell(values, folder, SMALL_LR, candidates=tuple(folders[all_values.index(each)] for each in candidates))
                if candidates
                else Cell(values, folder)
            )
        else:
            cells.append(Cell(values, folder))
    return _sources_first(cells)


def is_variant(values: Mapping[str, Any], other: Mapping[str, Any], *, but: Iterable[str]) -> bool:
    """Whether two cells have the same values, but for some keys."""
    ignored = set(but)
    one = {key: value for key, value in values.items() if key not in ignored}
    return one == {key: value for key, value in other.items() if key not in ignored}


def _products(grid: Grid) -> list[Values]:
    return [
        dict(zip(mapping, product, strict=True))
        for mapping in grid.mappings
        for product in itertools.product(*mapping.values())
    ]


def _unique(cells: Sequence[Values]) -> list[Values]:
    unique: list[Values] = []
    for values in cells:
        if values not in unique:
            unique.append(values)
    return unique


def _methods(values: Mapping[str, Any]) -> list[str]:
    return split_name(str(values[METHOD])) if values.get(METHOD) is not None else []


def _tuned_values(values: Values, cells: Sequence[Values]) -> Values:
    """Of the run whose weights a cell of WiSE-FT interpolates: one without a label, else one that differs in its label alone."""
    methods = [name for name in _methods(values) if name != WISE_FT] or ["sft"]
    tuned = {**{key: value for key, value in values.items() if key not in (ALPHA, LABEL)}, METHOD: "+".join(methods)}
    if tuned in cells:
        return tuned
    return next((other for other in cells if is_variant(other, tuned, but=(LABEL,))), tuned)


def _sources_of_wise_ft(cells: Sequence[Values]) -> list[Values]:
    return [_tuned_values(values, cells) for values in cells if WISE_FT in _methods(values)]


def _replayed(values: Values, cells: Sequence[Values]) -> Values:
    """The cell that one of lr_replay replays; one with a label only where the label is named."""
    described = values[LOG].get("cell")
    if set(values[LOG]) != {"cell"} or not isinstance(described, Mapping):
        raise UserError(
            f"grid.{LOG}={values[LOG]} must be a run's folder, or {{cell: VALUES}} with values of a cell of the grid"
        )
    matching = [
        other
        for other in cells
        if other != values
        and LOG not in other
        and other.get(LABEL) == described.get(LABEL)
        and all(other.get(key) == value for key, value in described.items())
    ]
    shared = [key for key in values if key not in (METHOD, LABEL, LOG, *described)]
    closest = [other for other in matching if all(other.get(key) == values[key] for key in shared if key in other)]
    chosen = closest if len(closest) == 1 else matching
    if len(chosen) != 1:
        number = "no cell" if not chosen else f"{len(chosen)} cells"
        text = ", ".join(f"{key}: {value}" for key, value in described.items())
        raise UserError(
            f"grid.{LOG}: {number} of the grid has {{{text}}}; give values that one cell has, and its label if it has one"
        )
    return chosen[0]


def _sft_cells(values: Values, cells: Sequence[Values]) -> list[Values]:
    """The SFT cells without a label of any learning rate and seed and of the same other values."""
    return [
        other
        for other in cells
        if other.get(METHOD) == "sft"
        and LABEL not in other
        and LR in other
        and is_variant(values, other, but=(METHOD, LABEL, LR, SEED))
    ]


def _sources_first(cells: Sequence[Cell]) -> list[Cell]:
    ordered: list[Cell] = []
    left = list(cells)
    while left:
        placed = {cell.folder for cell in ordered}
        ready = [cell for cell in left if placed.issuperset(cell.waits_for)]
        if not ready:
            raise UserError(
                f"{left[0].name} waits for {left[0].waits_for[0].name}, which waits for it; change the grid"
            )
        ordered += ready
        left = [cell for cell in left if cell not in ready]
    return ordered


def _load(path: Path) -> Values:
    from omegaconf import OmegaConf

    try:
        content = OmegaConf.to_container(OmegaConf.load(path))  # ${KEY} is the config's: resolved with it
    except Exception as error:  # OSError, the YAML reader's and omegaconf's
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        reason = str(error).splitlines()[0] if problem is None or mark is None else f"{problem} in line {mark.line + 1}"
        raise UserError(f"{path} cannot be read as YAML: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a mapping; a grid has config, out and grid")
    return {str(key): value for key, value in content.items()}


def _check_keys(content: Mapping[str, Any], known: Sequence[str], prefix: str) -> None:
    for key in content:
        if key not in known:
            suggestion = did_you_mean(key, known) or f"; known are {', '.join(known)}"
            raise UserError(f"{prefix}{key} is not a key of a grid{suggestion}")


def _mapping(block: Any, path: Path) -> dict[str, list[Any]]:
    if not isinstance(block, dict) or not block:
        raise UserError(f"{path}: grid must be a mapping of key to a list of values, or a list of such mappings")
    mapping = {str(key): values for key, values in block.items()}
    if LABEL in mapping:
        mapping[LABEL] = [_label(mapping[LABEL], path)]
    for key, values in mapping.items():
        if key in _OWN_KEYS:
            raise UserError(f"{path}: grid.{key}: {_OWN_KEYS[key]}; leave it out")
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid.{key}={values} must be a list of values, such as [{values}]")
    methods = [name for method in mapping.get(METHOD, []) for name in split_name(str(method))]
    mapping_methods = mapping.get(METHOD)
    if mapping_methods is not None:  # an earlier name and its present one are one cell
        mapping[METHOD] = [OLD_NAMES.get(str(name), name) for name in mapping_methods]
    if ALPHA in mapping and not (methods and all(WISE_FT in split_name(str(one)) for one in mapping[METHOD])):
        raise UserError(f"{path}: grid.{ALPHA} is WiSE-FT's; give it a mapping of its own with method: [wise_ft]")
    for alpha in mapping.get(ALPHA, []):
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
            raise UserError(f"{path}: grid.{ALPHA}={alpha} must be a number in [0, 1]: the tuned model's share")
    return mapping


def _label(label: Any, path: Path) -> str:
    if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", label):
        raise UserError(
            f"{path}: grid.{LABEL}={label} must be one name of letters, digits, _, - and ., which begins with a letter, such as constant"
        )
    if label.lower() in _RESERVED_LABELS:
        raise UserError(f"{path}: grid.{LABEL}={label} has a meaning of its own in reports; give another name")
    return label


def _check_labels(mappings: Sequence[Mapping[str, Sequence[Any]]], path: Path) -> None:
    """A label stands for one method: its cells are one front of a report."""
    methods: dict[str, set[str]] = {}
    for mapping in mappings:
        for label in mapping.get(LABEL, ()):
            methods.setdefault(label, set()).update(str(one) for one in mapping.get(METHOD, [None]))
    for label, names in methods.items():
        if len(names) > 1:
            raise UserError(
                f"{path}: grid.{LABEL}={label} has several methods ({', '.join(sorted(names))}); give each a mapping and a label of its own"
            )


def _evaluation(block: Any, overrides: Sequence[str], path: Path) -> Evaluation | None:
    from omegaconf import OmegaConf

    changes = [word.removeprefix("evaluate.") for word in overrides if word.startswith("evaluate.")]
    if block is None and not changes:
        return None
    if block is not None and not isinstance(block, dict):
        raise UserError(f"{path}: evaluate must be a mapping, such as {{suites: [forgetting]}}")
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(changes))
    content = {**(block or {}), **given}
    _check_keys(content, [field.name for field in fields(Evaluation)], f"{path}: evaluate.")
    for key in ("suites", "tasks"):
        names = content.get(key) or ()
        content[key] = tuple(names.split(",") if isinstance(names, str) else map(str, names))
    for suite in content["suites"]:
        if suite not in (known := [*SUITES, "all"]):
            hint = did_you_mean(suite, known) or f"; known are {', '.join(known)}"
            raise UserError(f"{path}: evaluate.suites: {suite} is not known{hint}")
    if not content["suites"] and not content["tasks"]:
        raise UserError(f"{path}: evaluate needs suites or tasks, such as suites: [forgetting]")
    limit = content.get("limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"{path}: evaluate.limit={limit} must be a number of documents of at least 1")
    for key in ("base", "data_root", "include_path", "new_task"):
        if content.get(key) is not None:
            content[key] = str(content[key])
    return Evaluation(**content)
