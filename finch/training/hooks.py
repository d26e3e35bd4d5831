"""What a run does around its training step: hooks, which a config can add to, and the recipe's own.

A hook sees the recipe in :meth:`Hook.start` and the position in every other call. Two rules keep a run correct on many ranks: all hooks
run in one order on every rank, since any of them may hold a collective, and a hook reads a tensor of the device only after a step for
which a hook's :meth:`Hook.wants_sync` was true (``state.is_synced``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from omegaconf import DictConfig
from torchtune import training
from torchtune.modules import TransformerDecoder

from finch.base import run_files
from finch.base.log import logger
from finch.base.progress import RunProgress
from finch.checkpoint.reader import all_finite
from finch.config import schema
from finch.config.instantiate import build
from finch.data.training_data import TrainingData
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.distributed.watchdog import Signals
from finch.training.checkpointer import Resumable, TrainState
from finch.training.metrics import MetricsLog
from finch.training.reference import dataset_loss
from finch.training.run import Run, update_best
from finch.weights.huggingface import PretrainedFolder

T = TypeVar("T")


class Trainer(Resumable, Protocol):
    """What a hook sees of a recipe; ``base`` is the folder of the pretrained weights, ``decoder`` the model's torchtune decoder."""

    cfg: DictConfig
    parallel: Parallel
    run: Run
    data: TrainingData
    base: PretrainedFolder
    tokenizer: Any
    decoder: TransformerDecoder

    def export(self, name: str) -> bool:
        """Writes the model as it is now to RUN/name, a Hugging Face folder; a collective. Returns False if the disk refused a file."""
        ...

    def exported(self, name: str) -> str:
        """The name of the folder that ``export`` writes."""
        ...


class Hook:
    """The base class of hooks; every method is optional. Derive from it, and name the class under ``hooks`` in a config."""

    def needs_pretrained(self, trainer: Trainer) -> bool:
        """Whether :meth:`prepare` needs the pretrained weights also in a run that is resumed; may be a collective."""
        return False

    def prepare(self, trainer: Trainer) -> None:
        """Called once before the first step; a new run's model then has the pretrained weights. A checkpoint is loaded afterwards."""

    def start(self, trainer: Trainer) -> None:
        """Called before the first step, once weights, position and this hook's state are restored and the metrics are open."""

    def before_step(self, state: TrainState) -> None:
        """Called before the forward of each step."""

    def wants_sync(self, step: int) -> bool:
        """Whether a hook reads tensors of the device after ``step``; the same on every rank."""
        return False

    def after_step(self, state: TrainState) -> Mapping[str, Any] | None:
        """Called after each update. What it returns joins the step's line in metrics.jsonl: numbers, or 0-d tensors not read here."""

    def after_epoch(self, state: TrainState) -> Mapping[str, float] | None:
        """Called after the last step of an epoch, before its folder is written."""

    def after_export(self, state: TrainState, name: str | None) -> None:
        """Called once the epoch's folder ``name`` is written; None: this epoch has none (``save_last_epoch_only``)."""

    def may_save(self, state: TrainState) -> bool:
        """Whether the state may be saved now; the same on every rank."""
        return True

    def after_training(self, state: TrainState) -> None:
        """Called at the end of a run that succeeded."""

    def after_end(self, trainer: Trainer) -> None:
        """Called in place of :meth:`start` and all that follows where an earlier start has ended the run and left no weights to go on from."""

    def summary(self, state: TrainState) -> list[str]:
        """Lines for the end of a run."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, sharded or not, dictionaries of tensors, and plain JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` has returned; tensors are loaded in place, into those that it returns now."""

    def close(self) -> None:
        """Called after any end, also after an error."""


class Hooks(dict[str, Hook]):
    """A recipe's hooks by name, in the order in which they are called."""

    def each(self, call: Callable[[Hook], T]) -> list[T]:
        """What ``call`` returns for every hook: all are asked, since any of them may hold a collective."""
        return list(map(call, self.values()))

    def after_step(self, state: TrainState) -> None:
        """Each sees what those before it have measured."""
        state.is_synced = any(self.each(lambda hook: hook.wants_sync(state.step)))
        for hook in self.values():
            state.metrics.update(hook.after_step(state) or {})

    def after_epoch(self, state: TrainState) -> dict[str, float]:
        """What all hooks have measured."""
        found = self.each(lambda hook: hook.after_epoch(state))
        return {name: value for each in found for name, value in (each or {}).items()}


