"""GRID.yaml: a config, the values that its keys take, and how the runs are evaluated; the cells, each one run.

config: qwen3/4B_sft                 a file, or a name of `finch list configs`
out: out/sweeps/mine                 each cell is a folder in it
keep: all                            best or last: of a trained cell's models only that one, and no state to resume from
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
  select_by: knowledge_validation    optional: each epoch is scored on this suite, and `best` is the best one
  data_root: data
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from finch.base import hub, run_files
from finch.base.errors import UserError, writing
from finch.base.files import make_folder, replace_text
from finch.config.instantiate import did_you_mean, find_grid, load_config
from finch.config.methods import METHODS, split_name
from finch.evaluation.custom_tasks import CUSTOM
from finch.evaluation.results import NEW
from finch.evaluation.tasks.registry import ALL, SUITES, TASKS, VALIDATION, select_tasks

METHOD = "method"
LABEL = "label"
"""A grid's name for the method of some cells, in folders and reports; no key of the config."""
LR = "optimizer.lr"
SEED = "seed"
ALPHA = "alpha"
"""A key of WiSE-FT's cells only: the tuned model's share."""
LOG = "lr_scheduler.log"
DEFAULT_ALPHA = 0.5

RUN, WISE_FT, SMALL_LR = "run", "wise_ft", "small_lr"
"""Kinds of cells: a training run; an interpolation of a trained cell; a link to the trained cell that `finch report --select-lr` chooses."""

WAITING, RUNNING, FINISHED, EVALUATED, FAILED = "waiting", "running", "finished", "evaluated", "failed"
"""A cell's status in cell.json."""


KEYS = ("recipe", "config", "out", "keep", "overrides", "grid", "evaluate")
KEEP = ("all", "best", "last")
_OWN_KEYS = {
    "output_dir": "each cell has its own folder in out",
    "resume_from_checkpoint": "a cell that was cut off is resumed",
    "overwrite": "give overwrite=True on the command line",
    "config": "a grid has one config",
}
_RESERVED_LABELS = {*METHODS, "base", "pretrained"}  # the last two are the pretrained model in a report

Values = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        values: of the grid's keys.
        folder: RUN.
        kind: ``run``, ``wise_ft`` or ``small_lr``.
        dependencies: folders of the cells that come first: WiSE-FT's tuned model; the run that lr_replay replays; the SFT cells
            that small_lr's learning rate is chosen from.
        adapted: overrides that follow from the values, which the grid does not name.
        rows: hashes of the local files of its rows, by the config's key.
    """

    values: Mapping[str, Any]
    folder: Path
    kind: str = RUN
    dependencies: tuple[Path, ...] = ()
    adapted: tuple[str, ...] = ()
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def source(self) -> Path | None:
        """The one cell that WiSE-FT or lr_replay needs."""
        return self.dependencies[0] if self.dependencies and self.kind != SMALL_LR else None

    @property
    def log(self) -> Path:
        """The output of the cell's processes."""
        return self.folder.with_name(f"{self.name}.log")

    @property
    def status(self) -> Path:
        """How far the cell's process is, while it runs here."""
        return self.folder.with_name(f"{self.name}.status.json")

    def overrides(self) -> list[str]:
        """``key=value`` of the cell's run, its folder included."""
        words = override_words({key: value for key, value in self.values.items() if key not in (ALPHA, LOG, LABEL)})
        if LOG in self.values:
            words.append(f"{LOG}={self.values[LOG] if self.source is None else self.source}")
        return [*words, *self.adapted, f"output_dir={self.folder}"]


