"""Full fine-tuning with FINCH's loss-adaptive learning rate, on one process or many.

tune run finch_full_finetune --config stories260k/tofu_finch data_root=DATA
tune run --nproc_per_node 2 finch_full_finetune --config stories260k/tofu_finch data_root=DATA
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import modules, training, utils
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training.activations import apply_selective_activation_checkpointing

from finch import FinchLR, ReplayLR, checkpoint, parallel
from finch.checks import (
    check_combinations,
    check_output_folder,
    check_schedule,
    check_text_decoder,
    is_objective,
)
from finch.config import as_config_of_its_own, build, component_of, locate, parse, redacted
from finch.data.inspection import inspect
from finch.data.loading import Batch, Samples, collator, load_dataset, loader, model_inputs, to_device
from finch.data.order import GlobalOrder
from finch.dataset_loss import dataset_loss
from finch.errors import UserError, WriteFailed, leave_well
from finch.formats import open_checkpoint
from finch.metrics import FILE_NAME as METRICS_FILE
from finch.metrics import MetricsLog
from finch.models.corrected import corrected
from finch.names import did_you_mean
from finch.objectives import EAFT, CrossEntropy, Objective
from finch.optimizer_in_backward import optimizers_in_backward
from finch.options import FULL_FINETUNE
from finch.precision import check_hardware, precision_of
from finch.pretrained import FILE_NAME as PRETRAINED_FILE
from finch.pretrained import Pretrained, fingerprint_of, load_pretrained, pretrained_pass
from finch.processes import die_with_parent
from finch.run_lock import RunLock
from finch.saver import Saver
from finch.signals import REQUEUE, Asked, Signals
from finch.step_median import StepMedian
from finch.stochastic_rounding import adapt, stochastic_optimizer
from finch.tensor_parallel import apply_plan, build_plan
from finch.token_loss import TokenLoss

log = utils.get_logger("INFO")
OBJECTIVE_CHUNKS = 8  # pieces in which an objective's logits are made; torchtune's default of its chunked cross-entropy


class FinchFullFinetune(FTRecipeInterface):
    """Full fine-tuning of a torchtune decoder.

    Features, and the keys that control them (all of them: :mod:`finch.options`):
        - FINCH (``lr_scheduler: {_component_: finch.FinchLR, eta_max, ema, init}``): the learning rate of a step
          comes from the loss of that step, over all micro-batches and ranks, weighted by target tokens. ``init:
          dataset`` starts the EMA at the pretrained model's mean loss over the training rows. torchtune's schedulers
          and a constant learning rate work as well.
        - FSDP2 over all ranks that torchrun starts, gloo on CPU and NCCL on CUDA; HSDP
          (``data_parallel_replicate_dim``) and tensor parallelism (``tensor_parallel_dim``, ``tensor_parallel_plan``).
          One process without need (mixed precision, CPU offload) runs unsharded.
        - Precision (``dtype``): fp32, bf16 (pure), bf16_mixed (fp32 master weights), bf16_stochastic (torchao's
          optimizer). fp16: not.
        - One global order of samples on any layout; an epoch's short last batch is kept (``drop_last: True`` leaves
          it out).
        - The optimizer inside the backward (``optimizer_in_bwd``), with FINCH as well.
        - Gradient accumulation, clipping, activation checkpointing (full and selective) and offloading, compile, CPU
          offload, packed data, profiler, metric loggers: torchtune's keys and components.
        - Validation (``dataset_validation``) at each epoch's end and every ``validate_every_n_steps``; ``best`` names
          the best epoch.
        - Each epoch ends with a Hugging Face folder. A checkpoint to resume from (``resume_from_checkpoint``), on any
          number of ranks, is saved there and between (``checkpoint``), while training goes on.
        - SIGTERM, SIGUSR1 and Ctrl-C end the run after a step, its state saved.

    Args:
        cfg: a config that :func:`finch.config.check` has passed.

    Raises:
        UserError: options that exclude each other, files that are missing, data that cannot be used; in one sentence,
            before weights are loaded.
    """

    options = FULL_FINETUNE
    """The keys of the config, which is saved beside the run."""
    saves_all_weights = True
    """Whether a checkpoint to resume from holds every weight, or only those that are trained."""

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self._precision = precision_of(cfg.dtype)
        self._device = parallel.local_device(cfg.device)
        check_hardware(cfg.dtype, self._device)
        self._loss_schedule_kind = check_schedule(cfg)
        self._is_finch = self._loss_schedule_kind is not None and issubclass(self._loss_schedule_kind, FinchLR)
        check_combinations(cfg, self._device)
        self._run = Path(cfg.output_dir)
        self._lock = RunLock(self._run)
        self._lock.check()
        self._found_checkpoints = check_output_folder(cfg)
        self._clip_grad_norm = None if cfg.clip_grad_norm is None else float(cfg.clip_grad_norm)
        self._mesh_sizes = parallel.MeshSizes(
            cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim, cfg.tensor_parallel_dim
        )

        # The run's position. `consumed` counts this epoch's samples: with the epoch it is all that resuming needs.
        self.step = 0
        self.epoch = 0
        self.consumed = 0
        self.best: dict[str, Any] | None = None
        self.interrupted = False
        """Whether Ctrl-C has ended the run."""

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything, cheap and fallible things first, weights last."""
        self._parallel = parallel.start(
            self._device,
            shard=self._precision.is_mixed or cfg.fsdp_cpu_offload,
            offload=cfg.fsdp_cpu_offload,
            timeout_s=cfg.distributed_timeout,
            sizes=self._mesh_sizes,
        )
        if self._found_checkpoints and self._parallel.is_rank_zero:
            self._hold_folder()
        state = self._choose_checkpoint(cfg)
        self.seed = training.set_seed(
            cfg.seed if cfg.seed is not None or state is None else state["seed"], cfg.cudnn_deterministic_mode
        )
        self._say(
            f"{self._parallel.world_size} rank{'s' if self._parallel.world_size > 1 else ''} on {self._device.type}; dtype {cfg.dtype}: {self._precision.words}"
        )

        decoder = self._build_decoder(cfg)
        known = {name for name, _ in decoder.named_modules()} | {"output"}
        for name in cfg.custom_sharded_layers or []:
            if name not in known:
                raise UserError(
                    f"custom_sharded_layers names {name}, which the model does not have{did_you_mean(name, known)}"
                )

        self._tokenizer = build(cfg.tokenizer, "tokenizer")
        self._objective: Objective = build(cfg.loss, "loss") if is_objective(cfg) else CrossEntropy()
        self._median = StepMedian(self._objective, self._parallel)
        self._regularizer = None if cfg.regularizer is None else build(cfg.regularizer, "regularizer")
        self._setup_data(cfg)
        identity = self._identity(cfg)
        if state is not None and self._resume_folder is not None:
            checkpoint.check_identity(state, identity, self._resume_folder)
        self._state_identity = identity

        self._start_output_folder(cfg)
        self._signals = Signals(
            self._parallel, timeout_s=cfg.distributed_timeout, before_training=self._leave_requeue_file
        )
        self._signals.install()
        self._saver = Saver(
            self._run,
            self._parallel,
            every_n_steps=cfg.checkpoint.every_n_steps,
            every_n_minutes=cfg.checkpoint.every_n_minutes,
            keep_last=cfg.checkpoint.keep_last,
            asynchronous=cfg.checkpoint["async"],
            timeout_s=cfg.distributed_timeout,
            tell=lambda sentence, is_bad: self._say(sentence, logging.WARNING if is_bad else logging.INFO),
        )
        self._model = self._setup_model(cfg, decoder)
        is_fresh = state is None
        wants_pass = "pretrained_token_loss" in self._objective.needs or (is_fresh and self._starts_at_mean(cfg))
        pretrained = self._load_pretrained(cfg) if wants_pass else None
        if (
            is_fresh
            or not self.saves_all_weights
            or self._regularizer is not None
            or (wants_pass and pretrained is None)
        ):
            self._load_base()
        if wants_pass and pretrained is None:
            pretrained = self._take_pretrained_pass(cfg)
        self._prepare_objective(pretrained)
        if self._regularizer is not None:
            self._regularizer.start(self._trained_parameters().items())
        self._optimizers = self._setup_optimizers(cfg)
        if state is None:
            self._setup_schedule(cfg, init=self._initial_loss(cfg, pretrained))
        else:
            self.load_checkpoint(cfg, state)
        logger = None
        if cfg.metric_logger is not None and self._parallel.is_rank_zero:
            logger = build(cfg.metric_logger, "metric_logger")
            logger.log_config(redacted(cfg))
        self._log_metrics = MetricsLog(
            self._run,
            logger,
            is_writer=self._parallel.is_rank_zero,
            every=cfg.log_every_n_steps,
            world_size=self._parallel.world_size,
            first_step=self.step,
            first_lines=None if state is None else state["metrics_lines"],
        )
        self._profiler = self._setup_profiler(cfg)
        if state is not None and self._resume_folder is not None:
            checkpoint.restore_rng(self._resume_folder, state, self._parallel)

    def train(self) -> None:
        """The training loop: epochs, steps, and what happens between them."""
        cfg = self._cfg
        if self.epoch >= cfg.epochs:
            self._say(f"nothing to do: {self._run} has finished its {cfg.epochs} epochs; set epochs higher to go on")
        self._signals.start()
        self._profiler.start()
        for epoch in range(self.epoch, cfg.epochs):
            self.epoch = epoch
            steps = self._steps_per_epoch
            first = -(-self.consumed // self._order.global_batch)  # the last batch of an epoch may be short
            batches = self._batches(epoch)
            self._log_metrics.start_epoch(epoch, cfg.epochs, steps, first)
            for _ in range(first, steps):
                self._train_step(list(itertools.islice(batches, self._order.micro_batches_in_step(self.consumed))))
                self.consumed = min(self.consumed + self._order.global_batch, len(self._samples))
                self._profiler.step()
                if (
                    cfg.validate_every_n_steps
                    and self.step % cfg.validate_every_n_steps == 0
                    and self._validation is not None
                ):
                    self.validate()
                asked = self._signals.agree(self._saver.is_due(self.step))
                if asked.stop:
                    self._stop(asked)
                    return
                if asked.save and self.consumed < self._order.samples_in(steps):  # else it is saved with the epoch
                    self.save_state()
                self._saver.poll()
            self._end_epoch(cfg)
        self._profiler.stop()

    def _stop(self, asked: Asked) -> None:
        """Saves the state and leaves the loop, as a signal has asked for."""
        self._log_metrics.end_epoch()
        is_saved = self.save_state(wait=True)
        if asked.requeue:
            self._leave_requeue_file()
        self.interrupted = not asked.requeue
        last = f"step {self.step}" if is_saved else "the last checkpoint"
        self._say(
            f"stopped by a signal after step {self.step}; the same command with resume_from_checkpoint=True goes on from {last}"
        )

    def _train_step(self, batches: list[Batch]) -> None:
        """One optimizer step over its micro-batches. On CUDA with a fused optimizer FINCH reads nothing back to the host here."""
        num_targets = sum(batch["targets"].numel() for batch in batches)
        num_counted = sum(self._objective.count(batch) for batch in batches)
        counts = torch.tensor([num_targets, num_counted], dtype=torch.float64, pin_memory=self._device.type == "cuda")
        targets, divisor = self._parallel.sum(counts.to(self._device, non_blocking=True)).unbind()
        scale = self._parallel.data_parallel_size / divisor.clamp(min=1)  # undoes FSDP2's mean over ranks
        batches = [to_device(batch, self._device) for batch in batches]
        self._median.before_step(batches, self._token_losses)
        raw = torch.zeros((), dtype=torch.float64, device=self._device)
        loss = None
        norms: dict[str, torch.Tensor | None] = {"grad_norm": None}
        for batch in batches:
            token_loss = self._token_losses(batch)  # [batch, seq] in nats
            self._median.observe(token_loss.detach(), batch)
            weight = self._objective.weights(token_loss.detach(), batch)
            raw += token_loss.detach().sum(dtype=torch.float64)
            if self._cfg.optimizer_in_bwd:  # the only micro-batch; its backward updates, so the rate comes before it
                loss = self._mean_loss(raw, targets)
                if not self._set_learning_rate(loss, divisor):
                    break
            ((weight * token_loss).sum() * scale).backward()
        if loss is None:
            loss = self._mean_loss(raw, targets)
            if self._regularizer is not None:
                norms.update(self._regularizer.add_gradients())
            norms["grad_norm"] = self._clip_gradients()
            if self._set_learning_rate(loss, divisor):
                self._optimizers[0].step()
        self._median.after_step()
        self.step += 1
        self._report(loss, targets, norms)
        self._model.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
            self._share_learning_rate()

    def _token_losses(self, batch: Batch) -> torch.Tensor:
        """[batch, seq] in nats; the logits that an objective asks for go into the batch."""
        if "top_logits" not in self._objective.needs:
            return self._model(**model_inputs(batch))
        losses, batch["top_logits"] = self._model(**model_inputs(batch), num_top_logits=EAFT.num_logits)
        return losses

    def _mean_loss(self, raw: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The raw cross-entropy of the whole step, whatever the objective, in nats a target token."""
        return self._parallel.sum(raw) / targets.clamp(min=1)

    def _set_learning_rate(self, loss: torch.Tensor, counted: torch.Tensor) -> bool:
        """Returns whether to take the optimizer step: not where the objective counts no token. torch's schedulers have set
        their learning rate after the step before."""
        if self._loss_schedule is not None:
            return self._loss_schedule.step(loss, counted)
        if counted == 0:
            return False
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss was not finite at step {self.step + 1}: lower optimizer.lr or check the data"
            )
        return True

    def _clip_gradients(self) -> torch.Tensor:
        """Clips to ``clip_grad_norm`` if set; returns the norm before clipping, over all ranks' shards."""
        parameters = list(self._trained_parameters().values())
        if self._clip_grad_norm is None:
            norm = parallel.grad_norm(parameters)
        else:
            norm = parallel.clip_grad_norm(parameters, self._clip_grad_norm)
        return norm.to(self._device, non_blocking=True)  # offloaded gradients live on the CPU

    def _share_learning_rate(self) -> None:
        """torch's schedulers set one optimizer's rate; inside the backward there is an optimizer for each parameter."""
        for optimizer in self._optimizers[1:]:
            optimizer.param_groups[0]["lr"] = self._optimizers[0].param_groups[0]["lr"]

    def _report(self, loss: torch.Tensor, targets: torch.Tensor, norms: dict[str, torch.Tensor | None]) -> None:
        if self._loss_schedule is not None:
            rate = self._loss_schedule.metrics()
        else:
            rate = {"ema_loss": None, "lr": self._optimizers[0].param_groups[0]["lr"], "lr_is_capped": False}
        metrics = {"epoch": self.epoch, "loss": loss, **rate, **norms, "num_target_tokens": targets}
        if self._device.type == "cuda" and self._cfg.log_peak_memory_stats:
            metrics.update(training.get_memory_stats(device=self._device))
        if self._cfg.debug_checks:
            self._parallel.check_equal(
                "the learning rate", torch.as_tensor(rate["lr"], dtype=torch.float64).reshape(1).to(self._device)
            )
            if rate["ema_loss"] is not None:
                self._parallel.check_equal(
                    "the EMA of the loss",
                    torch.as_tensor(rate["ema_loss"], dtype=torch.float64).reshape(1).to(self._device),
                )
        self._log_metrics.add(self.step, metrics)
        if self._loss_schedule is not None and self.step % self._cfg.log_every_n_steps == 0:
            self._loss_schedule.check()  # the metrics have just been read: this is where a device's non-finite losses come to light

    def validate(self) -> float | None:
        """Mean loss over ``dataset_validation`` in nats, noted in the metrics; None without one."""
        if self._validation is None:
            return None
        loss = self._loss_over(self._validation, "validation")
        self._log_metrics.note({"step": self.step, "epoch": self.epoch, "validation_loss": loss})
        self._say(f"epoch {self.epoch + 1}/{self._cfg.epochs}, step {self.step}: validation loss {loss:.4f}")
        self._log_metrics.pause()
        return loss

    def _end_epoch(self, cfg: DictConfig) -> None:
        self._log_metrics.end_epoch()
        lines = self._log_metrics.lines()
        loss = self.validate()
        name = f"epoch_{self.epoch}"
        is_last = self.epoch + 1 == cfg.epochs
        if self._export_epoch(name):
            if loss is not None and math.isfinite(loss) and (self.best is None or loss < self.best["validation_loss"]):
                self.best = {"epoch": name, "validation_loss": loss}
            if self._parallel.is_rank_zero and self.best is not None:
                _point(self._run / "best", self._exported(self.best["epoch"]))
        elif is_last:
            self.save_state(wait=True, lines=lines)
            raise UserError(
                f"output_dir={self._run} has no room for the last epoch's folder; make room, and resume_from_checkpoint=True writes it"
            )
        self.epoch, self.consumed = self.epoch + 1, 0
        self.save_state(wait=is_last)

    def _export_epoch(self, name: str) -> bool:
        """The Hugging Face folder of the epoch that has ended; a collective. Returns whether it could be written."""
        began = time.perf_counter()
        told = None
        try:
            self._export(name)
        except WriteFailed as error:
            told = str(error)
        told = self._parallel.gather_all(told)[0]
        if told is not None:
            self._say(f"{self._run / name} could not be written ({told})", logging.WARNING)
        else:
            self._say(f"saved {self._run / self._exported(name)} in {time.perf_counter() - began:.1f} s")
        return told is None

    def save_state(self, wait: bool = False, lines: int | None = None) -> bool:
        """Saves all that a run needs to go on after this step, see :meth:`finch.saver.Saver.save`; a collective.

        Args:
            wait: until it is on the disk.
            lines: of metrics.jsonl that belong to the steps so far; None: all.
        """
        state = {
            "step": self.step,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self.seed,
            "best": self.best,
            "schedule": self._schedule_state(),
            "median": self._median.last,
            "metrics_lines": self._log_metrics.lines() if lines is None else lines,
            "identity": self._state_identity,
        }
        is_well = self._saver.save(self.step, self._model, self._optimizers, state, wait=wait)
        self._log_metrics.pause()
        return is_well

    def _export(self, name: str) -> None:
        """What a user takes away from an epoch; a collective."""
        dtype = None if self._cfg.export_dtype is None else precision_of(self._cfg.export_dtype).weights
        weights = self._model.decoder.state_dict().items()
        self._base.write(weights, self._run / name, is_writer=self._parallel.is_rank_zero, dtype=dtype)

    def _exported(self, name: str) -> str:
        """The folder of an epoch."""
        return name

    def load_checkpoint(self, cfg: DictConfig, state: dict[str, Any]) -> None:
        """Restores weights, optimizer, schedule and position. The schedule is built first: its base learning rates are the config's."""
        assert self._resume_folder is not None
        self._setup_schedule(cfg, init="first_batch")
        checkpoint.load_tensors(self._resume_folder, self._model, self._optimizers, self._parallel)
        self.step, self.epoch, self.consumed, self.best = (
            state["step"],
            state["epoch"],
            state["consumed"],
            state["best"],
        )
        self._median.last = state["median"]
        if self._loss_schedule is not None:
            self._loss_schedule.load_state_dict(state["schedule"])
        elif self._scheduler is not None:
            groups = self._optimizers[0].param_groups  # as many as the mesh asks for, all of one learning rate
            rates = state["schedule"]["_last_lr"][:1] * len(groups)
            self._scheduler.load_state_dict({**self._scheduler.state_dict(), **state["schedule"], "_last_lr": rates})
            for group in groups:
                group["lr"] = rates[0]
            self._share_learning_rate()

    def close(self) -> None:
        """After an end of any kind: writes out what the metrics log still holds, and lets a save that runs come to its end."""
        if hasattr(self, "_log_metrics"):
            self._log_metrics.close()
        if hasattr(self, "_signals"):
            self._signals.restore()
        if hasattr(self, "_saver"):
            self._saver.close()
        self._lock.release()

    def cleanup(self) -> None:
        """Ends a run that went well. After an error the process group is left alone: closing NCCL's waits for lost ranks."""
        self.close()
        parallel.stop()

    # Building blocks

    def _choose_checkpoint(self, cfg: DictConfig) -> dict[str, Any] | None:
        """The scalars of the checkpoint to go on from, the latest whole one; None: a fresh run."""
        self._resume_folder, damages = checkpoint.first_whole(self._found_checkpoints, self._parallel)
        state = None
        if self._resume_folder is not None:
            state = checkpoint.read_state(self._resume_folder)
            self._say(f"resumed from step {state['step']} of {self._resume_folder}")
        elif damages:
            raise UserError(
                f"resume_from_checkpoint={cfg.resume_from_checkpoint}: {damages[0]}, and there is no other; start afresh with overwrite=True"
            )
        for sentence in damages:
            self._say(sentence, logging.WARNING)
        return state

    def _setup_data(self, cfg: DictConfig) -> None:
        self._samples = load_dataset(cfg, "dataset", self._tokenizer)
        self._validation = (
            load_dataset(cfg, "dataset_validation", self._tokenizer) if cfg.dataset_validation is not None else None
        )
        self._order = GlobalOrder(
            len(self._samples),
            micro_batch=cfg.batch_size,
            accumulation=cfg.gradient_accumulation_steps,
            ranks=self._parallel.data_parallel_size,
            shuffle=cfg.shuffle,
            seed=self.seed,
            drop_last=cfg.drop_last,
        )
        if self._order.global_batch > len(self._samples):
            raise UserError(
                f"the global batch of {self._order.global_batch} (batch_size {cfg.batch_size} x gradient_accumulation_steps "
                f"{cfg.gradient_accumulation_steps} x {self._parallel.data_parallel_size} ranks) is larger than the dataset of {len(self._samples)} "
                "samples; lower batch_size or gradient_accumulation_steps"
            )
        packed = any(samples.packed for samples in self._all_samples())
        if packed and self._device.type == "cpu" and torch.cuda.is_available():
            raise UserError(
                "dataset.packed=True with device=cpu: torchtune builds the mask of packed rows on the GPU where there is one; use device=cuda, "
                "or hide the GPU with CUDA_VISIBLE_DEVICES="
            )
        self._collate = {
            id(samples): collator(samples, self._tokenizer, locate(cfg.collate_fn, "collate_fn"))
            for samples in self._all_samples()
        }
        limit = getattr(self._tokenizer, "max_seq_len", None)
        # What the pretrained model says of the rows is kept under their digest.
        wants_digest = "pretrained_token_loss" in self._objective.needs or self._starts_at_mean(cfg)
        self._rows = inspect(self._samples, limit, self._parallel) if cfg.check_dataset or wants_digest else None
        if self._validation is not None and cfg.check_dataset:
            inspect(self._validation, limit, self._parallel)
        if self._loss_schedule_kind is ReplayLR:
            self._check_replay(cfg)
        self._say(
            f"{len(self._samples)} samples; {self._order.global_batch} per optimizer step, {self._order.steps_per_epoch} steps per epoch"
        )

    def _check_replay(self, cfg: DictConfig) -> None:
        stand_in = torch.optim.SGD([torch.zeros(1)], lr=float(cfg.optimizer.lr))
        try:
            build(cfg.lr_scheduler, "lr_scheduler", stand_in).check_length(cfg.epochs * self._steps_per_epoch)
        except ValueError as error:
            raise UserError(f"lr_scheduler: {error}") from error

    @property
    def _steps_per_epoch(self) -> int:
        return min(self._order.steps_per_epoch, self._cfg.max_steps_per_epoch or self._order.steps_per_epoch)

    def _all_samples(self) -> list[Samples]:
        return [samples for samples in (self._samples, self._validation) if samples is not None]

    def _build_decoder(self, cfg: DictConfig) -> modules.TransformerDecoder:
        """The decoder on the meta device, checked against the pretrained folder."""
        node, told = corrected(cfg.model)
        if told is not None:
            self._say(told, logging.WARNING)
        with training.set_default_dtype(self._precision.weights), torch.device("meta"):
            decoder = build(node, "model")
        check_text_decoder(decoder, component_of(node) or "")
        self._base = open_checkpoint(cfg.checkpointer)
        self._base.check_model(decoder, component_of(node) or "")
        self._tensor_plan = None
        if cfg.tensor_parallel_dim > 1:
            self._tensor_plan = build_plan(cfg.tensor_parallel_plan, decoder, cfg.tensor_parallel_dim)
        return decoder

    def _setup_model(self, cfg: DictConfig, decoder: modules.TransformerDecoder) -> TokenLoss:
        """Wraps, shards and materializes the decoder; its weights come later."""
        plain = build(cfg.loss, "loss")
        num_chunks = OBJECTIVE_CHUNKS if is_objective(cfg) else getattr(plain, "num_output_chunks", 1)
        model = TokenLoss(decoder, num_chunks)
        if self._parallel.tensor_mesh is not None and self._tensor_plan is not None:
            apply_plan(
                decoder, self._tensor_plan, self._parallel.tensor_mesh
            )  # before layers are wrapped: it goes by names
        if cfg.compile:
            training.compile_model(decoder, verbose=self._parallel.is_rank_zero)
            backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")  # torchtune's switch
            model.cross_entropy = torch.compile(model.cross_entropy, backend=backend)
        if cfg.ac_mode is not None:
            apply_selective_activation_checkpointing(decoder, cfg.ac_mode, cfg.ac_option)
        elif cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(decoder, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        layers: list[nn.Module] = list(decoder.layers)
        # The output layer is used inside the root's forward, and so is an embedding tied to it: both stay in the root's group.
        in_root = {"output", "tok_embeddings"} if isinstance(decoder.output, modules.TiedLinear) else {"output"}
        apart = [decoder.get_submodule(name) for name in cfg.custom_sharded_layers or [] if name not in in_root]
        parallel.shard_model(
            model,
            [*layers, *apart],
            self._parallel,
            mixed_precision=self._precision.policy(),
            offload=cfg.fsdp_cpu_offload,
            reshard_after_forward=cfg.fsdp_reshard_after_forward,
            pin_memory=not cfg.optimizer_in_bwd,
        )
        model.to_empty(device="cpu" if cfg.fsdp_cpu_offload else self._device)
        with training.set_default_dtype(self._precision.weights), self._device:
            for module in decoder.modules():
                if hasattr(module, "rope_init"):
                    module.rope_init()  # not in state dicts
        model.offloading = training.get_act_offloading_ctx_manager(decoder, cfg.enable_activation_offloading)
        return model

    def _load_base(self) -> None:
        """The pretrained weights, one at a time."""
        began = time.perf_counter()
        stored = self._model.decoder.state_dict(keep_vars=True)
        for name, tensor in self._base.weights():
            if name in stored:
                parallel.copy_whole(stored[name], tensor)
        size = sum(parameter.numel() for parameter in self._model.parameters())
        self._say(f"pretrained model of {size:,} parameters loaded in {time.perf_counter() - began:.1f} s")

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self._model.decoder.named_parameters() if weight.requires_grad}

    def _starts_at_mean(self, cfg: DictConfig) -> bool:
        """Whether FINCH's average begins at the pretrained model's mean loss: ``init: dataset``, the default, as the authors'."""
        return self._is_finch and cfg.lr_scheduler.get("init", "dataset") == "dataset"

    def _pretrained_fingerprint(self, cfg: DictConfig) -> str:
        settings = {"model": OmegaConf.to_container(cfg.model, resolve=True), "dtype": cfg.dtype}
        assert self._rows is not None
        return fingerprint_of(self._base.files, self._rows.digest, settings)

    def _load_pretrained(self, cfg: DictConfig) -> Pretrained | None:
        """An earlier pass of this model over these rows, if every rank finds it."""
        found = load_pretrained(self._run / PRETRAINED_FILE, self._pretrained_fingerprint(cfg))
        if not self._parallel.agree(found is not None):
            return None
        self._say(f"the pretrained model's losses are those of {self._run / PRETRAINED_FILE}")
        return found

    def _take_pretrained_pass(self, cfg: DictConfig) -> Pretrained:
        """One pass of the pretrained model over the training rows: for ``init: dataset`` and for objectives alike."""
        began = time.perf_counter()
        found = pretrained_pass(
            self._model,
            self._samples,
            self._collate[id(self._samples)],
            self._parallel,
            batch_size=cfg.batch_size,
            to_device=partial(to_device, device=self._device),
            num_workers=self._num_workers(self._samples),
            title="pretrained model's loss over the training rows",
        )
        if not math.isfinite(found.mean):
            raise UserError(
                f"the pretrained model's mean loss over the training rows is {found.mean}; check the weights in checkpointer.checkpoint_dir={self._base.folder}, and dtype"
            )
        self._say(
            f"pretrained model's mean loss over {len(self._samples)} training samples: {found.mean:.4f} nats ({time.perf_counter() - began:.1f} s)"
        )
        if self._parallel.is_rank_zero:
            found.save(self._run / PRETRAINED_FILE, self._pretrained_fingerprint(cfg))
        return found

    def _prepare_objective(self, pretrained: Pretrained | None) -> None:
        if self._objective.statistic is not None:
            self._say(
                f"{type(self._objective).__name__}: tau is the median sequence loss of {'the step before' if self._objective.statistic == 'lagged' else 'the step'} ({self._objective.statistic})"
            )
        if pretrained is None or "pretrained_token_loss" not in self._objective.needs:
            return
        self._samples.pretrained = pretrained.row
        try:
            self._say(self._objective.prepare(pretrained.losses, pretrained.sequence_losses))
        except ValueError as error:
            raise UserError(f"loss: {error}") from error

    def _setup_optimizers(self, cfg: DictConfig) -> list[torch.optim.Optimizer]:
        """One optimizer; with ``optimizer_in_bwd`` one for each parameter."""
        node = {**cfg.optimizer}
        if self._precision.stochastic:
            component, arguments = stochastic_optimizer(node.pop("_component_"), node)
            node = {"_component_": component, **arguments}
        on_device = self._is_finch and self._device.type == "cuda" and node.get("fused") and not cfg.fsdp_cpu_offload

        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            groups = [{"params": group} for group in parallel.by_mesh(parameters)]
            optimizer = build(node, "optimizer", groups)
            if self._precision.stochastic:
                adapt(optimizer)
            if on_device:
                for group in optimizer.param_groups:  # lets FinchLR keep everything on the GPU
                    group["lr"] = torch.tensor(float(group["lr"]), device=self._device)
            return optimizer

        parameters = list(self._trained_parameters().values())
        return optimizers_in_backward(parameters, make) if cfg.optimizer_in_bwd else [make(parameters)]

    def _setup_schedule(self, cfg: DictConfig, init: float | str | None) -> None:
        self._loss_schedule: FinchLR | ReplayLR | None = None
        self._scheduler: Any = None
        if cfg.lr_scheduler is None:
            self._say(f"constant learning rate {float(self._optimizers[0].param_groups[0]['lr']):g}")
        elif self._is_finch:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                finch = build({**cfg.lr_scheduler, "init": init}, "lr_scheduler", self._optimizers)
            for warning in caught:
                self._say(str(warning.message), logging.WARNING)
            begins = f", EMA begins at {init:.4f} nats" if isinstance(init, float) else ""
            self._say(
                f"FINCH: eta_base {finch.eta_base:g}, eta_max {finch.eta_max:g} "
                f"(reached below {(finch.eta_base / finch.eta_max) ** 2:.2g} nats), ema {finch.ema:g}{begins}"
            )
            self._loss_schedule = finch
        elif self._loss_schedule_kind is not None:
            self._loss_schedule = build(cfg.lr_scheduler, "lr_scheduler", self._optimizers)
            self._say(f"replaying the learning rates of {cfg.lr_scheduler.log}")
        else:
            self._scheduler = build(
                cfg.lr_scheduler,
                "lr_scheduler",
                self._optimizers[0],
                num_training_steps=cfg.epochs * self._steps_per_epoch,
                last_epoch=-1,
            )
            self._share_learning_rate()

    def _schedule_state(self) -> dict[str, Any] | None:
        if self._loss_schedule is not None:
            return self._loss_schedule.state_dict()
        if self._scheduler is not None:
            return {key: self._scheduler.state_dict()[key] for key in ("last_epoch", "_step_count", "_last_lr")}
        return None

    def _initial_loss(self, cfg: DictConfig, pretrained: Pretrained | None) -> float | str | None:
        """FINCH's Lbar_0."""
        if self._starts_at_mean(cfg) and pretrained is not None:
            return pretrained.mean
        return cfg.lr_scheduler.get("init") if self._is_finch else None

    def _loss_over(self, samples: Samples, title: str) -> float:
        return dataset_loss(
            self._model,
            samples,
            self._collate[id(samples)],
            self._parallel,
            batch_size=self._cfg.batch_size,
            to_device=partial(to_device, device=self._device),
            num_workers=self._num_workers(samples),
            title=title,
        )

    def _batches(self, epoch: int) -> Iterator[Batch]:
        return loader(
            self._samples,
            self._order,
            self._collate[id(self._samples)],
            rank=self._parallel.data_parallel_rank,
            epoch=epoch,
            consumed=self.consumed,
            num_workers=self._num_workers(self._samples),
            pin_memory=self._device.type == "cuda",
        )

    def _num_workers(self, samples: Samples) -> int:
        # torchtune builds the block mask of packed rows on the GPU while it collates, which a forked worker cannot.
        return 0 if samples.packed and torch.cuda.is_available() else self._cfg.num_workers

    def _setup_profiler(self, cfg: DictConfig) -> Any:
        if cfg.profiler is None or not cfg.profiler.get("enabled", False):
            return training.DummyProfiler()
        profiler, _ = build(cfg.profiler, "profiler")
        return profiler

    def _identity(self, cfg: DictConfig) -> dict[str, Any]:
        """What makes this run this run: keys that may not change when it is resumed. Paths may; the number of ranks may."""
        rows = self._rows
        return {
            "model": OmegaConf.to_container(cfg.model, resolve=True),
            "checkpointer.checkpoint_dir": Path(cfg.checkpointer.checkpoint_dir).resolve().name,
            "optimizer._component_": component_of(cfg.optimizer),
            "lr_scheduler._component_": component_of(cfg.lr_scheduler),
            "dtype": cfg.dtype,
            "number of samples": len(self._samples),
            "loss": OmegaConf.to_container(cfg.loss, resolve=True) if is_objective(cfg) else "cross-entropy",
            "regularizer": None if cfg.regularizer is None else OmegaConf.to_container(cfg.regularizer, resolve=True),
            "number of target tokens": rows.targets if rows is not None else None,
            "digest of the tokenized rows": f"{rows.digest:016x}" if rows is not None else None,
            "seed": self.seed,
            "shuffle": cfg.shuffle,
            "global batch": self._order.global_batch,
            "drop_last": cfg.drop_last,
            "max_steps_per_epoch": cfg.max_steps_per_epoch,
        }

    def _hold_folder(self) -> None:
        try:
            self._lock.hold()
        except OSError as error:
            raise UserError(
                f"output_dir={self._run} cannot be written ({error.strerror}); give another folder"
            ) from error

    def _leave_requeue_file(self) -> None:
        if self._parallel.is_rank_zero:
            with contextlib.suppress(OSError):
                (self._run / REQUEUE).touch()

    def _start_output_folder(self, cfg: DictConfig) -> None:
        if not self._parallel.is_rank_zero:
            return
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            self._lock.hold()
            self._lock.sign()
            (self._run / REQUEUE).unlink(missing_ok=True)
            if not cfg.resume_from_checkpoint and cfg.overwrite:
                for path in (
                    self._run / METRICS_FILE,
                    self._run / "best",
                    self._run / checkpoint.FOLDER,
                    *self._run.glob("epoch_*"),
                ):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            if self._resume_folder is not None:
                checkpoint.set_aside_later(self._run, self._resume_folder)
            OmegaConf.save(as_config_of_its_own(cfg, self.options), self._run / "config.yaml")
        except OSError as error:
            raise UserError(
                f"output_dir={self._run} cannot be written ({error.strerror}); give another folder"
            ) from error

    def _say(self, message: str, level: int = logging.INFO) -> None:
        utils.log_rank_zero(log, message, level)


def _point(link: Path, target: str) -> None:
    """Makes ``link`` a relative symbolic link to ``target``, replacing it in one step."""
    fresh = link.with_name(link.name + ".partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)


def run(recipe_class: type[FinchFullFinetune], cfg: DictConfig) -> None:
    """A recipe from its checks to its end."""
    if parallel.is_launched():
        die_with_parent()
    recipe = recipe_class(cfg)
    log.setLevel(str(cfg.log_level).upper())
    try:
        recipe.setup(cfg)
        recipe.train()
    except FloatingPointError as error:
        recipe.close()
        raise UserError(str(error)) from error
    except BaseException:
        recipe.close()
        raise
    recipe.cleanup()
    if recipe.interrupted:
        sys.exit(128 + signal.SIGINT)


@parse(FULL_FINETUNE)
def recipe_main(cfg: DictConfig) -> None:
    """Parameters are read from the config, then overridden from the command line."""
    run(FinchFullFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    leave_well()
