"""The budget for what one probe may lose, and the model of the last evaluation inside it."""

from __future__ import annotations

from typing import Any

from finch.base import run_files
from finch.base.log import logger
from finch.config.schema import Budget
from finch.training.checkpointer import TrainState
from finch.training.hooks import Hook, Trainer, to_continue


class ForgettingBudget(Hook):
    """Follows a probe; RUN/within_budget links the model of the last evaluation whose value was inside.

    At the end of an epoch it links the epoch's folder. At other evaluations inside, with ``save: evaluations``, the model is exported
    to RUN/within_budget_step_N, which replaces the one before; with ``save: epochs`` only the ends of epochs count. The end of an epoch
    that has no folder (``save_last_epoch_only``) exports the model as well. Weights that are
    already outside cannot be turned back: what is linked is the state of the last evaluation inside, not of the last step inside.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._settings, self._trainer, self._run = Budget.of(trainer.cfg.forgetting_budget), trainer, trainer.run
        self._last: dict[str, Any] | None = None  # of the last evaluation

    def start(self, trainer: Trainer) -> None:
        # A run that the budget has stopped stays stopped when it is resumed, unless max_increase was raised.
        self._stop_if_exceeded(trainer.state)

    def after_step(self, state: TrainState) -> None:
        """Exports the model where it is inside the budget."""
        self._follow(state)
        # At the end of an epoch the link waits for the epoch's folder, see `after_export`.
        if self._was_within_budget(state) and not state.is_epoch_end:
            self._keep_step(state.step)
            self._trainer.metrics_log.reset_timer()

    def after_epoch(self, state: TrainState) -> None:
        self._follow(state)

    def after_export(self, state: TrainState, name: str | None) -> None:
        """Links the epoch's folder where the model is inside the budget; without a folder the model is exported for the link."""
        if self._was_within_budget(state):
            if name is None:
                self._keep_step(state.step, is_epoch_end=True)
            else:
                self._run.link(run_files.WITHIN_BUDGET, self._trainer.exported(name))

    def summary(self, state: TrainState) -> list[str]:
        text = self._describe()
        return [f"forgetting_budget: {text}"] if text else []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        last, settings = state.get("forgetting_budget"), self._settings
        if last is not None and settings is not None and last.get("key", settings.key) != settings.key:
            # What an earlier start has kept was inside another probe's budget.
            (self._run.path / run_files.WITHIN_BUDGET).unlink(missing_ok=True)
            last = None
        self._last = last

    def state_dict(self) -> dict[str, Any]:
        return {"forgetting_budget": self._last}

    def _stop_if_exceeded(self, state: TrainState) -> None:
        settings = self._settings
        if settings is not None and settings.action == "stop" and self._last is not None and not self._is_inside():
            state.request_stop(f"{run_files.BUDGET}{to_continue(self._trainer, 'max_increase')}", by_all=True)

    def _follow(self, state: TrainState) -> None:
        """Takes the metrics of an evaluation, and warns where it is the first one outside."""
        settings = self._settings
        if settings is None or settings.key not in state.evaluated:
            return
        was_inside = self._last is None or self._is_inside()
        self._last = {"step": state.step, "value": state.evaluated[settings.key], "key": settings.key}
        if was_inside and not self._is_inside():
            logger.warning(f"forgetting_budget: {self._describe()}")
        self._stop_if_exceeded(state)

    def _was_within_budget(self, state: TrainState) -> bool:
        """Whether the budget's probe was evaluated after the last step, and inside."""
        return self._last is not None and self._last["step"] == state.step and self._is_inside()

    def _keep_step(self, step: int, *, is_epoch_end: bool = False) -> None:
        """Exports and links the model of an evaluation inside; with ``save: epochs`` only of an epoch without a folder; a collective."""
        if self._settings is None or not (is_epoch_end or self._settings.save == "evaluations"):
            return
        name = f"{run_files.WITHIN_BUDGET}_step_{step}"
        # A disk that refused a file leaves the link at the model before.
        if self._trainer.export(name):
            self._run.link(run_files.WITHIN_BUDGET, self._trainer.exported(name))

    def _describe(self) -> str:
        """One sentence on the last evaluation."""
        if self._settings is None or self._last is None:
            return ""
        place = "inside" if self._is_inside() else "outside"
        limit = f"{self._settings.key} {self._last['value']:+.4f} at step {self._last['step']} is {place} {self._settings.max_increase:g}"
        link = self._run.path / run_files.WITHIN_BUDGET
        kept = (
            f"; {link} is {link.readlink()}"
            if link.is_symlink()
            else "; no evaluation was inside, so that nothing is kept: evaluate earlier with probes_every_n_steps, or lower optimizer.lr"
        )
        return limit + kept

    def _is_inside(self) -> bool:
        settings, last = self._settings, self._last
        return settings is not None and last is not None and last["value"] <= settings.max_increase  # a NaN is outside
