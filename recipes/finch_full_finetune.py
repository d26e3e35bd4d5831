"""Full fine-tuning with FINCH's loss-adaptive learning rate, on one process or many.

tune run finch_full_finetune --config stories260k/tofu_finch data_root=DATA
tune run --nproc_per_node 2 finch_full_finetune --config stories260k/tofu_finch data_root=DATA
"""

from __future__ import annotations

from finch.errors import report_user_errors
from finch.extras import require_extras

report_user_errors(require_extras)("the recipe", "torchtune")  # before the imports that fail without it

import itertools
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import modules, training
from torchtune.recipe_interfaces import FTRecipeInterface

from finch import FinchLR, dtensor, run_files
from finch.checkpoint import reader as checkpoint
from finch.checkpoint.writer import CheckpointWriter
from finch.config.instantiate import build, component_of
from finch.config.parser import parse
from finch.config.resolved import redacted, resolved_config
from finch.config.schema import FULL_FINETUNE
from finch.data.loading import Batch, model_inputs, to_device
from finch.data.training_data import TrainingData
from finch.distributed import fsdp, parallel, watchdog
from finch.distributed.precision import check_hardware, precision_of
from finch.distributed.processes import die_with_parent
from finch.distributed.signals import SignalDecision, Signals
from finch.distributed.tensor_parallel import build_plan
from finch.errors import UserError, WriteFailed, exit_without_teardown
from finch.log import logger
from finch.metrics import MetricsLog
from finch.models.overrides import replace_known_bad_builder
from finch.objectives import EAFT, CrossEntropy, Objective
from finch.training.config_checks import (
    check_combinations,
    check_output_folder,
    check_replay,
    check_schedule,
    check_text_decoder,
    is_objective,
)
from finch.training.dataset_loss import dataset_loss
from finch.training.identity import identity_of
from finch.training.lr_scheduler import build_schedule, is_finch, on_nonfinite, uses_dataset_init
from finch.training.model import check_custom_layers, shard
from finch.training.optimizer import build_optimizers
from finch.training.reference_loss import ReferenceLossCache, ReferenceLosses, fingerprint_of
from finch.training.rollback import PRETRAINED, RollbackTracker
from finch.training.run_folder import RunFolder
from finch.training.run_lock import RunLock
from finch.training.step_median import StepMedian
from finch.training.token_loss import TokenLoss
from finch.weights.formats import open_checkpoint

OBJECTIVE_CHUNKS = 8  # pieces in which an objective's logits are made; torchtune's default of its chunked cross-entropy


