"""Where a run stands, what hooks ask of its loop, and the checkpoints from which it continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from finch.base import status
from finch.base.log import logger
from finch.checkpoint.reader import FORMAT, load_rng_state, load_tensors
from finch.checkpoint.writer import CheckpointWriter
from finch.data.order import GlobalOrder
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.training.chunked_loss import TokenLoss
from finch.training.metrics import MetricsLog
from finch.training.optimizer import Update
from finch.training.step_loss import StepLoss


@dataclass(frozen=True)
class Stop:
    """Why a run ends before its last epoch.

    Attributes:
        is_finished: whether the run is complete; else it is to be continued.
        is_requeued: whether it should be started again by who started it.
    """

    reason: str
    is_finished: bool = True
    is_requeued: bool = False


@dataclass
class TrainState:
    """
    Attributes:
        step, epoch: optimizer steps so far; the current epoch, from 0.
        consumed: samples of this epoch; with the epoch it is the complete position in the data, on any number of ranks.
        best: ``{"epoch": name, metric: value}`` of the best epoch, or None.
        select_by: the metric that the best epoch is chosen by; None: there is none.
        metrics: of the last step, as written to metrics.jsonl; tensors are not read yet.
        evaluated: validation losses and metrics of probes that were measured after the last step, by their names in metrics.jsonl.
        is_epoch_end: whether the last step was the last one of its epoch.
        is_synced: whether hooks may read tensors of the device after this step, see :meth:`finch.training.hooks.Hook.wants_sync`.
        stop: set once all ranks have agreed to stop.
        is_save_due: whether all ranks have agreed to save the state after this step, or with the epoch that it ends.
        waits: whether every request counts after its step, for which ranks wait for each other after each: a user's hooks may ask on one of them.
    """

    parallel: Parallel
    _: KW_ONLY
    step: int = 0
    epoch: int = 0
    consumed: int = 0
    best: dict[str, Any] | None = None
    select_by: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    is_epoch_end: bool = False
    is_synced: bool = False
    stop: Stop | None = None
    is_save_due: bool = False
    waits: bool = False
    _wants_save: bool = False
    _requested: Stop | None = None
    _is_asked_by_all: bool = False
    _sent: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def request_save(self, *, by_all: bool = False) -> None:
        """Asks for the state to be saved after this step or, of several ranks, the next one; one rank's request is enough. It counts after this one
        with ``waits``, at an epoch's end, and where every rank asks ``by_all`` after the same step."""
        self._wants_save = True
        self._is_asked_by_all |= by_all

    def request_stop(
        self, reason: str, *, is_finished: bool = True, is_requeued: bool = False, by_all: bool = False
    ) -> None:
        """Asks for the run to end, with its state saved, after the step of :meth:`request_save`. A run that is finished ends its epoch
        there, with the epoch's folder. The reason is printed, and kept in RUN/status.json. See :class:`Stop`."""
        self._is_asked_by_all |= by_all
        if self._requested is None or self._requested.is_finished:  # a signal's request stays
            self._requested = Stop(reason, is_finished, is_requeued)

    def saved(self) -> None:
        """What was asked is done."""
        self.is_save_due = self._wants_save = False

    def agree(self) -> None:
        """Makes the requests of each rank those of all; a collective of four numbers on the host. What it sends is read after the next step, so
        that no rank waits for another here, unless the request must count at once."""
        asked = self._requested or Stop("")
        flags = [self._wants_save, self._requested is not None, not asked.is_finished, asked.is_requeued]
        if self.parallel.world_size > 1:  # on the host: a request must not wait for the device
            sent = torch.tensor(flags, dtype=torch.int32)
            group = self.parallel.host_group
            self._sent.append((dist.all_reduce(sent, dist.ReduceOp.MAX, group=group, async_op=True), sent))
            is_late = not (self.waits or self.is_epoch_end or self._is_asked_by_all)  # the same on every rank
            flags = [False] * 4
            # What has been asked is read with all that was sent since, so that nothing of it is asked twice.
            while len(self._sent) > (is_late and not any(flags)):
                work, found = self._sent.pop(0)
                work.wait()
                flags = [bool(flag) for flag in found.tolist()]
        self._is_asked_by_all = False
        self.is_save_due, is_stopped, is_unfinished, is_requeued = flags
        if is_stopped:
            # A collective that no rank misses: `is_stopped` is the same on all by now.
            reasons = self.parallel.gather_all_ranks(asked.reason)
            self.stop = Stop(next(filter(None, reasons)), not is_unfinished, is_requeued)
            status.report(now=True, stopped_by=self.stop.reason)

    def advance(self, order: GlobalOrder, steps_per_epoch: int) -> None:
        self.step += 1
        self.consumed = min(self.consumed + order.global_batch, order.num_samples)
        self.is_epoch_end = self.consumed >= order.samples_in(steps_per_epoch)


class Resumable(Protocol):
    """What a recipe has that a checkpoint holds."""

    model: TokenLoss
    update: Update
    loss: StepLoss
    state: TrainState
    hooks: Mapping[str, Any]
    metrics_log: MetricsLog
    seed: int
    identity: dict[str, Any]