def override_words(block: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``key=value`` of each value. A mapping's keys are dotted, since a block on the command line would replace only a component's name."""
    words: list[str] = []
    for key, value in block.items():
        if isinstance(value, Mapping) and value:
            words += override_words(value, f"{prefix}{key}.")
        else:
            is_json = value is None or isinstance(value, (list, dict, bool))  # YAML's flow style
            words.append(f"{prefix}{key}={json.dumps(value) if is_json else value}")
    return words


def cell_names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """A folder's name for each cell's values, such as ``finch_lr2e-5_seed0``, of letters that neither shells nor lm-eval's arguments treat
    specially. A label replaces the method. Of a key only the last part is written, unless two cells would then have the same name.
    """
    short = [_name(values, is_full=False) for values in cells]
    both = zip(short, cells, strict=True)
    names = [name if short.count(name) == 1 else _name(values, is_full=True) for name, values in both]
    for index, name in enumerate(names):  # values that differ only in what a name leaves out
        if name in names[:index]:
            names[index] = f"{name}_{names[:index].count(name) + 1}"
    return names


def _name(values: Mapping[str, Any], *, is_full: bool) -> str:
    parts = [_as_text(values[key]) for key in (LABEL, METHOD) if key in values][:1]
    for key, value in values.items():
        if key not in (LABEL, METHOD):
            text = _as_text(value)
            key = key if is_full else key.removesuffix("._component_").rpartition(".")[2]
            parts.append(f"{_as_text(key)}{'' if re.match('-?[0-9]', text) else '-'}{text}")
    return "_".join(parts) or "run"


def _as_text(value: Any) -> str:
    """``2e-5`` of 2e-05, ``finch-seed1`` of {cell: {method: finch, seed: 1}}."""
    if isinstance(value, Mapping):
        inner = value.get("cell", value)
        own = (LABEL, METHOD)
        return "-".join(f"{'' if key in own else _as_text(key)}{_as_text(each)}" for key, each in inner.items())
    if isinstance(value, float):
        return re.sub(r"e([+-])0+", r"e\1", f"{value:g}").replace("e+", "e")
    if isinstance(value, int):
        return str(value)
    _, slash, text = str(value).rpartition("/")
    if not slash and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text):  # a component: its last name
        text = text.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-") or "empty"


def write_cell(cell: Cell, *, task: str | None, status: str, source: Path | None = None) -> None:
    """Writes RUN/cell.json, and creates RUN.

    Args:
        task: the new task's suite or name.
        source: replaces the cell's own.
    """
    source = source or cell.source
    content = {
        "values": dict(cell.values),
        "task": task,
        "source": None if source is None else f"../{source.name}",
        "status": status,
        **({"rows": dict(cell.rows)} if cell.rows else {}),
    }
    with writing(f"{cell.folder}", "give another folder: out"):
        make_folder(cell.folder)
        replace_text(cell.folder / run_files.CELL, json.dumps(content, indent=2) + "\n")


def read_cell(folder: Path) -> dict[str, Any]:
    """The content of RUN/cell.json: ``values``, ``task``, ``source``, ``status`` and ``rows``.

    Raises:
        UserError: the file is missing or broken.
    """
    path = folder / run_files.CELL
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        others = ("task", "source", "status", "rows")
        return {"values": dict(content["values"]), **{key: content.get(key) for key in others}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); start finch sweep again, it writes the file") from error


@dataclass(frozen=True)
class Evaluation:
    """The arguments of `finch evaluate`.

    Attributes:
        base: the pretrained model's folder. None: the config's ``checkpointer.checkpoint_dir``.
        suites, tasks: at least one of both. Both: the tasks are those of the suites that are wanted. Tasks alone may be any of lm-eval's, and
            the user's own in ``include_path``.
        select_by: the suite of the new task's validation rows that chooses a run's epoch; it is one of ``suites``, or its task of ``tasks``.
            None: the run's own ``best``.
    """

    base: str | None = None
    suites: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    data_root: str | None = None
    limit: int | None = None
    include_path: str | None = None
    new_task: str | None = None
    select_by: str | None = None

    @property
    def task(self) -> str | None:
        """What the runs learn: a suite, or the name of a task of the user's."""
        tasks = [task for names in self.results().values() for task in names if task in TASKS]
        return next((TASKS[task].suite for task in tasks if TASKS[task].role == NEW), self.new_task)

    def results(self) -> dict[str, set[str]]:
        """The suites, each a JSON file in RUN/evaluation, and their tasks."""
        suites = [each for suite in self.suites for each in (ALL if suite == "all" else (suite,))]
        tasks = self.tasks or [task for suite in suites for task in SUITES[suite]]
        results: dict[str, set[str]] = {}
        for task in tasks:
            results.setdefault(TASKS[task].suite if task in TASKS else CUSTOM, set()).add(task)
        return results


@dataclass(frozen=True)
class Grid:
    """A grid as read.

    Attributes:
        recipe: every cell's. None: the cell's model decides.
        config: a path or a name of `finch list configs`.
        out: the cells' parent folder, an absolute path.
        overrides: ``key=value`` of all cells.
        mappings: of key to values. The cells are the union of their products.
        evaluation: None: the cells are not evaluated.
    """

    path: Path
    recipe: str | None
    config: str
    out: Path
    overrides: tuple[str, ...]
    mappings: tuple[Mapping[str, Sequence[Any]], ...]
    evaluation: Evaluation | None
    keep: str = "all"

    @property
    def task(self) -> str | None:
        """What the runs learn: a suite, or the name of a task of the user's."""
        return None if self.evaluation is None else self.evaluation.task

    @property
    def overwrites(self) -> bool:
        """Whether earlier runs are replaced."""
        return any(word.lower() == "overwrite=true" for word in self.overrides)


def read_grid(name: str, overrides: Sequence[str] = (), out: str | None = None) -> Grid:
    """
    Args:
        name: a path, or a grid of finch.
        overrides: the command line's, for all cells. ``evaluate.KEY=value`` changes the grid's block ``evaluate``.
        out: replaces the file's.

    Raises:
        UserError: the file cannot be read, has an unknown key, or a value of the wrong kind.
    """
    path = find_grid(name)
    content = _load(path)
    try:
        grid = _as_grid(content, path, overrides, out)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    for word in overrides:
        key = word.removeprefix("~").partition("=")[0]
        if key in KEYS:
            raise UserError(
                f"{word}: {key} is a key of the grid, not of its runs; change it in {path}, or give --out DIR for out"
            )
        if any(key in mapping for mapping in grid.mappings):
            raise UserError(f"{word}: the grid has values of {key}; change them in {path}")
        if key in ("output_dir", "resume_from_checkpoint"):
            raise UserError(f"{word}: {_OWN_KEYS[key]}; leave it out")
    return grid


def _as_grid(content: Values, path: Path, words: Sequence[str], out: str | None) -> Grid:
    from finch.config.schema import RECIPES  # here, since reports import this module and need no schema

    _check_keys(content, KEYS)
    for key in ("config", "out", "grid"):
        if not content.get(key):
            raise UserError(f"{key} is missing; a grid has config, out and grid")
    recipe, keep, fixed = content.get("recipe"), content.get("keep", "all"), content.get("overrides") or {}
    if recipe is not None and recipe not in RECIPES:
        known = did_you_mean(str(recipe), RECIPES) or f"; known are {', '.join(RECIPES)}"
        raise UserError(f"recipe={recipe} is not known{known}; without the key the model decides")
    if keep not in KEEP:
        raise UserError(f"keep={keep} is not known; give {', '.join(KEEP)}")
    if not isinstance(fixed, dict):
        raise UserError("overrides must be a mapping of key to value")
    _check_own_keys(fixed, "overrides")
    mappings = tuple(map(_mapping, content["grid"] if isinstance(content["grid"], list) else [content["grid"]]))
    _check_labels(mappings)
    changes = [word.removeprefix("evaluate.") for word in words if word.startswith("evaluate.")]
    evaluation = _evaluation(content.get("evaluate"), changes)
    if keep == "last" and evaluation is not None and evaluation.select_by is not None:
        raise UserError("keep=last removes the epochs that evaluate.select_by chooses from; give best or all")
    given = (*override_words(fixed), *(word for word in words if not word.startswith("evaluate.")))
    return Grid(
        path=path,
        recipe=recipe,
        config=str(content["config"]),
        out=Path(os.path.abspath(out or content["out"])),
        # Cells that start on other days start from the same commit.
        overrides=tuple(hub.local_paths({}, given)[1]),
        mappings=mappings,
        evaluation=evaluation,
        keep=keep,
    )


def cells_of(grid: Grid) -> list[Cell]:
    """The grid's cells, each once, after those that they depend on.

    A cell of WiSE-FT depends on the cell with the same values and its method without ``wise_ft`` (sft), which is added where the grid
    does not have it. One with a label is used only where there is no other. A cell of lr_replay depends on the cell that
    ``lr_scheduler.log: {cell: VALUES}`` describes. A cell of small_lr without optimizer.lr is the SFT cell of the rate that
    `finch report --select-lr` chooses, if the grid evaluates SFT cells without a label.

    Raises:
        UserError: an unknown method; no cell, or several, that a cell of lr_replay could replay.
    """
    all_values = _unique(
        dict(zip(mapping, product, strict=True))
        for mapping in grid.mappings
        for product in itertools.product(*mapping.values())
    )
    sources = [_tuned_values(values, all_values) for values in all_values if WISE_FT in _methods(values)]
    all_values = _unique([*all_values, *sources])
    folders = [grid.out / name for name in cell_names(all_values)]
    cells = []
    for values, folder in zip(all_values, folders, strict=True):
        kind, needed, methods = RUN, [], _methods(values)
        if WISE_FT in methods:
            kind, needed = WISE_FT, [_tuned_values(values, all_values)]
        elif isinstance(values.get(LOG), Mapping):
            needed = [_replayed(values, all_values)]
        elif methods == [SMALL_LR] and LR not in values and grid.evaluation is not None:
            needed = _sft_cells(values, all_values)
            kind = SMALL_LR if needed else RUN
        cells.append(Cell(values, folder, kind, tuple(folders[all_values.index(each)] for each in needed)))
    dependencies = {cell.folder: cell.dependencies for cell in cells}

    def depth(folder: Path) -> int:
        return max((1 + depth(each) for each in dependencies[folder]), default=0)

    # No circle: a replayed cell replays none, small_lr needs plain runs, and WiSE-FT a cell with one method less.
    return sorted(cells, key=lambda cell: depth(cell.folder))


def _is_variant(values: Mapping[str, Any], other: Mapping[str, Any], *, but: Sequence[str]) -> bool:
    """Whether two cells have the same values, except for some keys."""
    one, two = ({key: value for key, value in each.items() if key not in but} for each in (values, other))
    return one == two


def _unique(cells: Iterable[Values]) -> list[Values]:
    unique: list[Values] = []
    for values in cells:
        if values not in unique:
            unique.append(values)
    return unique


def _methods(values: Mapping[str, Any]) -> list[str]:
    return split_name(str(values[METHOD])) if values.get(METHOD) is not None else []


def _tuned_values(values: Values, cells: Sequence[Values]) -> Values:
    """Of the run whose weights a cell of WiSE-FT interpolates: one without a label, else one that differs only in its label."""
    methods = [name for name in _methods(values) if name != WISE_FT] or ["sft"]
    tuned = {**{key: value for key, value in values.items() if key not in (ALPHA, LABEL)}, METHOD: "+".join(methods)}
    if tuned in cells:
        return tuned
    return next((other for other in cells if _is_variant(other, tuned, but=(LABEL,))), tuned)


def _replayed(values: Values, cells: Sequence[Values]) -> Values:
    """The cell that a cell of lr_replay replays. One with a label must be described with it."""
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
    """The SFT cells without a label that differ only in learning rate and seed."""
    return [
        other
        for other in cells
        if other.get(METHOD) == "sft"
        and LABEL not in other
        and LR in other
        and _is_variant(values, other, but=(METHOD, LABEL, LR, SEED))
    ]


def _load(path: Path) -> Values:
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(load_config(path))  # ${KEY} is the config's: resolved with it
    return {str(key): value for key, value in content.items()}


def _check_keys(content: Mapping[str, Any], known: Sequence[str], prefix: str = "") -> None:
    for key in content:
        if key not in known:
            suggestion = did_you_mean(key, known) or f"; known are {', '.join(known)}"
            raise UserError(f"{prefix}{key} is not a key of a grid{suggestion}")


def _check_own_keys(content: Mapping[str, Any], block: str) -> None:
    for key in content:
        if key in _OWN_KEYS:
            raise UserError(f"{block}.{key}: {_OWN_KEYS[key]}; leave it out")


def _mapping(block: Any) -> dict[str, list[Any]]:
    if not isinstance(block, dict) or not block:
        raise UserError("grid must be a mapping of key to a list of values, or a list of such mappings")
    mapping = {str(key): values for key, values in block.items()}
    if LABEL in mapping:
        mapping[LABEL] = [_label(mapping[LABEL])]
    _check_own_keys(mapping, "grid")
    for key, values in mapping.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"grid.{key}={values} must be a list of values, such as [{values}]")
        if twice := [value for number, value in enumerate(values) if value in values[:number]]:
            raise UserError(f"grid.{key}={values} has {twice[0]} twice, which is one cell; give each value once")
    methods = [split_name(str(method)) for method in mapping.get(METHOD, [])]
    if ALPHA in mapping and not (methods and all(WISE_FT in names for names in methods)):
        raise UserError(f"grid.{ALPHA} is WiSE-FT's; give it a separate mapping with method: [wise_ft]")
    for alpha in mapping.get(ALPHA, []):
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
            raise UserError(f"grid.{ALPHA}={alpha} must be a number in [0, 1]: the tuned model's share")
    return mapping


