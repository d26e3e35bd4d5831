"""TorchTitan's trainer with FINCH: the learning rate of a step comes from the loss of that step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from finch.base.dtensor import to_local
from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.methods import METHODS
from finch.config.schema import SelfReplay
from finch.distributed.parallel import follow_nccl
from finch.integrations.titan.checkpoints import is_finished
from finch.integrations.titan.config_checks import check_config, check_steps
from finch.integrations.titan.dataloader import RowsDataLoader, keep_date
from finch.integrations.titan.losses import ObjectiveLoss, initial_loss
from finch.integrations.titan.lr_scheduler import FinchLRSchedulersContainer
from finch.integrations.titan.mistakes import reported_under_torchrun
from finch.integrations.titan.recipe_config import RECIPE_KEYS, complete_folder, link_model, write_config
from finch.training.metrics import MetricsLog

_NOTHING = "nothing to do: {} steps have ended"


class FinchTrainer(Trainer):
    """TorchTitan's trainer, whose scheduler is FINCH. Made by :func:`finch.titan.to_finch_config`.

    Each micro-batch's loss is collected from ``forward_backward_step``. A hook before the optimizer's step sums them over the ranks,
    which gives the mean over all target tokens of the step, and sets the learning rate. Nothing of TorchTitan's training step is copied.

    Supported: FSDP, HSDP, tensor parallel, gradient accumulation, resume, synchronous and asynchronous checkpoints. Written for, but never
    run: context parallel and CUDA graphs. Refused: pipeline parallel and ``full_dtensor``, with a UserError before anything is built.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        self_replay: dict[str, Any] = field(default_factory=dict)
        """The recipe's block of this name, such as {"strength": 0.3}; empty: none."""

        probes: dict[str, Any] = field(default_factory=dict)
        """The recipe's probes, by name, such as {"own_answers": {"kind": "self"}}."""

        forgetting_budget: dict[str, Any] = field(default_factory=dict)
        """The recipe's budget of a probe; a run that it stops ends as at its last step."""

        probes_every_n_steps: int | None = None
        """How often probes are evaluated; None: by their cost."""

        def build(self, **kwargs: Any) -> FinchTrainer:
            with reported_under_torchrun():
                return Trainer.Config.build(self, **kwargs)

    lr_schedulers: FinchLRSchedulersContainer

    def __init__(self, config: Config) -> None:
        if is_finished(config):
            logger.info(_NOTHING.format(config.training.steps))
            raise SystemExit(0)  # no failure, after which a job script would start it again
        check_config(config)
        Trainer.__init__(self, config)
        rounds = getattr(self.dataloader, "rounds_per_epoch", None)
        check_steps(config, rounds, self.gradient_accumulation_steps)
        if isinstance(self.dataloader, RowsDataLoader):
            from finch.integrations.titan.recipe_hooks import parallel_of

            self.dataloader.read_rows(parallel_of(self), self.gradient_accumulation_steps)
        self.run_metrics = RunMetrics(self, self.metrics_processor.logger)
        self.metrics_processor.logger = self.run_metrics
        inner = self.loss_fn.loss_fn if isinstance(self.loss_fn, ChunkedLossWrapper) else self.loss_fn
        self._objective = inner if isinstance(inner, ObjectiveLoss) else None
        self._step_loss: torch.Tensor | None = None
        self._has_begun = False
        self._hooks = None
        if any(getattr(config, key) for key in RECIPE_KEYS):
            from finch.integrations.titan.recipe_hooks import RecipeHooks

            self._hooks = RecipeHooks(self)
        self.optimizers.register_step_pre_hook(self._set_lr)

    def init_distributed(self) -> ParallelDims:
        """As TorchTitan's, and the date of the rows, which are read next."""
        follow_nccl()
        dims = Trainer.init_distributed(self)
        keep_date(self.config)
        return dims

    def train(self) -> None:
        """As TorchTitan's; a mistake in the data is one line, and a Hugging Face folder of the last step is complete and found by its link."""
        with reported_under_torchrun():
            Trainer.train(self)
            self._check_schedule()
            if self._hooks is not None and self._has_begun:  # else a finished run was started again
                self._hooks.end()
            if not self._has_begun:
                logger.info(_NOTHING.format(self.step))
        checkpoint, folder = self.config.checkpoint, Path(self.config.dump_folder)
        if checkpoint.enable and checkpoint.last_save_in_hf and torch.distributed.get_rank() == 0:
            model = folder / checkpoint.folder / f"step-{self.step}"
            tokenizer = getattr(self.dataloader, "chat_tokenizer", None)
            complete_folder(model, Path(self.config.hf_assets_path), tokenizer)
            link_model(folder, model, self._epoch())

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """As TorchTitan's. Before the first one of this start, what needs the loaded weights is measured."""
        if not self._has_begun:
            self._begin()
        with self._keeping_grad_norm():
            Trainer.train_step(self, data_iterator)
        metrics = {
            "epoch": self._epoch(),
            "loss": self._loss,
            **self.lr_schedulers.schedule.metrics(),
            "grad_norm": self._grad_norm,
            "num_target_tokens": self._num_targets,
        }
        if self._hooks is not None:
            metrics |= self._hooks.metrics()
        self.run_metrics.add_step(self.step, metrics)
        if self.metrics_processor.should_log(self.step):
            self._check_schedule()
        if self._hooks is not None:
            is_last = self.step == self.config.training.steps or self._epoch(self.step + 1) > self._epoch()
            self._hooks.after_step(self.step, self._epoch(), is_epoch_end=is_last)

    def _check_schedule(self) -> None:
        if skipped := self.lr_schedulers.schedule.check():
            logger.warning(f"{skipped} updates with a non-finite loss or gradient were skipped up to step {self.step}")

    def _epoch(self, step: int | None = None) -> int:
        """Of a step, or the last one, from 0."""
        rounds = getattr(self.dataloader, "rounds_per_epoch", None)
        return 0 if rounds is None else ((step or self.step) - 1) * self.gradient_accumulation_steps // rounds

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor) -> torch.Tensor:
        """As TorchTitan's, and collects the loss.

        Returns [] this rank's share of the step's mean loss in nats, for TorchTitan's log; 0 where it is not finite: FINCH decides what
        happens then, where TorchTitan would end the run at its next log.
        """
        if self._hooks is not None and self._step_loss is None:  # the step's first micro-batch
            self._hooks.backward_replayed(self.step)
        loss = Trainer.forward_backward_step(
            self, input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        loss = to_local(loss.detach())  # a DTensor under tensor parallel, whose local values TorchTitan sums as well
        share = loss.double()  # a copy: a CUDA graph writes the next loss to the same memory
        if self._objective is not None:
            share = self._objective.read_and_reset() / global_valid_tokens
        self._step_loss = share if self._step_loss is None else self._step_loss + share
        self._num_targets = global_valid_tokens
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def _begin(self) -> None:
        """Measures the loss that the average starts from, writes config.yaml and opens the metrics; a collective."""
        self._has_begun = True
        if self.lr_schedulers.init == "dataset" and not self.lr_schedulers.has_state:
            self.lr_schedulers.start(initial_loss(self))
        if torch.distributed.get_rank() == 0:
            write_config(self, Path(self.config.dump_folder))
        self.run_metrics.open(self.step - 1)
        if self._hooks is not None:
            self._hooks.begin(self.step - 1)
        self.metrics_processor.time_last_log = time.perf_counter()

    def _set_lr(self, *_: Any) -> None:
        """Sets the learning rate of the step; a collective. Called by the optimizers right before their step."""
        assert self._step_loss is not None
        loss = dist_utils.dist_sum_tensor(self._step_loss, self.parallel_dims.get_optional_mesh("loss"))
        # A non-finite gradient spoils the weights as a non-finite loss does: 0 * norm is then NaN, and else 0.
        self._loss = loss + 0 * self._grad_norm
        self._step_loss = None
        if not self.lr_schedulers.set_lr(self._loss, self._num_targets):
            self.optimizers.zero_grad(set_to_none=True)  # without gradients an optimizer leaves everything as it is

    @contextlib.contextmanager
    def _keeping_grad_norm(self) -> Iterator[None]:
        """Keeps what TorchTitan's step clips by, [] over all ranks, which it shows to nobody: a second norm would read all gradients again."""
        clip = dist_utils.clip_grad_norm_

        def keep(*args: Any, **options: Any) -> torch.Tensor:
            self._grad_norm = clip(*args, **options)
            return self._grad_norm

        dist_utils.clip_grad_norm_ = keep
        try:
            yield
        finally:
            dist_utils.clip_grad_norm_ = clip


class RunMetrics(BaseLogger):
    """metrics.jsonl in the dump folder, with the names of finch's recipe; TorchTitan's own loggers get what it logs, and FINCH's rate."""

    def __init__(self, trainer: FinchTrainer, inner: BaseLogger) -> None:
        self._trainer, self._inner = trainer, inner
        self._folder, self._is_writer = Path(trainer.config.dump_folder), torch.distributed.get_rank() == 0
        self._lines = MetricsLog(
            self._folder,
            None,
            is_writer=self._is_writer,
            every=trainer.config.metrics.log_freq,
            world_size=torch.distributed.get_world_size(),
        )

    def open(self, first_step: int) -> None:
        """Opens the file; lines after ``first_step``, of an earlier attempt, are dropped."""
        if self._is_writer:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._lines.open(first_step=first_step)

    def add_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds a step, after TorchTitan has logged it; tensors are read every ``metrics.log_freq`` steps."""
        self._lines.add(step, metrics)
        self._lines.report()
        checkpoint, is_last = self._trainer.config.checkpoint, step == self._trainer.config.training.steps
        if checkpoint.enable and (is_last or step % checkpoint.interval == 0):
            self._lines.flush()  # a run that is killed continues after this step, whose line it would not write again

    def flush(self) -> None:
        self._lines.flush()

    def reset_timer(self) -> None:
        self._lines.reset_timer()

    def write_event(self, line: dict[str, Any]) -> None:
        """Adds a line of probes, which TorchTitan's loggers get too."""
        self._lines.write_event(line)
        self._inner.log({name: value for name, value in line.items() if name.startswith("probe/")}, line["step"])

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Called by TorchTitan at the steps that it logs, and after validation."""
        if "grad_norm" in metrics:
            schedule = self._trainer.lr_schedulers.schedule.metrics()
            metrics = {**metrics, **{name: float(schedule[name]) for name in ("lr", "ema_loss", "lr_is_capped")}}
        if "validation_metrics/loss" in metrics:
            self._lines.write_event({"step": step, "validation_loss": metrics["validation_metrics/loss"]})
            self._lines.reset_timer()
        self._inner.log(metrics, step)

    def close(self) -> None:
        self._lines.close()
        self._inner.close()


def to_finch_config(config: Trainer.Config, *, preserve: bool = False, **schedule: Any) -> FinchTrainer.Config:
    """A FINCH run of what ``config`` trains; ``config`` stays as it is.

        config = to_finch_config(llama3_8b(), eta_max=5e-5, init="dataset")

    ``preserve``: with the self_replay of the recipe's ``method=preserve``, whose rate is constant where this one is FINCH's; at the end
    ``finch average DUMP_FOLDER`` averages.

    ``schedule`` are fields of :class:`FinchLRSchedulersContainer.Config`; the optimizer's ``lr`` is eta_base. Settings that FINCH cannot work
    with are refused when the trainer is built, since the command line may still change them.

    Raises UserError for an unknown field, a config of another trainer's class, or one that is FINCH's already.
    """
    if isinstance(config, FinchTrainer.Config):
        raise UserError(
            "config has FINCH already: set the fields of config.lr_scheduler instead of converting it a second time"
        )
    if type(config) is not Trainer.Config:
        owner = getattr(config, "_owner", None)
        name = type(config).__qualname__ if owner is None else f"{owner.__name__}.Config"
        raise UserError(
            f"config={name}: its trainer may have another training step; derive a trainer from finch.titan.FinchTrainer instead"
        )
    known = [field.name for field in fields(FinchLRSchedulersContainer.FINCHConfig)]
    for key in schedule:
        if key not in known:
            raise UserError(f"{key}={schedule[key]!r} is no setting of FINCH; its settings are {', '.join(known)}")
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["lr_scheduler"] = FinchLRSchedulersContainer.FINCHConfig(**schedule)
    if preserve:  # all of them, since the command line can change those that are here
        values["self_replay"] = SelfReplay(**METHODS["preserve"].blocks["self_replay"]).model_dump(exclude_none=True)
    return FinchTrainer.Config(**values)