class FinchFullFinetune(FTRecipeInterface):
    """Full fine-tuning of a torchtune decoder.

    Features, and the keys that control them (all of them: :mod:`finch.config.schema`):
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
        - A loss or a gradient that is not finite stops the run, is skipped, or sends it back to the last checkpoint
          (``on_nonfinite``). A rank that hangs shows its stack before collectives time out.

    Args:
        cfg: a config that :func:`finch.config.validation.check` has passed.

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
        check_schedule(cfg)
        check_combinations(cfg, self._device)
        self._run = Path(cfg.output_dir)
        RunLock(self._run).check()
        self._found_checkpoints = check_output_folder(cfg)
        self._clip_grad_norm = None if cfg.clip_grad_norm is None else float(cfg.clip_grad_norm)
        self._export_dtype = None if cfg.export_dtype is None else precision_of(cfg.export_dtype).weights
        self._on_nonfinite = on_nonfinite(cfg)
        self._mesh_sizes = parallel.MeshSizes(
            cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim, cfg.tensor_parallel_dim
        )

        # The run's position. `consumed` counts this epoch's samples: with the epoch it is all that resuming needs.
        self.step = 0
        self.epoch = 0
        self.consumed = 0
        self.best: dict[str, Any] | None = None
        self._rollbacks = RollbackTracker()
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
        if self._parallel.world_size > 1:
            watchdog.start(cfg.distributed_timeout)
        self._folder = RunFolder(self._run, is_writer=self._parallel.is_rank_zero)
        if self._found_checkpoints:
            self._folder.lock()
        state = self._choose_checkpoint(cfg)
        self.seed = training.set_seed(
            cfg.seed if cfg.seed is not None or state is None else state["seed"], cfg.cudnn_deterministic_mode
        )
        ranks = f"{self._parallel.world_size} rank{'s' if self._parallel.world_size > 1 else ''}"
        logger.info(f"{ranks} on {self._device.type}; dtype {cfg.dtype}: {self._precision.words}")

        decoder = self._build_decoder(cfg)
        check_custom_layers(decoder, cfg.custom_sharded_layers or [])
        tokenizer = build(cfg.tokenizer, "tokenizer")
        loss = build(cfg.loss, "loss")
        self._objective: Objective = loss if is_objective(cfg) else CrossEntropy()
        num_chunks = OBJECTIVE_CHUNKS if is_objective(cfg) else getattr(loss, "num_output_chunks", 1)
        self._median = StepMedian(self._objective, self._parallel)
        self._regularizer = None if cfg.regularizer is None else build(cfg.regularizer, "regularizer")
        # What the pretrained model says of the rows is kept under their digest.
        wants_digest = "pretrained_token_loss" in self._objective.needs or uses_dataset_init(cfg)
        self._data = TrainingData(cfg, tokenizer, self._parallel, seed=self.seed, wants_digest=wants_digest)
        watchdog.heartbeat()
        num_steps = cfg.epochs * self._data.steps_per_epoch
        check_replay(cfg, num_steps)
        self._state_identity = identity_of(cfg, self._data, self.seed)
        if state is not None and self._resume_folder is not None:
            checkpoint.check_identity(state, self._state_identity, self._resume_folder)

        self._folder.prepare(
            resolved_config(cfg, self.options),
            from_scratch=cfg.overwrite and not cfg.resume_from_checkpoint,
            resumed_from=self._resume_folder,
        )
        self._signals = Signals(
            self._parallel, timeout_s=cfg.distributed_timeout, before_training=self._folder.mark_requeue
        )
        self._signals.install()
        self._checkpoint_writer = CheckpointWriter(
            self._run,
            self._parallel,
            every_n_steps=cfg.checkpoint.every_n_steps,
            every_n_minutes=cfg.checkpoint.every_n_minutes,
            # The last one may hold what is about to break: another to go back to.
            keep_last=max(cfg.checkpoint.keep_last, 2 if self._on_nonfinite == "rollback" else 1),
            asynchronous=cfg.checkpoint["async"],
            timeout_s=cfg.distributed_timeout,
        )
        self._model: TokenLoss = shard(
            decoder, cfg, self._parallel, self._precision, num_chunks=num_chunks, tensor_plan=self._tensor_plan
        )
        pretrained = self._load_weights(cfg, is_fresh=state is None)
        if self._regularizer is not None:
            self._regularizer.start(self._trained_parameters().items())
        self._optimizers = build_optimizers(
            cfg,
            list(self._trained_parameters().values()),
            self._precision,
            self._device,
            tensor_lr=is_finch(cfg),
        )
        init = "first_batch" if state is not None else cfg.lr_scheduler.get("init") if is_finch(cfg) else None
        if state is None and uses_dataset_init(cfg) and pretrained is not None:
            init = pretrained.mean
        self._schedule = build_schedule(cfg, self._optimizers, init=init, num_steps=num_steps)
        self._first_schedule = self._schedule.state_dict()
        if state is not None and self._resume_folder is not None:
            self.load_checkpoint(self._resume_folder, state)
        metric_logger = None
        if cfg.metric_logger is not None and self._parallel.is_rank_zero:
            metric_logger = build(cfg.metric_logger, "metric_logger")
            metric_logger.log_config(redacted(cfg))
        self._log_metrics = MetricsLog(
            self._run,
            metric_logger,
            is_writer=self._parallel.is_rank_zero,
            every=cfg.log_every_n_steps,
            world_size=self._parallel.world_size,
            first_step=self.step,
            first_lines=None if state is None else state["metrics_lines"],
        )
        self._profiler = self._setup_profiler(cfg)
        if state is not None and self._resume_folder is not None:
            checkpoint.load_rng_state(self._resume_folder, state, self._parallel)

    def train(self) -> None:
        """The training loop: epochs, steps, and what happens between them."""
        cfg = self._cfg
        if self.epoch >= cfg.epochs:
            logger.info(f"nothing to do: {self._run} has finished its {cfg.epochs} epochs; set epochs higher to go on")
        self._signals.start()
        self._profiler.start()
        order = self._data.order
        for epoch in range(self.epoch, cfg.epochs):
            self.epoch = epoch
            steps = self._data.steps_per_epoch
            first = -(-self.consumed // order.global_batch)  # the last batch of an epoch may be short
            batches = self._data.batches(epoch, self.consumed)
            self._log_metrics.start_epoch(epoch, cfg.epochs, steps, first)
            for _ in range(first, steps):
                with watchdog.step():
                    self._train_step(list(itertools.islice(batches, order.micro_batches_in_step(self.consumed))))
                self.consumed = min(self.consumed + order.global_batch, len(self._data.samples))
                self._profiler.step()
                asked = self._signals.sync(self._checkpoint_writer.is_due(self.step))
                wants_validation = cfg.validate_every_n_steps and self.step % cfg.validate_every_n_steps == 0
                is_read = self.step % cfg.log_every_n_steps == 0 or not self._schedule.is_on_device
                if is_read or wants_validation or asked.save or asked.stop:
                    self._check_nonfinite()
                if wants_validation:
                    self.validate()
                if asked.stop:
                    self._stop(asked)
                    return
                if asked.save and self.consumed < order.samples_in(steps):  # else it is saved with the epoch
                    self.save_state()
                self._checkpoint_writer.poll()
            self._end_epoch(cfg)
        self._profiler.stop()

    def _stop(self, asked: SignalDecision) -> None:
        """Saves the state and leaves the loop, as a signal has asked for."""
        self._log_metrics.end_epoch()
        is_saved = self.save_state(wait=True)
        if asked.requeue:
            self._folder.mark_requeue()
        self.interrupted = not asked.requeue
        last = f"step {self.step}" if is_saved else "the last checkpoint"
        logger.info(
            f"stopped by a signal after step {self.step}; the same command with resume_from_checkpoint=True goes on from {last}"
        )

    def _train_step(self, batches: list[Batch]) -> None:
        """One optimizer step over its micro-batches. On CUDA with a fused optimizer FINCH reads nothing back to the host here."""
        num_targets = sum(batch["targets"].numel() for batch in batches)
        num_counted = sum(self._objective.count(batch) for batch in batches)
        counts = torch.tensor([num_targets, num_counted], dtype=torch.float64, pin_memory=self._device.type == "cuda")
        targets, divisor = self._parallel.all_reduce_sum_(counts.to(self._device, non_blocking=True)).unbind()
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
                if not self._schedule.step(loss, divisor):
                    break
            ((weight * token_loss).sum() * scale).backward()
        if loss is None:
            loss = self._mean_loss(raw, targets)
            if self._regularizer is not None:
                norms.update(self._regularizer.add_gradients())
            norms["grad_norm"] = norm = self._clip_gradients()
            # A gradient that is not finite spoils the weights as a loss does: 0 x norm is then NaN, and else 0.
            if self._schedule.step(loss + 0 * norm, divisor):
                self._optimizers[0].step()
        self._median.after_step()
        self.step += 1
        self._report(loss, targets, norms)
        self._model.zero_grad(set_to_none=True)

    def _token_losses(self, batch: Batch) -> torch.Tensor:
        """[batch, seq] in nats; the logits that an objective asks for go into the batch."""
        if "top_logits" not in self._objective.needs:
            return self._model(**model_inputs(batch))
        losses, batch["top_logits"] = self._model(**model_inputs(batch), num_top_logits=EAFT.num_logits)
        return losses

    def _mean_loss(self, raw: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The raw cross-entropy of the whole step, whatever the objective, in nats a target token."""
        return self._parallel.all_reduce_sum_(raw) / targets.clamp(min=1)

    def _clip_gradients(self) -> torch.Tensor:
        """Clips to ``clip_grad_norm`` if set; returns the norm before clipping, over all ranks' shards."""
        parameters = list(self._trained_parameters().values())
        if self._clip_grad_norm is None:
            norm = fsdp.grad_norm(parameters)
        else:
            norm = fsdp.clip_grad_norm(parameters, self._clip_grad_norm)
        return norm.to(self._device, non_blocking=True)  # offloaded gradients live on the CPU

    def _report(self, loss: torch.Tensor, targets: torch.Tensor, norms: dict[str, torch.Tensor | None]) -> None:
        rate = self._schedule.metrics()
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

    def _check_nonfinite(self) -> None:
        """Where losses stay on a device, those that are not finite come to light here."""
        if not self._schedule.check():
            self._rollbacks.record_finite(self.step)
        elif self._on_nonfinite == "rollback":
            self._roll_back()

    def _roll_back(self) -> None:
        """Weights, optimizer and FINCH's average as a checkpoint has them, or as the run began. The position stays: what lies
        between is not trained on again, since it led here."""
        self._checkpoint_writer.finish()
        found = checkpoint.list_checkpoints(self._run)
        if self._resume_folder is not None and self._resume_folder not in found:
            found.append(self._resume_folder)
        folder, damages = checkpoint.latest_valid(
            self._rollbacks.eligible_checkpoints(self.step, found), self._parallel
        )
        if damages and folder is None:
            raise UserError(
                f"on_nonfinite=rollback: {damages[0]}, and there is no other; lower the learning rate and start afresh"
            )
        for sentence in damages:
            logger.warning(sentence)
        when = f"{'at or before' if self._schedule.is_on_device else 'at'} step {self.step}"
        logger.warning(
            f"a loss or gradient was not finite {when}: back to {folder or 'the pretrained model'}, and on with the next batch"
        )
        if folder is None:
            self._load_base()
            for optimizer in self._optimizers:
                optimizer.state.clear()
            back_to, kept, self._median.last = PRETRAINED, self._first_schedule, None
        else:
            checkpoint.load_tensors(folder, self._model, self._optimizers, self._parallel)
            state = checkpoint.read_state(folder)
            back_to, kept, self._median.last = state["step"], state["schedule"], state["median"]
        if isinstance(self._schedule, FinchLR):  # the others go by the step
            self._schedule.load_state_dict(kept)
        self._rollbacks.record_rollback(self.step, back_to)
        self._log_metrics.note({"step": self.step, "epoch": self.epoch, "rolled_back_to": back_to})
        self._log_metrics.pause()

    def _check_weights(self) -> bool:
        """Whether the state is worth saving; a collective. An update can break weights that no forward has seen yet."""
        if self._rollbacks.unconfirmed:
            return False
        if self._parallel.all_true(checkpoint.all_finite(self._trained_parameters().values())):
            return True
        if self._on_nonfinite != "rollback":
            raise FloatingPointError(
                f"weights were not finite after step {self.step}, whose loss was: lower the learning rate or check the data"
            )
        self._roll_back()
        return False

    def validate(self) -> float | None:
        """Mean loss over ``dataset_validation`` in nats, noted in the metrics; None without one."""
        if self._data.validation is None:
            return None
        loss = dataset_loss(self._model, **self._data.whole(self._data.validation, "validation"))
        self._log_metrics.note({"step": self.step, "epoch": self.epoch, "validation_loss": loss})
        logger.info(f"epoch {self.epoch + 1}/{self._cfg.epochs}, step {self.step}: validation loss {loss:.4f}")
        self._log_metrics.pause()
        return loss

    def _end_epoch(self, cfg: DictConfig) -> None:
        self._log_metrics.end_epoch()
        self._check_nonfinite()
        self._check_weights()
        lines = self._log_metrics.lines()
        loss = self.validate()
        name = f"epoch_{self.epoch}"
        is_last = self.epoch + 1 == cfg.epochs
        if self._export_epoch(name):
            if loss is not None and math.isfinite(loss) and (self.best is None or loss < self.best["validation_loss"]):
                self.best = {"epoch": name, "validation_loss": loss}
            if self.best is not None:
                self._folder.link_best(self._exported(self.best["epoch"]))
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
        watchdog.heartbeat()
        told = self._parallel.gather_all_ranks(told)[0]
        if told is not None:
            logger.warning(f"{self._run / name} could not be written ({told})")
        else:
            logger.info(f"saved {self._run / self._exported(name)} in {time.perf_counter() - began:.1f} s")
        return told is None

    def save_state(self, wait: bool = False, lines: int | None = None) -> bool:
        """Saves all that a run needs to go on after this step, see :meth:`finch.checkpoint.writer.CheckpointWriter.save`; a collective.

        Args:
            wait: until it is on the disk.
            lines: of metrics.jsonl that belong to the steps so far; None: all.
        """
        if not self._check_weights():
            logger.info(f"the state of step {self.step} is not saved: no finite step has followed the return yet")
            return False
        state = {
            "format": checkpoint.FORMAT,
            "step": self.step,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self.seed,
            "best": self.best,
            "schedule": self._schedule.state_dict(),
            "median": self._median.last,
            **self._rollbacks.state_dict(),
            "metrics_lines": self._log_metrics.lines() if lines is None else lines,
            "identity": self._state_identity,
        }
        is_well = self._checkpoint_writer.save(self.step, self._model, self._optimizers, state, wait=wait)
        self._log_metrics.pause()
        watchdog.heartbeat()
        return is_well

    def _export(self, name: str) -> None:
        """What a user takes away from an epoch; a collective."""
        weights = self._model.decoder.state_dict().items()
        self._base.write(weights, self._run / name, is_writer=self._parallel.is_rank_zero, dtype=self._export_dtype)

    def _exported(self, name: str) -> str:
        """The folder of an epoch."""
        return name

    def load_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        """Restores weights, optimizer, schedule and position. Base learning rates are the config's, as the schedule was built."""
        checkpoint.load_tensors(folder, self._model, self._optimizers, self._parallel)
        self.step, self.epoch, self.consumed = state["step"], state["epoch"], state["consumed"]
        self.best, self._median.last = state["best"], state["median"]
        self._rollbacks.load_state_dict(state)
        self._schedule.load_state_dict(state["schedule"])

    def close(self) -> None:
        """After an end of any kind: writes out what the metrics log still holds, and lets a save that runs come to its end."""
        if hasattr(self, "_log_metrics"):
            self._log_metrics.close()
        if hasattr(self, "_signals"):
            self._signals.restore()
        if hasattr(self, "_checkpoint_writer"):
            self._checkpoint_writer.close()
        if hasattr(self, "_folder"):
            self._folder.unlock()
        watchdog.stop()

    def cleanup(self) -> None:
        """Ends a run that went well. After an error the process group is left alone: closing NCCL's waits for lost ranks."""
        self.close()
        parallel.stop()

    # Building blocks

    def _choose_checkpoint(self, cfg: DictConfig) -> dict[str, Any] | None:
        """The scalars of the checkpoint to go on from, the latest whole one; None: a fresh run."""
        self._resume_folder, damages = checkpoint.latest_valid(self._found_checkpoints, self._parallel)
        state = None
        if self._resume_folder is not None:
            state = checkpoint.read_state(self._resume_folder)
            logger.info(f"resumed from step {state['step']} of {self._resume_folder}")
        elif damages:
            raise UserError(
                f"resume_from_checkpoint={cfg.resume_from_checkpoint}: {damages[0]}, and there is no other; start afresh with overwrite=True"
            )
        for sentence in damages:
            logger.warning(sentence)
        return state

    def _build_decoder(self, cfg: DictConfig) -> modules.TransformerDecoder:
        """The decoder on the meta device, checked against the pretrained folder."""
        node, told = replace_known_bad_builder(cfg.model)
        if told is not None:
            logger.warning(told)
        with training.set_default_dtype(self._precision.weights), torch.device("meta"):
            decoder = build(node, "model")
        check_text_decoder(decoder, component_of(node) or "")
        self._base = open_checkpoint(cfg.checkpointer)
        self._base.check_model(decoder, component_of(node) or "")
        self._tensor_plan = None
        if cfg.tensor_parallel_dim > 1:
            self._tensor_plan = build_plan(cfg.tensor_parallel_plan, decoder, cfg.tensor_parallel_dim)
        return decoder

    def _load_base(self) -> None:
        """The pretrained weights, one at a time."""
        began = time.perf_counter()
        stored = self._model.decoder.state_dict(keep_vars=True)
        for name, tensor in self._base.weights():
            if name in stored:
                dtensor.load_full_tensor(stored[name], tensor)
        size = sum(parameter.numel() for parameter in self._model.parameters())
        watchdog.heartbeat()
        logger.info(f"pretrained model of {size:,} parameters loaded in {time.perf_counter() - began:.1f} s")

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self._model.decoder.named_parameters() if weight.requires_grad}

    def _load_weights(self, cfg: DictConfig, *, is_fresh: bool) -> ReferenceLosses | None:
        """The pretrained weights where a run needs them, and their losses on the rows: for ``init: dataset`` and objectives alike."""
        wants_pass = "pretrained_token_loss" in self._objective.needs or (is_fresh and uses_dataset_init(cfg))
        pretrained = kept = None
        if wants_pass:
            assert self._data.rows is not None
            settings = {"model": OmegaConf.to_container(cfg.model, resolve=True), "dtype": cfg.dtype}
            fingerprint = fingerprint_of(self._base.files, self._data.rows.digest, settings)
            kept = ReferenceLossCache(self._run / run_files.REFERENCE_LOSSES, fingerprint, self._base.folder)
            pretrained = kept.load(self._parallel)
        is_missing = kept is not None and pretrained is None
        if is_fresh or is_missing or not self.saves_all_weights or self._regularizer is not None:
            self._load_base()
        if kept is not None and pretrained is None:
            title = "pretrained model's loss over the training rows"
            pretrained = kept.take(self._model, **self._data.whole(self._data.samples, title))
        self._prepare_objective(pretrained)
        return pretrained

    def _prepare_objective(self, pretrained: ReferenceLosses | None) -> None:
        if self._objective.statistic is not None:
            logger.info(
                f"{type(self._objective).__name__}: tau is the median sequence loss of {'the step before' if self._objective.statistic == 'lagged' else 'the step'} ({self._objective.statistic})"
            )
        if pretrained is None or "pretrained_token_loss" not in self._objective.needs:
            return
        self._data.samples.pretrained = pretrained.row
        try:
            logger.info(self._objective.prepare(pretrained.losses, pretrained.sequence_losses))
        except ValueError as error:
            raise UserError(f"loss: {error}") from error

    def _setup_profiler(self, cfg: DictConfig) -> Any:
        if cfg.profiler is None or not cfg.profiler.get("enabled", False):
            return training.DummyProfiler()
        profiler, _ = build(cfg.profiler, "profiler")
        return profiler


def run(recipe_class: type[FinchFullFinetune], cfg: DictConfig) -> None:
    """A recipe from its checks to its end."""
    if parallel.is_launched():
        die_with_parent()
    recipe = recipe_class(cfg)
    logger.setLevel(str(cfg.log_level).upper())
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
    exit_without_teardown()