class Preemption(Hook):
    """SIGTERM, SIGUSR1 and Ctrl-C end the run after the current step or, with several ranks, the next one; the watchdog knows whether this rank is in a step."""

    def __init__(self, run: Run) -> None:
        self._signals = Signals(before_training=run.mark_requeue)

    def install(self) -> None:
        """Handles signals from here on; before the first step they end the process at once."""
        self._signals.install()

    def start(self, trainer: Trainer) -> None:
        self._signals.start()

    def before_step(self, state: TrainState) -> None:
        watchdog.mark_step(True)

    def after_step(self, state: TrainState) -> None:
        watchdog.mark_step(False)
        if self._signals.is_terminated or self._signals.is_interrupted:
            state.request_stop("a signal", is_finished=False, is_requeued=self._signals.is_terminated)

    def after_training(self, state: TrainState) -> None:
        """What is done now, such as an average, is done by the next start where a signal ends it."""
        self._signals.end()

    def close(self) -> None:
        self._signals.restore()


class NonfiniteGuard(Hook):
    """Ends the run where a loss, a gradient or a weight is not finite. Schedules raise and skip by themselves where they read the loss."""

    def __init__(self) -> None:
        self._num_skipped = Counter[str]()

    def start(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def before_step(self, state: TrainState) -> None:
        """A schedule on a device is read once the metrics say that there is something to read."""
        if self._trainer.metrics_log.nonfinite_step:
            self._check(state)
            self._trainer.metrics_log.nonfinite_step = 0  # the next one is another's
        self._step = state.step + 1

    def wants_sync(self, step: int) -> bool:
        # On the host a schedule has waited for each loss already: reading more costs no further wait.
        return not self._trainer.update.schedule.is_on_device

    def after_step(self, state: TrainState) -> None:
        if state.is_synced and not self._trainer.update.schedule.is_on_device:
            self._check(state)

    def after_epoch(self, state: TrainState) -> None:
        self.may_save(state)

    def may_save(self, state: TrainState) -> bool:
        """Always True; an update can break the weights before any forward shows it. Raises FloatingPointError if a weight is not finite."""
        trainer = self._trainer
        self._check(state)
        if not trainer.parallel.all_true(all_finite(trainer.model.trained_parameters().values())):
            raise FloatingPointError(
                f"weights were not finite after step {state.step}, whose loss was: lower the learning rate or check the data"
            )
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_skipped.update(state.get("num_skipped", {}))

    def state_dict(self) -> dict[str, Any]:
        return {"num_skipped": dict(self._num_skipped)}

    def summary(self, state: TrainState) -> list[str]:
        return [
            f"updates that were skipped, since the {what} was not finite: {number}"
            for what, number in self._num_skipped.items()
        ]

    @property
    def nonfinite(self) -> str:
        """``loss`` or ``gradient``: of the first such step that the metrics have, else of the last step."""
        log = self._trainer.metrics_log
        return log.nonfinite if log.nonfinite_step else self._trainer.update.nonfinite

    def rows(self) -> str:
        """The rows of the step that was not finite, once all metrics are read: ``step 5 took rows 3, 7``."""
        step = self._trainer.metrics_log.nonfinite_step or self._step
        return f"step {step} took {self._trainer.data.rows_of(step)}"

    def _check(self, state: TrainState) -> None:
        if new := self._trainer.update.schedule.check():  # of on_nonfinite: skip
            what = self.nonfinite
            self._num_skipped[what] += new
            logger.warning(
                f"updates skipped up to step {state.step}, since the {what} was not finite: {self._num_skipped[what]}"
            )


class StepChecks(Hook):
    """``debug_checks``: compares the learning rate and the EMA over the ranks. ``log_peak_memory_stats``: adds CUDA's statistics to the steps
    that are logged."""

    def __init__(self, cfg: DictConfig) -> None:
        self._is_checked = cfg.debug_checks
        self._memory_every = cfg.log_every_n_steps if cfg.log_peak_memory_stats else None

    def start(self, trainer: Trainer) -> None:
        self._parallel = trainer.parallel

    def wants_sync(self, step: int) -> bool:
        return bool(self._is_checked)

    def after_step(self, state: TrainState) -> Mapping[str, Any]:
        if self._is_checked:
            self._parallel.check_equal("the learning rate", state.metrics["lr"])
            self._parallel.check_equal("the EMA of the loss", state.metrics["ema_loss"])
        if self._parallel.device.type != "cuda" or not self._memory_every or state.step % self._memory_every:
            return {}
        return training.get_memory_stats(device=self._parallel.device)


class Profiler(Hook):
    """torchtune's profiler, of the config's block. Raises UserError if it cannot be built."""

    def __init__(self, cfg: DictConfig) -> None:
        is_enabled = cfg.profiler is not None and cfg.profiler.get("enabled", False)
        self._profiler = build(cfg.profiler, "profiler")[0] if is_enabled else training.DummyProfiler()

    def start(self, trainer: Trainer) -> None:
        self._profiler.start()

    def after_step(self, state: TrainState) -> None:
        self._profiler.step()

    def after_training(self, state: TrainState) -> None:
        self._profiler.stop()


class Validation(Hook):
    """The mean loss over each set of ``dataset_validation`` in nats per token: the pretrained model's, then after each epoch and every
    ``validate_every_n_steps``."""

    def start(self, trainer: Trainer) -> None:
        self._trainer, self._every = trainer, trainer.cfg.validate_every_n_steps
        if not trainer.run.scalars:  # a new run
            self._measure(trainer.state)

    def wants_sync(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def after_step(self, state: TrainState) -> None:
        state.evaluated = {}
        if self.wants_sync(state.step) and not state.is_epoch_end:  # else it follows with the epoch
            self.after_epoch(state)

    def after_epoch(self, state: TrainState) -> Mapping[str, float]:
        # Measured at this step already, where the run ends within an epoch.
        if state.evaluated.keys() & self._trainer.data.validations.keys():
            return state.evaluated
        losses = self._measure(state)
        state.evaluated = {**state.evaluated, **losses}
        return losses

    def _measure(self, state: TrainState) -> dict[str, float]:
        trainer, log = self._trainer, self._trainer.metrics_log
        log.flush()  # the time of the passes is not that of training steps
        losses = {
            key: dataset_loss(trainer.model, trainer.data.eval_loader(samples, "validation"))
            for key, samples in trainer.data.validations.items()
        }
        if losses:
            log.write_event({"step": state.step, "epoch": state.epoch, **losses})
            texts = ", ".join(f"{key.replace('_', ' ')} {loss:.4f}" for key, loss in losses.items())
            logger.info(f"epoch {state.epoch + 1}/{trainer.cfg.epochs}, step {state.step}: {texts}")
            log.reset_timer()
        return losses


def to_continue(trainer: Trainer, key: str) -> str:
    """What continues a run that ``key`` has ended; nothing where only its best model is kept."""
    return "" if trainer.cfg.save_best_only else f"; raise {key} to continue"


_NO_READING = {"step": 0, "num_worse": 0}


class EarlyStopping(Hook):
    """Ends a run after ``patience`` readings in a row of the metric that chooses RUN/best which are no better; one that is not finite never is.
    The model of a better one within an epoch is exported to RUN/best_step_N."""

    def __init__(self, cfg: DictConfig) -> None:
        self._settings = schema.EarlyStopping.of(cfg.early_stopping)
        self._last: dict[str, Any] = _NO_READING

    def start(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if self._last.get("key", trainer.state.select_by) != trainer.state.select_by:
            self._last = _NO_READING
        self._stop_if_due(trainer.state)  # a run that was resumed stays stopped, unless patience was raised

    def after_step(self, state: TrainState) -> None:
        name, every = f"{run_files.BEST}_step_{state.step}", self._trainer.cfg.validate_every_n_steps
        # A probe may be evaluated more often.
        if every and state.step % every == 0 and self._improves(state) and self._trainer.export(name):
            state.best = update_best(state.best, state.select_by, name, state.evaluated)
            self._trainer.run.link(run_files.BEST, self._trainer.exported(name))

    def after_epoch(self, state: TrainState) -> None:
        self._improves(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state.get("early_stopping", self._last)

    def state_dict(self) -> dict[str, Any]:
        return {"early_stopping": self._last}

    def _improves(self, state: TrainState) -> bool:
        """Whether there is a new reading, and the best one so far."""
        # An epoch that could not be written is ended once more, with the same reading.
        if self._settings is None or state.select_by not in state.evaluated or state.step == self._last["step"]:
            return False
        is_best = update_best(state.best, state.select_by, "", state.evaluated) is not state.best
        number = 0 if is_best else self._last["num_worse"] + 1
        self._last = {"step": state.step, "num_worse": number, "key": state.select_by}
        self._stop_if_due(state)
        return is_best

    def _stop_if_due(self, state: TrainState) -> None:
        number = self._last["num_worse"]
        if self._settings is not None and number >= self._settings.patience:
            metric = str(state.select_by).replace("_", " ")
            reason = f"early_stopping: {metric} no better in {number} readings{to_continue(self._trainer, 'patience')}"
            state.request_stop(reason, by_all=True)


def build_metrics_log(cfg: DictConfig, run: Path, parallel: Parallel, *, num_steps: int) -> MetricsLog:
    """The metrics of a run of ``num_steps`` optimizer steps, not opened yet. Raises UserError if the metric logger cannot be built, most
    often because its package is not installed."""
    metric_logger = None
    # Others would each start a run of their own in the logger's service.
    if cfg.metric_logger is not None and parallel.is_rank_zero:
        metric_logger = build(cfg.metric_logger, "metric_logger")
    return MetricsLog(
        run,
        metric_logger,
        RunProgress(num_steps, cfg.epochs, is_shown=parallel.is_rank_zero),
        is_writer=parallel.is_rank_zero,
        every=cfg.log_every_n_steps,
        is_late=parallel.device.type == "cuda",
        world_size=parallel.world_size,
    )
