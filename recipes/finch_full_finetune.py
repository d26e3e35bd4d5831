"""Full fine-tuning with FINCH's loss-adaptive learning rate, on one process or many.

tune run finch_full_finetune --config stories260k/tofu_finch data_root=DATA
tune run --nproc_per_node 2 finch_full_finetune --config stories260k/tofu_finch data_root=DATA
"""

from __future__ import annotations

from finch.errors import report_user_errors
from finch.extras import require_extras
from finch.log import quiet_dependencies

report_user_errors(require_extras)("the recipe", "torchtune")  # before the imports that fail without it
quiet_dependencies()

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface

from finch import run_files
from finch.checkpoint.reader import check_identity, load_rng_state
from finch.config.instantiate import build
from finch.config.parser import parse
from finch.config.resolved import redacted, resolved_config
from finch.config.schema import FULL_FINETUNE
from finch.data.loader import Batch, to_device
from finch.data.training_data import TrainingData
from finch.distributed import fsdp, grad_clipping, parallel, watchdog
from finch.distributed.precision import check_hardware, precision_of
from finch.distributed.signals import SignalDecision, Signals
from finch.errors import UserError, exit_without_teardown
from finch.log import logger
from finch.probes.forgetting import Forgetting
from finch.probes.settings import check_probes
from finch.training import config_checks
from finch.training.checkpointing import build_checkpoint_writer
from finch.training.disk_room import check_disk_room
from finch.training.export import export
from finch.training.identity import identity_of
from finch.training.kl_penalty import KLPenalty
from finch.training.loss_figure import update_loss_figure
from finch.training.lr_scheduler import build_schedule, is_finch, on_nonfinite, uses_dataset_init
from finch.training.model import allocate, build_decoder, load_pretrained, parallelize
from finch.training.monitoring import build_metrics_log, build_profiler
from finch.training.nonfinite_guard import NonfiniteGuard
from finch.training.objective import build_objective, micro_batch_loss, prepare_objective, token_losses
from finch.training.optimizer import build_optimizers
from finch.training.reference_loss import ReferenceLossCache, ReferenceLosses
from finch.training.resume import resume_point
from finch.training.run_folder import RunFolder
from finch.training.run_lock import RunLock
from finch.training.run_recipe import run
from finch.training.selection import better
from finch.training.state import TrainState
from finch.training.step_median import StepMedian
from finch.training.summary import log_summary
from finch.training.validation import validate