def _label(label: Any) -> str:
    if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", label):
        raise UserError(
            f"grid.{LABEL}={label} must be one name of letters, digits, _, - and ., which begins with a letter, such as constant"
        )
    if label.lower() in _RESERVED_LABELS:
        raise UserError(f"grid.{LABEL}={label} has another meaning in reports; give another name")
    return label


def _check_labels(mappings: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """A label has one method: its cells are one front of a report."""
    methods: dict[str, set[str]] = {}
    for mapping in mappings:
        for label in mapping.get(LABEL, ()):
            names = methods.setdefault(label, set())
            names.update(str(one) for one in mapping.get(METHOD, [None]))
            if len(names) > 1:
                several = ", ".join(sorted(names))
                raise UserError(
                    f"grid.{LABEL}={label} has several methods ({several}); give each its mapping and its label"
                )


def _evaluation(block: Any, changes: Sequence[str]) -> Evaluation | None:
    """
    Args:
        changes: ``KEY=value`` of the command line.
    """
    from omegaconf import OmegaConf

    if block is None and not changes:
        return None
    if block is not None and not isinstance(block, dict):
        raise UserError("evaluate must be a mapping, such as {suites: [forgetting]}")
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(changes)))
    content = {**(block or {}), **given}
    _check_keys(content, [field.name for field in fields(Evaluation)], "evaluate.")
    for key in ("suites", "tasks"):
        names = content.get(key) or ()
        content[key] = tuple(names.split(",") if isinstance(names, str) else map(str, names))
    if not content["suites"] and not content["tasks"]:
        raise UserError("evaluate needs suites or tasks, such as suites: [forgetting]")
    select_tasks(content["suites"], content["tasks"], "evaluate.suites=", "evaluate.tasks=")
    limit = content.get("limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"evaluate.limit={limit} must be a number of documents of at least 1")
    for key in ("base", "data_root", "include_path", "new_task", "select_by"):
        if content.get(key) is not None:
            content[key] = str(content[key])
    return _with_validation(Evaluation(**content))


def _with_validation(evaluation: Evaluation) -> Evaluation:
    """The same, with ``select_by`` among its suites or tasks."""
    suite, suites, tasks = evaluation.select_by, evaluation.suites, evaluation.tasks
    if suite is None:
        return evaluation
    expected = f"{evaluation.task}{VALIDATION}"
    if suite != expected or suite not in SUITES:
        known = [name for name in SUITES if name.endswith(VALIDATION)]
        remedy = (
            f"give {expected}" if expected in known else f"leave it out: only {', '.join(known)} can choose an epoch"
        )
        raise UserError(f"evaluate.select_by={suite} has no validation rows of the task {evaluation.task}; {remedy}")
    return replace(
        evaluation,
        suites=tuple(dict.fromkeys((*suites, suite))) if suites else (),
        tasks=tuple(dict.fromkeys((*tasks, *SUITES[suite]))) if tasks else (),
    )