class Checkpointer:
    """Saves and restores what a run needs to continue bit for bit. What a checkpoint holds and why: :mod:`finch.checkpoint.reader`.

    ``writer`` says when a save is due, and waits for one in the background. A run ``is_light`` with ``save_best_only`` until it has saved or
    loaded a state: what it saves at its end has no weights, and only keeps a later start from training anew.
    """

    def __init__(self, cfg: DictConfig, run: Path, parallel: Parallel) -> None:
        self._parallel, self._user_hooks = parallel, list(cfg.hooks or ())  # in one order on every rank
        self.is_light = bool(cfg.save_best_only)
        self.writer = CheckpointWriter(
            run,
            parallel,
            every_n_steps=cfg.checkpoint.every_n_steps,
            every_n_minutes=cfg.checkpoint.every_n_minutes,
            keep_last=cfg.checkpoint.keep_last,
            asynchronous=cfg.checkpoint["async"],
            timeout_s=cfg.distributed_timeout,
        )

    def request_due(self, state: TrainState) -> None:
        """Asks for the saves of the config's block ``checkpoint``."""
        if (is_due := self.writer.is_due(state.step)) or self.writer.is_time():
            state.request_save(by_all=is_due)

    def save(
        self, trainer: Resumable, *, wait: bool = False, metrics_lines: int | None = None, is_end: bool = False
    ) -> bool:
        """A collective. Returns whether no hook has refused, and the disk no file so far.

        Args:
            trainer: the recipe.
            wait: until all is on the disk; else the save may have only begun.
            metrics_lines: the number of lines of metrics.jsonl that belong to the steps so far; None: all.
            is_end: whether the run is over.
        """
        state = trainer.state
        # A list, which asks every hook: any of them may hold a collective.
        if not all([hook.may_save(state) for hook in trainer.hooks.values()]):
            logger.info(f"the state of step {state.step} is not saved: a hook has refused")
            return False
        state.saved()
        self.is_light &= is_end
        tensors, hooks = {}, {}
        for name in self._user_hooks:
            tensors[name], hooks[name] = _split(trainer.hooks[name].state_dict())
        own = [hook.state_dict() for name, hook in trainer.hooks.items() if name not in self._user_hooks]
        scalars = {
            "format": FORMAT,
            "step": state.step,
            "epoch": state.epoch,
            "consumed": state.consumed,
            "seed": trainer.seed,
            "best": state.best,
            "schedule": trainer.update.schedule.state_dict(),
            **trainer.loss.state_dict(),
            "identity": trainer.identity,
            **{key: value for state in own for key, value in state.items()},
            "hooks": hooks,
            "has_weights": not self.is_light,
            "stopped_by": None if state.stop is None else state.stop.reason,
            "metrics_lines": trainer.metrics_log.num_lines() if metrics_lines is None else metrics_lines,
        }
        parts = (trainer.model, trainer.update.optimizers, scalars)
        options: dict[str, Any] = {"extra": _nonempty(tensors), "wait": wait, "has_tensors": not self.is_light}
        is_saved = self.writer.save(state.step, *parts, **options)
        trainer.metrics_log.reset_timer()
        watchdog.heartbeat()
        return is_saved

    def load(self, trainer: Resumable, folder: Path, scalars: dict[str, Any]) -> None:
        """Restores weights, optimizer, schedule, position, hooks and random states; a collective. Base learning rates stay the config's.
        Raises UserError if the checkpoint does not hold what this model and optimizer need."""
        saved, self.is_light = scalars.get("hooks", {}), False
        tensors = {name: _split(trainer.hooks[name].state_dict())[0] for name in self._user_hooks if name in saved}
        load_tensors(folder, trainer.model, trainer.update.optimizers, self._parallel, extra=_nonempty(tensors))
        state = trainer.state
        state.step, state.epoch, state.consumed = scalars["step"], scalars["epoch"], scalars["consumed"]
        state.best = scalars["best"]
        trainer.update.schedule.load_state_dict(scalars["schedule"])
        trainer.loss.load_state_dict(scalars)
        for name, hook in trainer.hooks.items():
            if name in tensors:
                hook.load_state_dict({**saved[name], **tensors[name]})
            elif name not in self._user_hooks:
                hook.load_state_dict(scalars)
            else:
                logger.warning(f"hooks.{name} has no state in {folder}: it starts from step {state.step}'s weights")
                # Again: before, it has seen the pretrained weights, and now those of the checkpoint.
                hook.prepare(trainer)
        # Last, since anything above may have drawn random numbers.
        load_rng_state(folder, scalars, self._parallel)


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and dictionaries of tensors, which the ranks save together; and the rest, which is JSON."""
    tensors = {
        key: value
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        or (isinstance(value, dict) and any(isinstance(each, torch.Tensor) for each in value.values()))
    }
    return tensors, {key: value for key, value in state.items() if key not in tensors}


def _nonempty(tensors: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: values for name, values in tensors.items() if values}