class FinchFullFinetune(FTRecipeInterface):
    """Full fine-tuning of a torchtune decoder, on one process or on any number of ranks with FSDP2.

    The learning rate of a step comes from the loss of that step (``lr_scheduler: finch.FinchLR``); torchtune's schedulers and a
    constant learning rate work as well. Samples have one global order, so that a run is the same on any number of ranks, and
    a checkpoint resumes it exactly. `finch keys` lists the config's keys; docs/recipe.md explains a step, an epoch and a resume.

    Args:
        cfg: a config that :func:`finch.config.parser.parse` has checked.

    Raises:
        UserError: a mistake in the config, a file or the data, in one line and before weights are loaded.
    """

    options = FULL_FINETUNE
    """The keys of the config, which is saved beside the run."""
    saves_all_weights = True
    """Whether a checkpoint holds every weight, or only the trained ones."""
    interrupted = False
    """Whether Ctrl-C has ended the run."""

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg, self._start_time = cfg, time.perf_counter()
        self._precision = precision_of(cfg.dtype)
        self._device = parallel.local_device(cfg.device)
        check_hardware(cfg.dtype, self._device)
        check_probes(cfg)
        config_checks.check_schedule(cfg)
        config_checks.check_combinations(cfg, self._device)
        self._run = Path(cfg.output_dir)
        if parallel.launched_rank() == 0:  # the lock is exclusive: many ranks would wait for each other
            RunLock(self._run).check()
        self._resumable = config_checks.check_output_folder(cfg)
        self._clip_grad_norm = None if cfg.clip_grad_norm is None else float(cfg.clip_grad_norm)
        self._export_dtype = None if cfg.export_dtype is None else precision_of(cfg.export_dtype).weights
        self._mesh_sizes = parallel.MeshSizes(
            cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim, cfg.tensor_parallel_dim
        )

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything: what is cheap and can fail first, weights last."""
        self._parallel = parallel.start(
            self._device,
            shard=self._precision.is_mixed or cfg.fsdp_cpu_offload,
            offload=cfg.fsdp_cpu_offload,
            timeout_s=cfg.distributed_timeout,
            sizes=self._mesh_sizes,
        )
        if self._parallel.world_size > 1:
            watchdog.start(cfg.distributed_timeout)
        self._folder = RunFolder(self._run, is_writer=self._parallel.is_rank_zero, replace=cfg.overwrite)
        self._folder.lock_existing()
        self._resume = resume_point(self._resumable, self._parallel, cfg.resume_from_checkpoint)
        seed = cfg.seed if cfg.seed is not None or self._resume is None else self._resume.scalars["seed"]
        self._seed = training.set_seed(seed, cfg.cudnn_deterministic_mode)
        ranks = f"{self._parallel.world_size} rank{'s' if self._parallel.world_size > 1 else ''}"
        logger.info(f"{ranks} on {self._device.type}; dtype {cfg.dtype}: {self._precision.description}")

        self._build_decoder(cfg)
        self._setup_data(cfg)
        self._setup_monitoring(cfg)
        self._setup_checkpointing(cfg)
        reference = self._setup_model(cfg)
        self._setup_optimizer(cfg, reference)
        if self._resume is not None:
            self.load_checkpoint(*self._resume)
            load_rng_state(*self._resume, self._parallel)

    def _setup_data(self, cfg: DictConfig) -> None:
        """Tokenizer, objective and rows; with them the run's identity is known."""
        tokenizer = build(cfg.tokenizer, "tokenizer")
        self._objective, self._num_chunks = build_objective(cfg)
        resumed = None if self._resume is None else self._resume.scalars
        self._median = StepMedian(self._objective, self._parallel, cfg.gradient_accumulation_steps, resumed)
        self._kl_penalty = KLPenalty(cfg, self._decoder, self._parallel)
        self._regularizer = None if cfg.regularizer is None else build(cfg.regularizer, "regularizer")
        # Reference losses are cached under the digest of the rows.
        needs_losses = "pretrained_token_loss" in self._objective.needs or uses_dataset_init(cfg)
        needs_stats = needs_losses or self._kl_penalty.is_cached
        self._data = TrainingData(cfg, tokenizer, self._parallel, seed=self._seed, needs_stats=needs_stats)
        watchdog.heartbeat()
        self._num_steps = cfg.epochs * self._data.steps_per_epoch
        config_checks.check_replay(cfg, self._num_steps)
        self._forgetting = Forgetting(
            cfg,
            tokenizer,
            self._data,
            self._parallel,
            max_seq_len=getattr(self._decoder, "max_seq_len", None),
            folder=self._folder,
            export=self._export,
            exported=self._exported,
            scalars=None if self._resume is None else self._resume.scalars,
        )
        self._identity = identity_of(cfg, self._data, self._seed)
        if self._resume is not None:
            check_identity(self._resume.scalars, self._identity, self._resume.folder)

    def _setup_monitoring(self, cfg: DictConfig) -> None:
        """Disk room, metrics and profiler: what else can fail before weights are loaded."""
        epoch = 0 if self._resume is None else self._resume.scalars["epoch"]
        if self._parallel.is_rank_zero and epoch < cfg.epochs:
            freed = self._folder.replaced_bytes()
            check_disk_room(cfg, self._decoder, dtype=self._export_dtype, freed_bytes=freed, first_epoch=epoch)
        self._metrics_log = build_metrics_log(cfg, self._run, self._parallel, num_steps=self._num_steps)
        self._profiler = build_profiler(cfg)

    def _setup_checkpointing(self, cfg: DictConfig) -> None:
        """The run's folder, signals, and the writer of checkpoints."""
        self._folder.create()
        requeue = self._folder.mark_requeue
        self._signals = Signals(self._parallel, timeout_s=cfg.distributed_timeout, before_training=requeue)
        self._signals.install()
        self._checkpoint_writer = build_checkpoint_writer(cfg, self._run, self._parallel)

    def _setup_model(self, cfg: DictConfig) -> ReferenceLosses | None:
        """The model in memory, with the pretrained weights where a run needs them; returns their losses on the rows."""
        self._model = parallelize(
            self._decoder,
            cfg,
            self._parallel,
            self._precision,
            num_chunks=self._num_chunks,
            plan=self._tensor_plan,
            has_reference=self._kl_penalty.has_reference,
        )
        allocate(self._model, cfg, self._parallel, self._precision)
        is_new = self._resume is None
        cache = reference = None
        if "pretrained_token_loss" in self._objective.needs or (is_new and uses_dataset_init(cfg)):
            cache = ReferenceLossCache(cfg, self._base, self._data, self._run)
            reference = cache.load(self._parallel)
        self._kl_penalty.load_cache(cfg, self._base, self._data, self._run)
        needs_losses = cache is not None and reference is None
        has_penalty = self._regularizer is not None or self._kl_penalty.needs_pretrained
        needs_probes = self._forgetting.needs_pretrained(self._base)
        if is_new or needs_losses or not self.saves_all_weights or has_penalty or needs_probes:
            self._load_base()
        self._kl_penalty.prepare(self._model, self._data)
        if cache is not None and reference is None:
            reference = cache.compute(self._model)
        self._forgetting.start(self._model)
        prepare_objective(self._objective, reference, self._data.samples, self._median.mode)
        if self._regularizer is not None:
            self._regularizer.start(self._model.trained_parameters().items())
        return reference

    def _setup_optimizer(self, cfg: DictConfig, reference: ReferenceLosses | None) -> None:
        """Optimizer, learning-rate schedule and the guard against non-finite numbers. A resumed schedule's EMA comes from the checkpoint."""
        parameters = list(self._model.trained_parameters().values())
        optimizers = build_optimizers(cfg, parameters, self._precision, self._device, tensor_lr=is_finch(cfg))
        init = cfg.lr_scheduler.get("init") if is_finch(cfg) else None
        if self._resume is not None:
            init = "first_batch"
        elif uses_dataset_init(cfg) and reference is not None:
            init = reference.mean
        schedule = build_schedule(cfg, optimizers, init=init, num_steps=self._num_steps)
        self._optimizers, self._schedule = optimizers, schedule
        self.state = TrainState(self._model, optimizers, schedule, self._median, self._seed, self._identity)
        self._guard = NonfiniteGuard(
            on_nonfinite(cfg),
            self.state,
            self._parallel,
            self._checkpoint_writer,
            self._metrics_log,
            run=self._run,
            resumed_from=None if self._resume is None else self._resume.folder,
            load_pretrained=self._load_base,
        )

    def _begin(self) -> None:
        """Removes the run that this one replaces and opens the metrics: from here on the folder is this run's."""
        folder, scalars = (None, {}) if self._resume is None else self._resume
        self._folder.begin(resolved_config(self._cfg, self.options), resumed_from=folder)
        lines = scalars.get("metrics_lines")
        self._metrics_log.open(redacted(self._cfg), first_step=self.state.step, first_lines=lines)
        self._forgetting.open(self._metrics_log)

    def train(self) -> None:
        """The training loop: epochs, steps, and what happens between them."""
        cfg, state = self._cfg, self.state
        if state.epoch >= cfg.epochs:
            logger.info(
                f"nothing to do: {self._run} has finished its {cfg.epochs} epochs; set epochs higher to continue"
            )
        elif self._forgetting.has_ended_run:
            logger.info(f"nothing to do: {self._run} was stopped by forgetting_budget; raise max_increase to continue")
        self._signals.start()
        self._begin()
        self._profiler.start()
        while state.epoch < cfg.epochs and not self._forgetting.has_ended_run:
            if not self._train_epoch():
                return
        self._profiler.stop()
        self._metrics_log.close()
        if self._parallel.is_rank_zero:
            last = self._exported(f"epoch_{state.epoch - 1}")
            log_summary(cfg, state.best, last=last, start_time=self._start_time, **self._forgetting.summary())

    def _train_epoch(self) -> bool:
        """The steps of an epoch and its end, or until the budget is exceeded. Returns False after a signal, which ends the run."""
        cfg, state, order = self._cfg, self.state, self._data.order
        steps = self._data.steps_per_epoch
        first = -(-state.consumed // order.global_batch)  # the last batch of an epoch may be short
        batches = self._kl_penalty.batches(self._data, state.epoch, state.consumed)
        self._metrics_log.start_epoch(state.epoch)
        is_save_due = False
        for _ in range(first, steps):
            with watchdog.step():
                self._train_step(list(itertools.islice(batches, order.micro_batches_in_step(state.consumed))))
            state.consumed = min(state.consumed + order.global_batch, order.num_samples)
            self._profiler.step()
            is_last = state.consumed >= order.samples_in(steps)  # what is due now belongs to the end of the epoch
            decision = self._signals.sync(self._checkpoint_writer.is_due(state.step))
            is_validated = cfg.validate_every_n_steps and state.step % cfg.validate_every_n_steps == 0
            is_probed = self._forgetting.is_due(state.step) and not is_last
            is_read = state.step % cfg.log_every_n_steps == 0 or not self._schedule.is_on_device
            if is_read or is_validated or is_probed or decision.save or decision.stop:
                self._guard.check_losses()
            if is_validated:
                self.validate()
            if is_probed:
                self._forgetting.evaluate(self._model, state.step, state.epoch)
            if decision.stop:
                self._stop(decision)
                return False
            if self._forgetting.has_ended_run:
                self._metrics_log.end_epoch()
                self.save_checkpoint(wait=True)
                return True
            is_save_due = decision.save and is_last  # then it is saved with the epoch
            if decision.save and not is_last:
                self.save_checkpoint()
            self._checkpoint_writer.poll()
        self._end_epoch(is_save_due)
        return True

    def _train_step(self, batches: list[Batch]) -> None:
        """One optimizer step over its micro-batches. On CUDA with a fused optimizer FINCH reads nothing back to the host here."""
        num_targets = sum(batch["targets"].numel() for batch in batches)
        num_counted = sum(self._objective.count(batch) for batch in batches)
        counts = torch.tensor([num_targets, num_counted], dtype=torch.float64, pin_memory=self._device.type == "cuda")
        targets, denominator = self._parallel.all_reduce_sum_(counts.to(self._device, non_blocking=True)).unbind()
        scale = self._parallel.data_parallel_size / denominator.clamp(min=1)  # undoes FSDP2's mean over ranks
        batches = [to_device(batch, self._device) for batch in batches]
        self._kl_penalty.start_step(targets)
        self._median.before_step(batches, partial(token_losses, self._model))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        loss = None
        norms: dict[str, torch.Tensor | None] = {"grad_norm": None}
        for number, batch in enumerate(batches, start=1):
            if not self._cfg.fsdp_reduce_every_micro_batch:
                fsdp.reduce_gradients(self._model, is_reduced=number == len(batches))
            token_loss, share = self._losses(batch, scale)
            loss_sum += token_loss.sum(dtype=torch.float64)
            if self._cfg.optimizer_in_bwd:
                # The only micro-batch: its backward updates the weights, so the learning rate comes first.
                loss = self._mean_loss(loss_sum, targets)
                if not self._schedule.step(loss, denominator):
                    fsdp.reshard(self._model)
                    break
            share.backward()
        if loss is None:
            loss = self._mean_loss(loss_sum, targets)
            if self._regularizer is not None:
                norms.update(self._regularizer.add_gradients())
            norms["grad_norm"] = norm = self._clip_gradients()
            # A non-finite gradient spoils the weights as a non-finite loss does: 0 * norm is then NaN, and else 0.
            if self._schedule.step(loss + 0 * norm, denominator):
                self._optimizers[0].step()
        self._median.after_step()
        self.state.step += 1
        self._log_step(loss, targets, {**norms, **self._kl_penalty.metrics()})
        self._model.zero_grad(set_to_none=True)

    def _losses(self, batch: Batch, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, seq] in nats, detached; and [] weighted, times ``scale``, with the KL penalty and its graph."""
        return micro_batch_loss(self._model, batch, self._objective, self._median, self._kl_penalty, scale)

    def _mean_loss(self, loss_sum: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The step's cross-entropy in nats a target token, whatever the objective; a collective."""
        return self._parallel.all_reduce_sum_(loss_sum) / targets.clamp(min=1)

    def _clip_gradients(self) -> torch.Tensor:
        """Clips to ``clip_grad_norm`` if set; returns the norm before clipping, over all ranks' shards."""
        norm = grad_clipping.clip(self._model.trained_parameters().values(), self._clip_grad_norm)
        return norm.to(self._device, non_blocking=True)  # offloaded gradients live on the CPU

    def _log_step(self, loss: torch.Tensor, targets: torch.Tensor, norms: dict[str, torch.Tensor | None]) -> None:
        rate = self._schedule.metrics()
        metrics = {
            "epoch": self.state.epoch,
            "loss": loss,
            **rate,
            **norms,
            **self._median.metrics(),
            "num_target_tokens": targets,
        }
        if self._device.type == "cuda" and self._cfg.log_peak_memory_stats:
            metrics.update(training.get_memory_stats(device=self._device))
        if self._cfg.debug_checks:
            self._parallel.check_equal("the learning rate", rate["lr"])
            self._parallel.check_equal("the EMA of the loss", rate["ema_loss"])
        self._metrics_log.add(self.state.step, metrics)

    def validate(self) -> dict[str, float]:
        """Mean loss over each set of ``dataset_validation`` in nats, written to the metrics; empty without one."""
        position = {"step": self.state.step, "epoch": self.state.epoch, "epochs": self._cfg.epochs}
        return validate(self._model, self._data, self._metrics_log, **position)

    def _end_epoch(self, is_save_due: bool) -> None:
        """Validates, evaluates the probes, exports the epoch's folder, links ``best`` and ``within_budget``, and saves the state."""
        state = self.state
        self._metrics_log.end_epoch()
        self._guard.check_losses()
        self._guard.check_weights()
        metrics_lines = self._metrics_log.num_lines()
        metrics = self.validate()
        metrics |= self._forgetting.evaluate(self._model, state.step, state.epoch, is_epoch_end=True)
        if self._parallel.is_rank_zero:
            update_loss_figure(self._run)
        name = f"epoch_{state.epoch}"
        is_last = state.epoch + 1 == self._cfg.epochs
        is_end = is_last or self._forgetting.has_ended_run
        is_written = is_end or not self._cfg.save_last_epoch_only
        if not is_written:
            self._forgetting.keep_epoch(state.step, None)
        elif export(lambda: self._export(name), self._run / self._exported(name), self._parallel):
            state.best = better(state.best, self._forgetting.select_by, name, metrics)
            if state.best is not None:
                self._folder.link(run_files.BEST, self._exported(state.best["epoch"]))
            self._forgetting.keep_epoch(state.step, name)
        elif is_last:
            self.save_checkpoint(wait=True, metrics_lines=metrics_lines)
            raise UserError(
                f"output_dir={self._run} has no room for the last epoch's folder; make room, and resume_from_checkpoint=True writes it"
            )
        state.epoch, state.consumed = state.epoch + 1, 0
        if is_written or is_save_due:
            self.save_checkpoint(wait=is_end)

    def _stop(self, decision: SignalDecision) -> None:
        """Saves the state after a signal, which has ended the loop."""
        self._metrics_log.end_epoch()
        is_saved = self.save_checkpoint(wait=True)
        if decision.requeue:
            self._folder.mark_requeue()
        self.interrupted = not decision.requeue
        step, last = self.state.step, f"step {self.state.step}" if is_saved else "the last checkpoint"
        logger.info(
            f"stopped by a signal after step {step}; the same command with resume_from_checkpoint=True continues from {last}"
        )

    def save_checkpoint(self, wait: bool = False, metrics_lines: int | None = None) -> bool:
        """Saves all that a run needs to continue after this step; a collective. Returns whether nothing has failed so far.

        Args:
            wait: until it is on the disk.
            metrics_lines: of metrics.jsonl that belong to the steps so far; None: all.
        """
        if not self._guard.check_weights():
            step = self.state.step
            logger.info(f"the state of step {step} is not saved: no finite step has followed the rollback yet")
            return False
        lines = self._metrics_log.num_lines() if metrics_lines is None else metrics_lines
        scalars = {**self.state.state_dict(), **self._forgetting.state_dict(), "metrics_lines": lines}
        is_saved = self._checkpoint_writer.save(self.state.step, self._model, self._optimizers, scalars, wait=wait)
        self._metrics_log.reset_timer()
        watchdog.heartbeat()
        return is_saved

    def load_checkpoint(self, folder: Path, scalars: dict[str, Any]) -> None:
        """Restores weights, optimizer, schedule and position; a collective."""
        self.state.load(folder, scalars, self._parallel)

    def close(self) -> None:
        """After any end: writes pending metrics, and waits for a checkpoint that is being written."""
        ends = {"_metrics_log": "close", "_signals": "restore", "_checkpoint_writer": "close", "_folder": "unlock"}
        for part, end in ends.items():
            if hasattr(self, part):  # setup may have failed before
                getattr(getattr(self, part), end)()
        watchdog.stop()

    def cleanup(self) -> None:
        """Ends a run that succeeded. After an error the process group is left alone: closing NCCL's waits for lost ranks."""
        self.close()
        parallel.stop()

    # What the LoRA recipe does differently

    def _build_decoder(self, cfg: DictConfig) -> None:
        """The decoder on the meta device, the folder of its pretrained weights, and the tensor-parallel plan."""
        self._decoder, self._base, self._tensor_plan = build_decoder(cfg, self._precision)

    def _load_base(self) -> None:
        load_pretrained(self._model, self._base)

    def _export(self, name: str) -> None:
        """Writes an epoch's folder; a collective."""
        weights = self._model.decoder.state_dict().items()
        self._base.write(weights, self._run / name, is_writer=self._parallel.is_rank_zero, dtype=self._export_dtype)

    def _exported(self, name: str) -> str:
        """The name of an epoch's folder."""
        return name


@parse(FULL_FINETUNE)
def recipe_main(cfg: DictConfig) -> None:
    run(FinchFullFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
