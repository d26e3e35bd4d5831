"""A cell of a grid: one run's values, its folder's name, and RUN/cell.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finch import run_files
from finch.errors import UserError
from finch.files import atomic_file, write_text

METHOD = "method"
LABEL = "label"
"""A grid's name for the method of some cells, in folders and reports; no key of the config."""
LR = "optimizer.lr"
SEED = "seed"
ALPHA = "alpha"
"""A key of WiSE-FT's cells alone: the tuned model's share."""
LOG = "lr_scheduler.log"
DEFAULT_ALPHA = 0.5

RUN, WISE_FT, SMALL_LR = "run", "wise_ft", "small_lr"
"""Kinds of cells: trained; interpolated from a trained cell; the trained cell that `finch select-lr` chooses."""

WAITING, RUNNING, FINISHED, EVALUATED, FAILED = "waiting", "running", "finished", "evaluated", "failed"
"""A cell's status in cell.json."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        values: of the grid's keys.
        folder: RUN.
        kind: ``run``, ``wise_ft`` or ``small_lr``.
        source: the folder of the cell that this one waits for: WiSE-FT's tuned model, the run that lr_replay replays.
        candidates: small_lr's: the folders of the SFT cells that its learning rate is chosen from.
    """

    values: Mapping[str, Any]
    folder: Path
    kind: str = RUN
    source: Path | None = None
    candidates: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def waits_for(self) -> tuple[Path, ...]:
        return self.candidates if self.source is None else (self.source,)

    @property
    def log(self) -> Path:
        """What the cell's processes print."""
        return self.folder.with_name(f"{self.name}.log")

    def overrides(self) -> list[str]:
        """``key=value`` of the cell's run, its folder included."""
        words = override_words({key: value for key, value in self.values.items() if key not in (ALPHA, LOG, LABEL)})
        if LOG in self.values:
            words.append(f"{LOG}={self.values[LOG] if self.source is None else self.source}")
        return [*words, f"output_dir={self.folder}"]


def override_words(block: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``key=value`` of each value; a mapping's keys are dotted, since a block on the command line would replace a component's name alone."""
    words: list[str] = []
    for key, value in block.items():
        if isinstance(value, Mapping) and value:
            words += override_words(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={_override_text(value)}")
    return words


def _override_text(value: Any) -> str:
    """Lists in YAML's flow style."""
    return json.dumps(value) if isinstance(value, (list, dict, bool)) or value is None else str(value)


def cell_names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """A folder's name for each cell's values: ``finch_lr2e-5_seed0``, of letters that neither shells nor lm-eval's arguments treat specially.
    It begins with the cell's label, where it has one, in place of the method.

    Keys are written by their last part; in full for cells that would have one name.
    """
    short = [_name(values, is_full=False) for values in cells]
    names = [
        name if short.count(name) == 1 else _name(values, is_full=True)
        for name, values in zip(short, cells, strict=True)
    ]
    for index, name in enumerate(names):  # values that differ only in what a name leaves out
        if name in names[:index]:
            names[index] = f"{name}_{names[:index].count(name) + 1}"
    return names


def _name(values: Mapping[str, Any], *, is_full: bool) -> str:
    parts = [_word(values[key]) for key in (LABEL, METHOD) if key in values][:1]
    for key, value in values.items():
        if key not in (LABEL, METHOD):
            word = _word(value)
            key = key.removesuffix("._component_") if not is_full else key
            key = key if is_full else key.rpartition(".")[2]
            parts.append(f"{_word(key)}{'' if re.match('-?[0-9]', word) else '-'}{word}")
    return "_".join(parts) or "run"


def _word(value: Any) -> str:
    """``2e-5`` of 2e-05, ``finch-seed1`` of {cell: {method: finch, seed: 1}}."""
    if isinstance(value, Mapping):
        inner = value.get("cell", value)
        return "-".join(
            _word(each) if key in (LABEL, METHOD) else f"{_word(key)}{_word(each)}" for key, each in inner.items()
        )
    if isinstance(value, float):
        return re.sub(r"e([+-])0+", r"e\1", f"{value:g}").replace("e+", "e")
    if isinstance(value, int):
        return str(value)
    _, slash, text = str(value).rpartition("/")
    if not slash and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text):  # a component: its last name
        text = text.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-") or "empty"


def write_cell(cell: Cell, *, task: str | None, status: str, source: Path | None = None) -> None:
    """Writes RUN/cell.json, and RUN where it is not there.

    Args:
        task: the new task's suite or name.
        source: in place of the cell's own.
    """
    source = source or cell.source
    content = {
        "values": dict(cell.values),
        "task": task,
        "source": None if source is None else f"../{source.name}",
        "status": status,
    }
    try:
        cell.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(cell.folder / run_files.CELL) as partial:
            write_text(partial, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{cell.folder} cannot be written ({error.strerror}); give another folder: out") from error


def read_cell(folder: Path) -> dict[str, Any]:
    """The content of RUN/cell.json: ``values``, ``task``, ``source`` and ``status``.

    Raises:
        UserError: the file is missing or broken.
    """
    path = folder / run_files.CELL
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"values": dict(content["values"]), **{key: content.get(key) for key in ("task", "source", "status")}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); start finch sweep again, it writes the file") from error
