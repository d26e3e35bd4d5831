"""What a run does about a loss, gradient or weight that is not finite: raise, skip the update, or roll back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finch.checkpoint.reader import all_finite, list_checkpoints
from finch.checkpoint.writer import CheckpointWriter
from finch.distributed.parallel import Parallel
from finch.log import logger
from finch.metrics import MetricsLog
from finch.training.resume import choose_checkpoint
from finch.training.state import TrainState


class NonfiniteGuard:
    """
    Args:
        action: ``on_nonfinite``: raise, skip or rollback. Schedules raise and skip by themselves.
        run: the run's folder.
        resumed_from: the checkpoint the run was resumed from; also a rollback's target.
        load_pretrained: loads the pretrained weights, for a rollback without a checkpoint.
    """

    def __init__(
        self,
        action: str,
        state: TrainState,
        parallel: Parallel,
        writer: CheckpointWriter,
        metrics_log: MetricsLog,
        *,
        run: Path,
        resumed_from: Path | None,
        load_pretrained: Callable[[], None],
    ) -> None:
        self._action, self._state, self._parallel = action, state, parallel
        self._writer, self._metrics_log = writer, metrics_log
        self._run, self._resumed_from, self._load_pretrained = run, resumed_from, load_pretrained

    def check_losses(self) -> None:
        """Detects non-finite losses and gradients since the last call; where losses stay on a device, this reads it."""
        if not self._state.schedule.check():
            self._state.rollbacks.record_finite(self._state.step)
        elif self._action == "rollback":
            self._roll_back()

    def check_weights(self) -> bool:
        """Whether the weights may be saved; a collective. An update can break them before any forward shows it.

        Raises:
            FloatingPointError: they are not finite, and ``action`` is not rollback.
        """
        if self._state.rollbacks.unconfirmed:
            return False
        if self._parallel.all_true(all_finite(self._state.model.trained_parameters().values())):
            return True
        if self._action != "rollback":
            raise FloatingPointError(
                f"weights were not finite after step {self._state.step}, whose loss was: lower the learning rate or check the data"
            )
        self._roll_back()
        return False

    def _roll_back(self) -> None:
        """The position in the data stays: the batches in between led here, and are not trained on again."""
        state = self._state
        self._writer.finish()
        candidates = list_checkpoints(self._run)
        if self._resumed_from is not None and self._resumed_from not in candidates:
            candidates.append(self._resumed_from)
        folder = choose_checkpoint(
            state.rollbacks.eligible_checkpoints(state.step, candidates),
            self._parallel,
            key="on_nonfinite=rollback",
            remedy="lower the learning rate and start from scratch",
        )
        when = f"{'at or before' if state.schedule.is_on_device else 'at'} step {state.step}"
        logger.warning(
            f"a loss or gradient was not finite {when}: back to {folder or 'the pretrained model'}, continuing with the next batch"
        )
        step = state.roll_back(folder, self._parallel, self._load_pretrained)
        state.rollbacks.record_rollback(state.step, step)
        self._metrics_log.write_event({"step": state.step, "epoch": state.epoch, "rolled_back_to": step})
        self._metrics_log.reset_timer()
