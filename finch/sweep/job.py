"""What a sweep does for a cell: the commands of its run and of its evaluation."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finch import run_files
from finch.files import atomic_file
from finch.sweep.cells import ALPHA, DEFAULT_ALPHA, SMALL_LR, WISE_FT, Cell
from finch.sweep.grid import Grid
from finch.sweep.run_state import is_trained, mark_results_new, missing_results

if TYPE_CHECKING:
    from omegaconf import DictConfig

FINCH = (sys.executable, "-m", "finch.cli")
_LINKED = (run_files.CONFIG, run_files.METRICS, run_files.BEST, run_files.EVALUATION)


@dataclass(frozen=True)
class Job:
    """A cell with its checked config.

    Attributes:
        grid, cell: what it is of.
        recipe: of the cell's run.
        cfg: the complete config; WiSE-FT's and small_lr's is that of the run that they stand on.
        launcher: options of `finch run` that start its ranks.
    """

    grid: Grid
    cell: Cell
    recipe: str
    cfg: DictConfig
    launcher: Sequence[str] = ()

    @property
    def overwrites(self) -> bool:
        return is_overwrite(self.grid)

    @property
    def pretrained(self) -> str:
        return str(self.cfg.checkpointer.checkpoint_dir)

    @property
    def has_validation(self) -> bool:
        """Whether the checkpoint is chosen by validation; else the last epoch's counts."""
        return self.cfg.dataset_validation is not None or self.cfg.select_by is not None

    def is_trained(self) -> bool:
        run = self.cell.folder
        if self.cell.kind == SMALL_LR:
            return (run / run_files.BEST).exists()
        if self.cell.kind == WISE_FT:
            return (run / run_files.BEST).exists() and not self._is_older_than_source()
        return is_trained(run, self.cfg)

    def missing_results(self) -> list[str]:
        evaluation = self.grid.evaluation
        return [] if evaluation is None else missing_results(self.cell.folder, evaluation)

    def run_command(self) -> list[str]:
        """Trains the cell, or makes WiSE-FT's model."""
        if self.cell.kind == WISE_FT:
            assert self.cell.source is not None
            tuned = run_files.chosen_model(self.cell.source) or self.cell.source / run_files.BEST
            options = ["--base", self.pretrained, "--tuned", str(tuned), "--alpha", f"{self.alpha:g}"]
            return [*FINCH, "wise-ft", *options, "--out", str(self.cell.folder)]
        return [*FINCH, "run", *self.launcher, *run_words(self.grid, self.cell)]

    def evaluate_commands(self) -> list[list[str]]:
        """`finch evaluate` where results are missing: once for the grid's suites, and once for its tasks."""
        evaluation, missing = self.grid.evaluation, self.missing_results()
        if evaluation is None or not missing:
            return []
        command = [*FINCH, "evaluate", "--base", evaluation.base or self.pretrained, "--tuned", str(self.cell.folder)]
        command += ["--out", str(self.grid.out)]
        for option, value in (("--data-root", evaluation.data_root), ("--limit", evaluation.limit)):
            command += [] if value is None else [option, str(value)]
        commands = []
        if evaluation.suites:
            commands.append([*command, "--suite", ",".join(evaluation.suites)])
        if evaluation.tasks:
            own = [("--include-path", evaluation.include_path), ("--new-task", evaluation.new_task)]
            options = [word for option, value in own if value is not None for word in (option, value)]
            commands.append([*command, "--tasks", ",".join(evaluation.tasks), *options])
        return commands

    def end_evaluation(self) -> None:
        """After its last command."""
        assert self.grid.evaluation is not None
        mark_results_new(self.cell.folder, self.grid.evaluation)

    @property
    def alpha(self) -> float:
        return float(self.cell.values.get(ALPHA, DEFAULT_ALPHA))

    def prepare(self) -> None:
        """Removes what an earlier WiSE-FT left, whose source has changed since."""
        if self.cell.kind == WISE_FT:
            (self.cell.folder / run_files.BEST).unlink(missing_ok=True)
            shutil.rmtree(self.cell.folder / f"alpha_{self.alpha:g}", ignore_errors=True)

    def finish(self) -> None:
        """Links ``best`` to WiSE-FT's model."""
        if self.cell.kind == WISE_FT:
            _link(self.cell.folder / run_files.BEST, Path(f"alpha_{self.alpha:g}"))

    def link_to(self, source: Path) -> None:
        """Makes small_lr's folder stand for the run that was chosen: its files are links to that run's."""
        for name in _LINKED:
            target = run_files.chosen_model(source) if name == run_files.BEST else source / name
            assert target is not None
            _link(self.cell.folder / name, Path("..") / source.name / target.name)

    def _is_older_than_source(self) -> bool:
        assert self.cell.source is not None
        model = run_files.chosen_model(self.cell.source)
        own = self.cell.folder / f"alpha_{self.alpha:g}"
        return model is not None and own.exists() and model.stat().st_mtime > own.stat().st_mtime


def run_words(grid: Grid, cell: Cell) -> list[str]:
    """``--config NAME_OR_PATH`` and the overrides of a cell's run."""
    resume = [] if is_overwrite(grid) else ["resume_from_checkpoint=auto"]
    return ["--config", grid.config, *grid.overrides, *cell.overrides(), *resume]


def is_overwrite(grid: Grid) -> bool:
    """Whether earlier runs are replaced."""
    return any(word.lower() == "overwrite=true" for word in grid.overrides)


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir() and not link.is_symlink():
        os.rmdir(link)  # empty: an evaluation that wrote nothing
    with atomic_file(link) as partial:
        partial.symlink_to(target)
