"""Full fine-tuning with FINCH's loss-adaptive learning rate, on one process or many: `finch run CONFIG`."""

from __future__ import annotations

from finch.base.extras import prepare_recipe

prepare_recipe()  # before the imports that fail without the extra

import contextlib
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
from finch.data.training_data import TrainingData
from finch.distributed import parallel, precision, watchdog
from finch.probes import probes, run_hooks
from finch.training import config_checks, hooks, optimizer, step
from finch.training.checkpointer import Checkpointer, Stop, TrainState
from finch.training.loaded_model import LoadedModel
from finch.training.run import Run, is_epoch_written, run_recipe, update_best
from finch.training.step_loss import StepLoss


class FinchFullFinetune(FTRecipeInterface):
    """Full fine-tuning of a torchtune decoder, on one process or on any number of ranks with FSDP2.

    Samples have one global order: a run is the same on any number of ranks, and a checkpoint resumes it exactly. All that happens around
    a step (validation, probes, signals, what a user adds) is a hook, see :mod:`finch.training.hooks`. docs/recipe.md explains a step, an
    epoch and a resume. ``cfg`` is checked. Raises UserError for a mistake in it, a file or the data, before weights are loaded.
    """

    options = schema.FullFinetuneKeys  # the config's, which is saved with the run
    trains_adapters = False  # LoRA's layers alone, which are then all that a checkpoint holds
    model_class = LoadedModel
    interrupted = False  # by Ctrl-C

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.precision = precision.precision_of(cfg.dtype)
        self.device = parallel.local_device(cfg.device)
        precision.check_hardware(cfg.dtype, self.device)
        probes.check_probes(cfg)
        config_checks.check(cfg, self.device)
        self.run = Run(cfg)
        self.parts: list[Any] = [self.run]  # what `close` closes

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything: what is cheap and can fail first, weights last."""
        self.parallel = parallel.start_from(cfg, self.device, shard=self.precision.is_mixed or cfg.fsdp_cpu_offload)
        if self.parallel.world_size > 1 or is_restarted():
            watchdog.start(cfg.distributed_timeout)
        self.run.open(self.parallel)
        # After `open`: where the config has no seed, a resumed run takes its checkpoint's. A drawn one is kept in config.yaml.
        self.seed = cfg.seed = training.set_seed(self.run.seed, cfg.cudnn_deterministic_mode)
        ranks = parallel.describe_ranks(self.parallel.world_size)
        logger.info(f"{ranks} on {self.device.type}; dtype {cfg.dtype}: {self.precision.description}")
        self.loaded = self.model_class(cfg, self.precision, has_adapters=self.trains_adapters)
        self.decoder, self.base, self.exported = self.loaded.decoder, self.loaded.base, self.loaded.exported
        self.setup_data()
        self.setup_hooks()
        if not self.run.has_ended:
            self.setup_training()

    def setup_data(self) -> None:
        """Tokenizer, loss and rows; with them the run's identity is known."""
        cfg = self.cfg
        self.tokenizer = self.run.build_tokenizer(self.parallel)
        self.loaded.accept(self.tokenizer)
        self.loss = StepLoss(cfg, self.decoder, self.parallel, self.run.scalars)
        options = {"seed": self.seed, "needs_stats": self.loss.needs_stats}
        fit = functools.partial(self.loaded.check_rows, self.tokenizer)
        self.data = TrainingData(cfg, self.tokenizer, self.parallel, fit=fit, **options)
        self.loss.replay.read_prompts(self.tokenizer, self.data)
        self.num_steps = cfg.epochs * self.data.steps_per_epoch
        config_checks.check_replay(cfg, self.num_steps)
        self.identity = self.run.identify(self.data, self.seed, self.loss.replay.prompts, self.loaded.digest)

    def setup_hooks(self) -> None:
        """All that observes the run, in the order in which it is called, and the run's folder: what else can fail before weights are loaded."""
        cfg, self.state = self.cfg, TrainState(self.parallel, waits=bool(self.cfg.hooks))
        preemption = hooks.Preemption(self.run)
        self.hooks = run_hooks.build_hooks(self, preemption)
        self.run.check_disk_room(self.decoder)
        self.loaded.check_room(self.parallel)
        self.metrics_log = hooks.build_metrics_log(cfg, self.run.path, self.parallel, num_steps=self.num_steps)
        self.run.create()
        preemption.install()  # once the folder is there, in which a signal marks the run for requeueing
        self.checkpointer = Checkpointer(cfg, self.run.path, self.parallel)
        # The run, which holds the lock, is closed last: until then the others may write into its folder.
        self.parts = [self.metrics_log, *self.hooks.values(), self.checkpointer.writer, self.run]

    def setup_training(self) -> None:
        """The model in memory, with the pretrained weights where a run needs them, and what is measured with them; then the update."""
        self.model = self.loaded.in_memory(self.parallel, **self.loss.model_options())
        has_no_caches = self.loss.load_caches(self.cfg, self.base, self.data, self.run.path)
        needs_base = [not self.run.scalars, self.trains_adapters, has_no_caches]
        needs_base += self.hooks.each(lambda hook: hook.needs_pretrained(self))
        if any(needs_base):
            self.loaded.load_pretrained(self.seed)
        self.loss.prepare(self.model, self.data)
        self.hooks.each(lambda hook: hook.prepare(self))
        options: dict[str, Any] = {"reference": self.loss.reference, "is_resumed": bool(self.run.scalars)}
        place, number, each = (self.parallel, self.precision), self.num_steps, self.cfg.fsdp_reduce_every_micro_batch
        self.update = optimizer.build_update(self.cfg, self.model, *place, num_steps=number, **options)
        self.step = step.TrainStep(self.model, self.loss, self.update, self.parallel, self.device, reduces_each=each)
        if self.run.resumed_from is not None:
            self.checkpointer.load(self, self.run.resumed_from, self.run.scalars)

    def begin(self) -> None:
        """Makes the folder this run's: the one that it replaces is removed, and the metrics are opened."""
        self.run.begin(resolved.resolved_config(self.cfg, self.options))
        lines = self.run.scalars.get("metrics_lines")
        self.metrics_log.open(resolved.redacted(self.cfg), first_step=self.state.step, first_lines=lines)
        self.hooks.each(lambda hook: hook.start(self))
        # A hook may have asked for the end already, such as a budget that an earlier start has exceeded.
        self.state.agree()

    def train(self) -> None:
        """The training loop: epochs, steps, and what happens between them."""
        cfg, state = self.cfg, self.state
        if self.run.has_ended:
            self.hooks.each(lambda hook: hook.after_end(self))
            return
        self.begin()
        if state.epoch >= cfg.epochs:
            name = f"epoch_{state.epoch - 1}"
            has_folder = (
                state.best is None or state.best["epoch"] == name or not cfg.save_best_only or cfg.save_last_epoch_only
            )
            # The last folder may have been damaged or removed since: the checkpoint has its weights.
            if has_folder and not (self.run.is_whole(self.exported(name), self.parallel) or self.export(name)):
                raise self.run.no_room()
            logger.info(f"nothing to do: {cfg.epochs} epochs have ended; set epochs higher to continue")
        elif state.stop is not None:
            logger.info(f"nothing to do: this run was stopped by {state.stop.reason}")
            if state.consumed > 0:  # its state is that of the step
                self.end_epoch()
        while state.epoch < cfg.epochs and state.stop is None:
            self.train_epoch()
        if state.stop is not None and not state.stop.is_finished:
            return
        self.metrics_log.close()  # before the hooks, which read the complete file
        self.hooks.each(lambda hook: hook.after_training(state))

    def train_epoch(self) -> None:
        """The steps of an epoch and its end, or until the run is stopped."""
        state, order, steps = self.state, self.data.order, self.data.steps_per_epoch
        upcoming = self.loss.steps(self.data, state.epoch, state.consumed)
        self.metrics_log.start_epoch(state.epoch)
        batches = next(upcoming, None)
        while batches is not None:
            self.hooks.each(lambda hook: hook.before_step(state))
            metrics = self.train_step(batches)
            batches = next(upcoming, None)  # while the device is at work: nothing has waited for it so far
            state.advance(order, steps)
            state.metrics = self.metrics_log.add(state.step, metrics)
            self.hooks.after_step(state)
            self.metrics_log.report()
            self.checkpointer.request_due(state)
            state.agree()
            if state.stop is not None:
                self.save_stopped(state.stop)
                break
            if state.is_save_due and not state.is_epoch_end:  # else it is saved with the epoch
                self.checkpointer.save(self)
            self.checkpointer.writer.poll()
        else:  # also in a run that was resumed there
            state.is_epoch_end = True
        # A finished run gets the folder of its epoch, also where it stops within it.
        if state.stop is None or state.stop.is_finished:
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
        metrics = self.hooks.after_epoch(state)
        state.agree()
        name, best = f"epoch_{state.epoch}", update_best(state.best, state.select_by, f"epoch_{state.epoch}", metrics)
        is_unfinished = state.stop is not None and not state.stop.is_finished  # a hook asks for it after an epoch
        is_end = state.epoch + 1 == cfg.epochs or (state.stop is not None and not is_unfinished)
        is_written = is_epoch_written(cfg, state.best, best, is_end=is_end)
        is_exported = is_written and self.export(name)
        if is_exported:
            state.best = best
            if best is not None:
                self.run.link(run_files.BEST, self.exported(best["epoch"]))
        elif is_written and is_end:
            self.checkpointer.save(self, wait=True, metrics_lines=lines)
            raise self.run.no_room()
        if is_exported or not is_written:
            self.hooks.each(lambda hook: hook.after_export(state, name if is_exported else None))
        state.epoch, state.consumed = state.epoch + 1, 0
        # A run that has ended within its epoch has saved that state, from which it can go on, unless it is light.
        is_due = is_end or is_unfinished or state.is_save_due or not (cfg.save_last_epoch_only or cfg.save_best_only)
        is_saved = is_due and (state.is_epoch_end or self.checkpointer.is_light)
        if is_saved:
            is_saved = self.checkpointer.save(self, wait=is_end or is_unfinished, is_end=is_end and not is_unfinished)
        if is_unfinished and state.stop is not None:
            self.interrupted = self.run.interrupt(state.stop, state.step, is_saved=is_saved)

    def save_stopped(self, stop: Stop) -> None:
        """Saves the state where a hook has ended the run within an epoch, or a signal anywhere."""
        if stop.is_finished and self.state.is_epoch_end:
            return
        self.metrics_log.end_epoch()
        is_saved = not (stop.is_finished and self.checkpointer.is_light) and self.checkpointer.save(self, wait=True)
        if not stop.is_finished:
            self.interrupted = self.run.interrupt(stop, self.state.step, is_saved=is_saved)

    def close(self) -> None:
        """After any end: writes pending metrics, and waits for a checkpoint that is being written. Every part is closed, also after one that fails."""
        with contextlib.ExitStack() as closing:
            closing.callback(watchdog.stop)
            for part in reversed(self.parts):  # the stack's last one is its first
                closing.callback(part.close)

    def cleanup(self) -> None:
        """Ends a run that succeeded. After an error the process group is left alone: closing NCCL's waits for lost ranks."""
        self.close()
        parallel.stop()

    def export(self, name: str) -> bool:
        """Writes the model as it is now to RUN/name; a collective. Returns False if the disk refused a file."""
        return self.run.export(lambda: self.loaded.write(self.run.path / name), self.exported(name), self.parallel)


@parser.parse(schema.FullFinetuneKeys)
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(FinchFullFinetune, cfg)


if __name__ == "__main__":
    recipe_main()
    exit_without_teardown()
