"""Full fine-tuning with FINCH's loss-adaptive learning rate, on one process or many.

finch run --config stories260k/tofu_finch data_root=DATA
finch run --nproc_per_node 2 --config stories260k/tofu_finch data_root=DATA
"""

from __future__ import annotations

from finch.base.extras import prepare_recipe

prepare_recipe()  # before the imports that fail without the extra

import functools
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface

from finch.base import run_files
from finch.base.errors import exit_without_teardown, is_restarted
from finch.base.log import logger
from finch.config import parser, resolved, schema
from finch.data.loader import Batch
from finch.data.prompts import stop_tokens
from finch.data.training_data import TrainingData
from finch.distributed import parallel, precision, watchdog
from finch.probes import budget, probes
from finch.training import config_checks, hooks, model, optimizer, step, summary
from finch.training.checkpointer import Checkpointer, TrainState
from finch.training.run import Run, run_recipe, update_best
from finch.training.step_loss import StepLoss


class FinchFullFinetune(FTRecipeInterface):
    """Full fine-tuning of a torchtune decoder, on one process or on any number of ranks with FSDP2.

    The learning rate of a step comes from the loss of that step (``lr_scheduler: finch.FinchLR``); torchtune's schedulers and a
    constant learning rate work as well. Samples have one global order, so that a run is the same on any number of ranks, and
    a checkpoint resumes it exactly. All that happens around a step (validation, probes, signals, what a user adds) is a hook, see
    :mod:`finch.training.hooks`. `finch keys` lists the config's keys; docs/recipe.md explains a step, an epoch and a resume.

    Args:
        cfg: a config that :func:`finch.config.parser.parse` has checked.

    Raises:
        UserError: a mistake in the config, a file or the data, in one line and before weights are loaded.
    """

    options = schema.FullFinetuneKeys
    """The keys of the config, which is saved with the run."""
    saves_all_weights = True
    """Whether a checkpoint holds every weight, or only the trained ones."""
    interrupted = False
    """Whether Ctrl-C has ended the run."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.precision = precision.precision_of(cfg.dtype)
        self.device = parallel.local_device(cfg.device)
        precision.check_hardware(cfg.dtype, self.device)
        probes.check_probes(cfg)
        config_checks.check(cfg, self.device)
        self.run = Run(cfg)
        self.export_dtype = None if cfg.export_dtype is None else precision.precision_of(cfg.export_dtype).weights
        self.parts: list[Any] = [self.run]  # what `close` closes

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything: what is cheap and can fail first, weights last."""
        self.parallel = parallel.start_from(cfg, self.device, shard=self.precision.is_mixed or cfg.fsdp_cpu_offload)
        if self.parallel.world_size > 1 or is_restarted():
            watchdog.start(cfg.distributed_timeout)
        self.run.open(self.parallel)
        # After `open`: where the config has no seed, a resumed run takes its checkpoint's.
        self.seed = training.set_seed(self.run.seed, cfg.cudnn_deterministic_mode)
        ranks = parallel.describe_ranks(self.parallel.world_size)
        logger.info(f"{ranks} on {self.device.type}; dtype {cfg.dtype}: {self.precision.description}")
        self.build_decoder()
        self.setup_data()
        self.setup_hooks()
        self.setup_model()
        self.setup_update()

    def setup_data(self) -> None:
        """Tokenizer, loss and rows; with them the run's identity is known."""
        cfg = self.cfg
        self.tokenizer = self.run.build_tokenizer(self.parallel)
        if (self.tokenizer.pad_id or 0) >= self.decoder.tok_embeddings.num_embeddings:
            self.tokenizer.pad_id = self.tokenizer.eos_id  # padding is looked up too, and then masked
        self.base.chat_template = getattr(self.tokenizer, "chat_template", None)  # torchtune's tokenizers have none
        self.base.stop_tokens = stop_tokens(self.tokenizer)
        self.loss = StepLoss(cfg, self.decoder, self.parallel, self.run.scalars)
        needs_stats = self.loss.needs_stats
        fit = functools.partial(model.check_rows, self.decoder, self.base, self.tokenizer)
        self.data = TrainingData(cfg, self.tokenizer, self.parallel, seed=self.seed, needs_stats=needs_stats, fit=fit)
        self.loss.replay.read_prompts(self.tokenizer, self.data)
        watchdog.heartbeat()
        self.num_steps = cfg.epochs * self.data.steps_per_epoch
        config_checks.check_replay(cfg, self.num_steps)
        self.identity = self.run.identify(self.data, self.seed)

    def setup_hooks(self) -> None:
        """All that observes the run, in the order in which it is called, and the run's folder: what else can fail before weights are loaded."""
        cfg, self.state = self.cfg, TrainState(self.parallel)
        preemption = hooks.Preemption()
        first = {"preemption": preemption, "nonfinite": hooks.NonfiniteGuard(), "checks": hooks.StepChecks(cfg)}
        # The budget follows what the probes have just measured, and the summary draws what they have written.
        last = {"profiler": hooks.Profiler(cfg), "validation": hooks.Validation(), "probes": probes.Probes(self)}
        last |= {"budget": budget.ForgettingBudget(self), "summary": summary.Summary()}
        last |= hooks.final_hooks(cfg)
        self.hooks = {**first, **hooks.user_hooks(cfg, first.keys() | last.keys()), **last}
        self.run.check_disk_room(self.decoder)
        self.metrics_log = hooks.build_metrics_log(cfg, self.run.path, self.parallel, num_steps=self.num_steps)
        self.run.create()
        # Once the folder is there, in which a signal marks the run for requeueing.
        preemption.install(self.run)
        self.checkpointer = Checkpointer(cfg, self.run.path, self.parallel)
        # The run, which holds the lock, is closed last: until then the others may write into its folder.
        self.parts = [self.metrics_log, *self.hooks.values(), self.checkpointer.writer, self.run]

    def setup_model(self) -> None:
        """The model in memory, with the pretrained weights where a run needs them, and what is measured with them."""
        place, options = (self.cfg, self.parallel, self.precision), self.loss.model_options()
        self.model = model.parallelize(self.decoder, *place, plan=self.tensor_plan, **options)
        model.allocate(self.model, *place)
        needs_base = [not self.run.scalars, not self.saves_all_weights]
        needs_base += [self.loss.load_caches(self.cfg, self.base, self.data, self.run.path)]
        # Lists, so that all are asked: an answer may take a collective, and reads a cache that is needed.
        needs_base += [hook.needs_pretrained(self) for hook in self.hooks.values()]
        if any(needs_base):
            self.load_base()
        self.loss.prepare(self.model, self.data)
        for hook in self.hooks.values():
            hook.prepare(self)

    def setup_update(self) -> None:
        """Optimizer and schedule; then the state of the checkpoint, if there is one. A resumed schedule's EMA comes from there too."""
        reference = self.loss.reference
        initial_loss = None if reference is None else reference.mean
        options = {"num_steps": self.num_steps, "initial_loss": initial_loss, "is_resumed": bool(self.run.scalars)}
        self.update = optimizer.build_update(self.cfg, self.model, self.parallel, self.precision, **options)
        place = (self.parallel, self.device)
        each = self.cfg.fsdp_reduce_every_micro_batch
        self.step = step.TrainStep(self.model, self.loss, self.update, *place, reduces_each=each)
        self.load_checkpoint()

    def begin(self) -> None:
        """Makes the folder this run's: the one that it replaces is removed, and the metrics are opened."""
        self.run.begin(resolved.resolved_config(self.cfg, self.options))
        lines = self.run.scalars.get("metrics_lines")
        self.metrics_log.open(resolved.redacted(self.cfg), first_step=self.state.step, first_lines=lines)
        for hook in self.hooks.values():
            hook.start(self)
        # A hook may have asked for the end already, such as a budget that an earlier start has exceeded.
        self.state.agree()

    def train(self) -> None:
        """The training loop: epochs, steps, and what happens between them."""
        cfg, state = self.cfg, self.state
        self.begin()
        if state.epoch >= cfg.epochs:
            name = f"epoch_{state.epoch - 1}"
            # The last folder may have been damaged or removed since: the checkpoint has its weights.
            if not (self.run.is_whole(self.exported(name), self.parallel) or self.export(name)):
                raise self.run.no_room()
            done = f"has finished its {cfg.epochs} epochs; set epochs higher to continue"
            logger.info(f"nothing to do: {self.run.path} {done}")
        elif state.stop is not None:
            logger.info(f"nothing to do: {self.run.path} was stopped by {state.stop.reason}")
        while state.epoch < cfg.epochs and state.stop is None:
            self.train_epoch()
        if state.stop is not None and not state.stop.is_finished:
            return
        # Before the hooks, which read the complete file.
        self.metrics_log.close()
        for hook in self.hooks.values():
            hook.after_training(state)

    def train_epoch(self) -> None:
        """The steps of an epoch and its end, or until the run is stopped."""
        state, order, steps = self.state, self.data.order, self.data.steps_per_epoch
        upcoming = self.loss.steps(self.data, state.epoch, state.consumed)
        self.metrics_log.start_epoch(state.epoch)
        batches = next(upcoming, None)
        while batches is not None:
            for hook in self.hooks.values():
                hook.before_step(state)
            metrics = self.train_step(batches)
            batches = next(upcoming, None)  # while the device is at work: nothing has waited for it so far
            state.advance(order, steps)
            state.metrics = self.metrics_log.add(state.step, metrics)
            state.is_synced = any([hook.wants_sync(state.step) for hook in self.hooks.values()])
            for hook in self.hooks.values():
                state.metrics.update(hook.after_step(state) or {})
            self.metrics_log.report()
            if self.checkpointer.writer.is_due(state.step):
                state.request_save()
            state.agree()
            # A finished run that stops at the end of an epoch still gets the epoch's folder.
            if state.stop is not None and not (state.stop.is_finished and state.is_epoch_end):
                return self.stop()
            if state.is_save_due and not state.is_epoch_end:  # else it is saved with the epoch
                self.save_checkpoint()
            self.checkpointer.writer.poll()
        self.end_epoch()

    def train_step(self, batches: list[Batch]) -> dict[str, torch.Tensor | float | None]:
        """One optimizer step over its micro-batches, see :class:`finch.training.step.TrainStep`; its line in the metrics."""
        return {"epoch": self.state.epoch, **self.step(batches)}

    def end_epoch(self) -> None:
        """Exports the epoch's folder, links the best one, and saves the state."""
        state, cfg = self.state, self.cfg
        self.metrics_log.end_epoch()
        # Counted before the hooks write theirs: an epoch without a folder is ended, and validated, once more.
        lines = self.metrics_log.num_lines()
        metrics: dict[str, float] = {}
        for hook in self.hooks.values():
            metrics.update(hook.after_epoch(state) or {})
        state.agree()
        name = f"epoch_{state.epoch}"
        is_last = state.epoch + 1 == cfg.epochs
        is_end = is_last or state.stop is not None
        is_written = is_end or not cfg.save_last_epoch_only
        is_exported = is_written and self.export(name)
        if is_exported:
            state.best = update_best(state.best, state.select_by, name, metrics)
            if state.best is not None:
                self.run.link(run_files.BEST, self.exported(state.best["epoch"]))
        elif is_last:
            self.save_checkpoint(wait=True, metrics_lines=lines)
            raise self.run.no_room()
        if is_exported or not is_written:
            for hook in self.hooks.values():
                hook.after_export(state, name if is_exported else None)
        state.epoch, state.consumed = state.epoch + 1, 0
        if is_written or state.is_save_due:
            self.save_checkpoint(wait=is_end)

    def stop(self) -> None:
        """Saves the state where a hook has ended the run within an epoch."""
        state = self.state
        self.metrics_log.end_epoch()
        is_saved = self.save_checkpoint(wait=True)
        if state.stop is None or state.stop.is_finished:
            return
        if state.stop.is_requeued:
            self.run.mark_requeue()
        self.interrupted = not state.stop.is_requeued
        last = f"step {state.step}" if is_saved else "the last checkpoint"
        remedy = f"the same command with resume_from_checkpoint=True continues from {last}"
        logger.info(f"stopped by {state.stop.reason} after step {state.step}; {remedy}")

    def save_checkpoint(self, wait: bool = False, metrics_lines: int | None = None) -> bool:
        """Saves all that a run needs to continue after this step; a collective. Returns whether nothing has failed so far.

        Args:
            wait: until it is on the disk.
            metrics_lines: of metrics.jsonl that belong to the steps so far; None: all.
        """
        # A list, which asks every hook: any of them may hold a collective.
        if not all([hook.may_save(self.state) for hook in self.hooks.values()]):
            logger.info(f"the state of step {self.state.step} is not saved: a hook has refused")
            return False
        lines = self.metrics_log.num_lines() if metrics_lines is None else metrics_lines
        is_saved = self.checkpointer.save(self, metrics_lines=lines, wait=wait)
        self.metrics_log.reset_timer()
        watchdog.heartbeat()
        return is_saved

    def load_checkpoint(self) -> None:
        """Restores weights, optimizer, schedule, position, hooks and random states, if there is a checkpoint; a collective."""
        if self.run.resumed_from is not None:
            self.checkpointer.load(self, self.run.resumed_from, self.run.scalars)

    def close(self) -> None:
        """After any end: writes pending metrics, and waits for a checkpoint that is being written."""
        for part in self.parts:
            part.close()
        watchdog.stop()

    def cleanup(self) -> None:
        """Ends a run that succeeded. After an error the process group is left alone: closing NCCL's waits for lost ranks."""
        self.close()
        parallel.stop()

    def export(self, name: str) -> bool:
        """Writes the model as it is now to RUN/name; a collective. Returns False if the disk refused a file."""
        return self.run.export(lambda: self.write_weights(name), self.exported(name), self.parallel)

    # What the LoRA recipe does differently

    def build_decoder(self) -> None:
        """The decoder on the meta device, the folder of its pretrained weights, and the tensor-parallel plan."""
        self.decoder, self.base, self.tensor_plan = model.build_decoder(self.cfg, self.precision)

    def load_base(self) -> None:
        model.load_pretrained(self.model, self.base)

    def write_weights(self, name: str) -> None:
        """Writes a Hugging Face folder; a collective."""
        weights = self.model.decoder.state_dict().items()
        self.base.write(weights, self.run.path / name, is_writer=self.parallel.is_rank_zero, dtype=self.export_dtype)

    def exported(self, name: str) -> str:
        """The name of the folder of an exported model."""
        return name


@parser.parse(schema.FullFinetuneKeys)
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(FinchFullFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
