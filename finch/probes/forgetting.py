"""What a run does about forgetting: its probes, the budget for one of them, and the metric that the best epoch is chosen by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig
from torch import nn

from finch.data.training_data import TrainingData
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.log import logger
from finch.metrics import MetricsLog
from finch.probes.budget import ForgettingBudget
from finch.probes.probes import Probes
from finch.probes.settings import read_budget, selection_key
from finch.training.chunked_loss import TokenLoss
from finch.training.run_folder import RunFolder
from finch.weights.huggingface import PretrainedFolder


class Forgetting:
    """Probes and budget of a run; without their keys in the config it does nothing.

    Args:
        cfg: a recipe's config.
        tokenizer: torchtune's.
        data: the training rows.
        max_seq_len: longest row that the model can take, in tokens; None: no limit.
        folder: the run's.
        export: writes the model to the folder of a name; a collective.
        exported: from that name to the folder's.
        scalars: of the checkpoint that the run resumes from; None: a new run.

    Attributes:
        select_by: the metric that the best epoch is chosen by; None: there is none.

    Raises:
        UserError: rows that cannot be used, or a metric that a probe does not have.
    """

    def __init__(
        self,
        cfg: DictConfig,
        tokenizer: Any,
        data: TrainingData,
        parallel: Parallel,
        *,
        max_seq_len: int | None,
        folder: RunFolder,
        export: Callable[[str], None],
        exported: Callable[[str], str],
        scalars: Mapping[str, Any] | None,
    ) -> None:
        self._probes = Probes(cfg, tokenizer, data, parallel, max_seq_len)
        self._budget = ForgettingBudget(read_budget(cfg), folder, parallel, exported)
        self.select_by = selection_key(cfg, self._probes.kinds)
        if cfg.save_last_epoch_only and cfg.epochs > 1 and self.select_by is not None:
            logger.warning(
                f"save_last_epoch_only=True: RUN/best is the last epoch, not the one with the best {self.select_by.replace('_', ' ')}"
            )
        self._export, self._is_new = export, scalars is None
        if scalars is not None:
            self._probes.load_state_dict(scalars)
            self._budget.load_state_dict(scalars)

    def state_dict(self) -> dict[str, Any]:
        """The scalars of a checkpoint: the probes' values at step 0, and the budget's last evaluation."""
        return {**self._probes.state_dict(), **self._budget.state_dict()}

    @property
    def has_ended_run(self) -> bool:
        """Whether the budget is exceeded and the run stops there."""
        return self._budget.has_ended_run

    def needs_pretrained(self, base: PretrainedFolder) -> bool:
        """Whether :meth:`start` needs the pretrained weights, also in a run that is resumed; a collective."""
        return self._probes.find_answers(base)

    def start(self, model: TokenLoss) -> None:
        """What is measured with the pretrained weights and not known yet; a collective."""
        self._probes.start(model)
        watchdog.heartbeat()

    def open(self, metrics_log: MetricsLog) -> None:
        """Called once the metrics are open: writes a new run's step 0."""
        self._metrics_log = metrics_log
        if self._is_new:
            self._probes.write_baseline(metrics_log)

    def is_due(self, step: int) -> bool:
        """Whether a probe is evaluated after ``step``, which is not the last one of an epoch."""
        return self._probes.is_due(step)

    def evaluate(self, model: nn.Module, step: int, epoch: int, *, is_epoch_end: bool = False) -> dict[str, float]:
        """The metrics of the probes that are due, at the end of an epoch of all; a collective.

        Between two ends the model is exported where it is inside the budget.
        """
        metrics = self._probes.evaluate(model, self._metrics_log, step=step, epoch=epoch, is_epoch_end=is_epoch_end)
        watchdog.heartbeat()
        self._budget.follow(step, metrics)
        if not is_epoch_end and self._budget.is_inside_at(step):
            self._budget.keep_step(step, self._export)
            self._metrics_log.reset_timer()
        return metrics

    def keep_epoch(self, step: int, name: str | None) -> None:
        """Links the folder of the epoch that ended with ``step`` where it is inside the budget; a collective.

        Args:
            name: of the epoch; None: it has no folder, and the model is exported for the link.
        """
        if not self._budget.is_inside_at(step):
            return
        if name is None:
            self._budget.keep_step(step, self._export, is_epoch_end=True)
        else:
            self._budget.keep_epoch(name)

    def summary(self) -> dict[str, Any]:
        """What the summary of the run takes from here."""
        return {
            "select_by": self.select_by,
            "probe_seconds": self._probes.seconds,
            "budget": self._budget.describe(),
        }
