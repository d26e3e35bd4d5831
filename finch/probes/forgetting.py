"""What a run does about forgetting: its probes, the budget for one of them, and the metric that the best epoch is chosen by."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig

from finch import run_files
from finch.distributed import watchdog
from finch.log import logger
from finch.probes.probes import Probes
from finch.probes.settings import BudgetSettings, check_probes, read_budget, selection_key
from finch.training.checkpointer import TrainState
from finch.training.hooks import Hook, Trainer
from finch.training.run import Run


class Forgetting(Hook):
    """Probes and budget of a run; without their keys in the config it only says which metric chooses the best epoch.

    Built before weights are loaded. Raises UserError for rows that cannot be used, or a metric that a probe does not have.
    """

    def __init__(self, trainer: Trainer) -> None:
        cfg, self._trainer = trainer.cfg, trainer
        max_seq_len = getattr(trainer.decoder, "max_seq_len", None)
        self._probes = Probes(cfg, trainer.tokenizer, trainer.data, trainer.parallel, max_seq_len)
        self._budget = ForgettingBudget(read_budget(cfg), trainer.run, trainer.export, trainer.exported)
        trainer.state.select_by = key = selection_key(cfg, self._probes.kinds)
        if cfg.save_last_epoch_only and cfg.epochs > 1 and key is not None:
            logger.warning(
                f"save_last_epoch_only=True: RUN/best is the last epoch, not the one with the best {key.replace('_', ' ')}"
            )
        self._is_new = not trainer.run.scalars
        self.load_state_dict(
            trainer.run.scalars
        )  # now, since it says what is to be measured with the pretrained weights

    @staticmethod
    def check(cfg: DictConfig) -> None:
        """Checks the config's keys without reading rows. Raises UserError for a probe without rows, or a budget or a selection that refers
        to nothing."""
        check_probes(cfg)

    def state_dict(self) -> dict[str, Any]:
        """The probes' values at step 0, and the budget's last evaluation."""
        return {**self._probes.state_dict(), **self._budget.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._probes.load_state_dict(state)
        self._budget.load_state_dict(state)

    def needs_pretrained(self, trainer: Trainer) -> bool:
        return self._probes.find_answers(trainer.base)

    def prepare(self, trainer: Trainer) -> None:
        self._probes.start(trainer.model)
        watchdog.heartbeat()

    def start(self, trainer: Trainer) -> None:
        if self._is_new:
            self._probes.write_baseline(trainer.metrics_log)
        if self._budget.has_ended_run:
            trainer.state.request_stop("forgetting_budget; raise max_increase to continue")

    def wants_sync(self, step: int) -> bool:
        return self._probes.is_due(step)

    def after_step(self, state: TrainState) -> None:
        """Evaluates the probes that are due; where the model is inside the budget, it is exported."""
        if not self._probes.is_due(state.step) or state.is_epoch_end:
            return
        self._evaluate(state, is_epoch_end=False)
        if self._budget.was_within_budget(state.step):
            self._budget.keep_step(state.step)
            self._trainer.metrics_log.reset_timer()

    def after_epoch(self, state: TrainState) -> Mapping[str, float]:
        return self._evaluate(state, is_epoch_end=True)

    def after_export(self, state: TrainState, name: str | None) -> None:
        """Links the epoch's folder where the model is inside the budget; without a folder the model is exported for the link."""
        if not self._budget.was_within_budget(state.step):
            return
        if name is None:
            self._budget.keep_step(state.step, is_epoch_end=True)
        else:
            self._budget.keep_epoch(name)

    def summary(self, state: TrainState) -> list[str]:
        lines, seconds = [], self._probes.seconds
        if budget := self._budget.describe():
            lines.append(f"forgetting_budget: {budget}")
        if seconds:
            share = seconds / (time.perf_counter() - self._trainer.run.start_time)
            lines.append(f"probes took {seconds:.1f} s, {share:.1%} of the time since this start")
        return lines

    def _evaluate(self, state: TrainState, *, is_epoch_end: bool) -> Mapping[str, float]:
        trainer = self._trainer
        metrics = self._probes.evaluate(
            trainer.model, trainer.metrics_log, step=state.step, epoch=state.epoch, is_epoch_end=is_epoch_end
        )
        watchdog.heartbeat()
        self._budget.follow(state.step, metrics)
        if self._budget.has_ended_run:
            state.request_stop("forgetting_budget; raise max_increase to continue")
        return metrics


class ForgettingBudget:
    """Follows a probe; RUN/within_budget links the model of the last evaluation whose value was inside.

    At the end of an epoch it links the epoch's folder. At other evaluations inside, with ``save: evaluations``, the model is exported
    to RUN/within_budget_step_N, which replaces the one before; with ``save: epochs`` only the ends of epochs count. The end of an epoch
    that has no folder (``save_last_epoch_only``) exports the model as well. Weights that are
    already outside cannot be turned back: what is linked is the state of the last evaluation inside, not of the last step inside.

    Args:
        settings: None: there is no budget, and nothing happens.
        export: writes the model's folder of a name, and returns whether that was possible; a collective.
        exported: from the name of an exported model to the name of its folder.

    Attributes:
        last: ``{"step", "value"}`` of the last evaluation, or None.
    """

    def __init__(
        self,
        settings: BudgetSettings | None,
        run: Run,
        export: Callable[[str], bool],
        exported: Callable[[str], str],
    ) -> None:
        self._settings, self._run, self._export, self._exported = settings, run, export, exported
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

    def was_within_budget(self, step: int) -> bool:
        """Whether the budget's probe was evaluated after ``step``, and inside."""
        return self.last is not None and self.last["step"] == step and self._is_inside()

    def keep_epoch(self, name: str) -> None:
        """Links the folder of an epoch whose last evaluation was inside."""
        self._keep(self._exported(name))

    def keep_step(self, step: int, *, is_epoch_end: bool = False) -> None:
        """Exports the model of an evaluation inside the budget, and links it; a collective.

        ``is_epoch_end``: of an epoch that has no folder; with ``save: epochs`` other evaluations do nothing.
        """
        if self._settings is None or not (is_epoch_end or self._settings.save == "evaluations"):
            return
        name = f"{run_files.WITHIN_BUDGET}_step_{step}"
        if self._export(name):
            self._keep(self._exported(name))

    def describe(self) -> str:
        """One sentence on the last evaluation."""
        if self._settings is None or self.last is None:
            return ""
        place = "inside" if self._is_inside() else "outside"
        limit = f"{self._settings.key} {self.last['value']:+.4f} at step {self.last['step']} is {place} {self._settings.max_increase:g}"
        link = self._run.path / run_files.WITHIN_BUDGET
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
        self._run.link(run_files.WITHIN_BUDGET, folder_name)
        if not self._run.is_writer:
            return
        step = folder_name.removesuffix("_adapter")
        for path in self._run.path.glob(f"{run_files.WITHIN_BUDGET}_step_*"):
            if path.name.removesuffix("_adapter") != step:
                shutil.rmtree(path, ignore_errors=True)
