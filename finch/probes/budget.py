"""The budget for what one probe may lose, and the last state of the run inside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any

from finch import run_files
from finch.distributed.parallel import Parallel
from finch.log import logger
from finch.probes.settings import BudgetSettings
from finch.training.export import export
from finch.training.run_folder import RunFolder


class ForgettingBudget:
    """Follows a probe; RUN/within_budget links the model of the last evaluation whose value was inside.

    At the end of an epoch it links the epoch's folder. At other evaluations inside, with ``save: evaluations``, the model is exported
    to RUN/within_budget_step_N, which replaces the one before; with ``save: epochs`` only the ends of epochs count. The end of an epoch
    that has no folder (``save_last_epoch_only``) exports the model as well. Weights that are
    already outside cannot be turned back: what is linked is the state of the last evaluation inside, not of the last step inside.

    Args:
        settings: None: there is no budget, and nothing happens.
        exported: from the name of an exported model to the name of its folder.

    Attributes:
        last: ``{"step", "value"}`` of the last evaluation, or None.
    """

    def __init__(
        self, settings: BudgetSettings | None, folder: RunFolder, parallel: Parallel, exported: Callable[[str], str]
    ) -> None:
        self._settings, self._folder, self._parallel, self._exported = settings, folder, parallel, exported
        self.last: dict[str, Any] | None = None

    @property
    def has_ended_run(self) -> bool:
        """Whether the last evaluation was outside and the run stops there."""
        settings = self._settings
        return settings is not None and settings.action == "stop" and self.last is not None and not self._is_inside()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last = state.get("forgetting_budget")

    def state_dict(self) -> dict[str, Any]:
        return {"forgetting_budget": self.last}

    def follow(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of an evaluation, and warns where it is the first one outside."""
        settings = self._settings
        if settings is None or settings.key not in metrics:
            return
        was_inside = self.last is None or self._is_inside()
        self.last = {"step": step, "value": metrics[settings.key]}
        if was_inside and not self._is_inside():
            logger.warning(f"forgetting_budget: {self.describe()}")

    def is_inside_at(self, step: int) -> bool:
        """Whether the budget's probe was evaluated after ``step``, and inside."""
        return self.last is not None and self.last["step"] == step and self._is_inside()

    def keep_epoch(self, name: str) -> None:
        """Links the folder of an epoch whose last evaluation was inside."""
        self._keep(self._exported(name))

    def keep_step(self, step: int, write: Callable[[str], None], *, is_epoch_end: bool = False) -> None:
        """Exports the model of an evaluation inside the budget, and links it; a collective.

        Args:
            write: writes the model's folder of a name; a collective.
            is_epoch_end: of an epoch that has no folder; with ``save: epochs`` other evaluations do nothing.
        """
        if self._settings is None or not (is_epoch_end or self._settings.save == "evaluations"):
            return
        name = f"{run_files.WITHIN_BUDGET}_step_{step}"
        if export(lambda: write(name), self._folder.path / self._exported(name), self._parallel):
            self._keep(self._exported(name))

    def describe(self) -> str:
        """One sentence on the last evaluation."""
        if self._settings is None or self.last is None:
            return ""
        place = "inside" if self._is_inside() else "outside"
        limit = f"{self._settings.key} {self.last['value']:+.4f} at step {self.last['step']} is {place} {self._settings.max_increase:g}"
        link = self._folder.path / run_files.WITHIN_BUDGET
        kept = (
            f"; {link} is {link.readlink()}"
            if link.is_symlink()
            else "; no evaluation was inside, so that nothing is kept"
        )
        return limit + kept

    def _is_inside(self) -> bool:
        settings, last = self._settings, self.last
        return settings is not None and last is not None and last["value"] <= settings.max_increase  # a NaN is outside

    def _keep(self, folder_name: str) -> None:
        self._folder.link(run_files.WITHIN_BUDGET, folder_name)
        if not self._parallel.is_rank_zero:
            return
        step = folder_name.removesuffix("_adapter")
        for path in self._folder.path.glob(f"{run_files.WITHIN_BUDGET}_step_*"):
            if path.name.removesuffix("_adapter") != step:
                shutil.rmtree(path, ignore_errors=True)
