"""One run: its folder RUN/ with lock, links and disk room, the checkpoint it resumes from, its identity, and its process from start to end."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf, open_dict
from torchtune.modules import TransformerDecoder

from finch.base import files, run_files, status
from finch.base.errors import NotFinite, Unavailable, UserError, WriteFailed, writing
from finch.base.log import logger
from finch.checkpoint import manifest
from finch.checkpoint import reader as checkpoint
from finch.config.instantiate import build, component_of
from finch.config.schema import affecting
from finch.data.prompts import Prompts
from finch.data.training_data import TrainingData
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel, launched_rank
from finch.distributed.precision import precision_of
from finch.distributed.processes import die_with_parent, is_launched
from finch.models.lora import adapter_parameters
from finch.optim.finch_lr import NonfiniteError
from finch.training.checkpointer import Stop
from finch.training.config_checks import check_output_folder, is_objective
from finch.training.optimizer import optimizer_bytes
from finch.weights.files import is_whole, side_files

ACQUIRE_TIMEOUT_S = 5.0  # a holder that has been killed may take a moment to exit
_DATE = "tokenizer.date"
_WITH_PATHS = {"checkpointer", "dataset", "dataset_validation", "hooks", "model", "probes", "self_replay", "tokenizer"}
"""Blocks that may name other folders on other nodes; what is in these is compared where it has been read."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def run_recipe(recipe_class: Callable[[DictConfig], Any], cfg: DictConfig) -> None:
    """Runs a recipe from its checks to the end of the process. Ctrl-C, once the state is saved (``interrupted``), ends it with exit code 130.

    Raises UserError for a mistake in the config, NotFinite for a loss, gradient or weight; the rows of that step are logged.
    """
    if is_launched():
        # A launcher that is killed cannot end its ranks: they would wait for each other and hold their GPUs.
        die_with_parent()
    recipe = recipe_class(cfg)
    logger.setLevel(str(cfg.log_level).upper())
    try:
        recipe.setup(cfg)
        recipe.run.follow_end()
        recipe.train()
    except BaseException as error:
        try:
            recipe.close()
        except Exception as another:  # such as a disk that is still full; the first error is the one to report
            logger.warning(f"closing the run failed as well: {another}")
        # After `close`, which has read the metrics that were pending: only then is the step known.
        if isinstance(error, FloatingPointError):
            guard = recipe.hooks["nonfinite"]
            logger.warning(guard.rows())
            told = NonfiniteError(error.where, guard.nonfinite) if isinstance(error, NonfiniteError) else error
            raise NotFinite(str(told)) from error
        raise
    status.report(now=True, is_finished=recipe.state.stop is None or recipe.state.stop.is_finished)
    recipe.cleanup()
    if recipe.interrupted:
        sys.exit(128 + signal.SIGINT)


class Run:
    """The folder of a run. It is locked while the run is set up and becomes this run's in :meth:`begin`: a run that fails before its
    first step leaves everything as it was. Only rank 0 writes and holds the lock.

    Attributes:
        path: the folder, which need not exist.
        resumed_from: the checkpoint that the run resumes from, verified; None: a new run.
        scalars: of that checkpoint; empty for a new run.
        has_ended: whether the run is over and has left no weights to go on from.
        start_time: of this process, by ``time.perf_counter``.

    Raises UserError if another run holds the folder, or it holds a run that this one must not touch.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.path, self._cfg, self._replace = Path(cfg.output_dir), cfg, bool(cfg.overwrite)
        self.is_writer = launched_rank() == 0
        self._lock, self.start_time = RunLock(self.path), time.perf_counter()
        self._old_logs: dict[Path, tuple[int, int]] = {}
        status.follow(None)  # another run of this process may have ended
        self.resumed_from: Path | None = None
        self.has_ended = False
        self.scalars: dict[str, Any] = {}
        if self.is_writer:  # the lock is exclusive: many ranks would wait for each other
            self._lock.check()
        self._candidates = check_output_folder(cfg)
        # Here and not among the checks: a sweep's finished cells need no checkpoints, and are not started.
        has_ended = status.read(self.path / run_files.STATUS)["is_finished"]
        if has_ended and (self.path / run_files.METRICS).exists() and not (self._candidates or self._replace):
            raise UserError(
                f"output_dir={self.path} holds a run that has ended, without a checkpoint; overwrite=True replaces it"
            )

    def open(self, parallel: Parallel) -> None:
        """Locks the folder if it exists, and verifies the checkpoint to resume from; a collective. Call it before a metric logger is built,
        whose files are not an earlier run's. Raises UserError if another run holds the folder, it cannot be written, or every checkpoint
        is damaged."""
        settings: Any = OmegaConf.to_container(self._cfg, resolve=True)
        parallel.require_equal("settings", {key: settings.get(key) for key in affecting("result") - _WITH_PATHS})
        if self.is_writer and self.path.is_dir():
            with self._os_error_as_user_error():
                self._lock.acquire()
                if self._replace:
                    # Taken now: once the metric logger is built, its files cannot be told from an earlier run's.
                    self._old_logs = {path: _version(path) for path in _files_in(self.path / run_files.LOGS)}
        folder, damages = checkpoint.latest_valid(self._candidates, parallel)
        if damages and folder is None:
            raise UserError(
                f"resume_from_checkpoint={self._cfg.resume_from_checkpoint}: {damages[0]}, and there is no other; start from scratch with "
                "overwrite=True"
            )
        for message in damages:
            logger.warning(message)
        if folder is not None:
            self.resumed_from, self.scalars = folder, checkpoint.read_state(folder)
            best = self.scalars["best"]
            # A kill may have come after a better one has replaced it: that one is found once more.
            if best is not None and self._folder_of(best["epoch"]) is None:
                self.scalars["best"] = None

    @property
    def seed(self) -> int | None:
        """The config's seed, or where it has none that of the run that is resumed."""
        return self._cfg.seed if self._cfg.seed is not None else self.scalars.get("seed")

    def build_tokenizer(self, parallel: Parallel) -> Any:
        """The config's tokenizer. One whose chat template writes today's date keeps that of the run's first start: a resumed run has the same
        rows on another day. A collective."""
        node = self._cfg.tokenizer
        tokenizer = build(node, "tokenizer")
        if getattr(tokenizer, "date", None) is not None:
            kept = self.scalars.get("identity", {}).get(_DATE)
            if kept is not None and node.get("date") is None:
                tokenizer.date = kept
            tokenizer.date = parallel.gather_all_ranks(tokenizer.date)[0]  # it may be midnight
            # Into the config, from which the identity and config.yaml take it.
            with open_dict(self._cfg):
                node.date = tokenizer.date
        return tokenizer

    def identify(self, data: TrainingData, seed: int, prompts: Prompts | None, digest: str) -> dict[str, Any]:
        """The identity of the run, see :func:`identity_of`. Raises UserError if the checkpoint to resume from is another run's."""
        identity = identity_of(self._cfg, data, seed, prompts, digest)
        if self.resumed_from is not None:
            # Before anything is removed: a folder that is another run's stays as it is.
            checkpoint.check_identity(self.scalars, identity, self.resumed_from)
            logger.info(f"resumed from step {self.scalars['step']} of {self.resumed_from}")
            self.has_ended = not self.scalars.get("has_weights", True)
            if self.has_ended:
                self._tell_end(self.scalars["stopped_by"])
            if self.is_writer:
                with self._os_error_as_user_error():
                    checkpoint.remove_surplus(self.path, self.resumed_from, self._cfg.checkpoint.keep_last)
        return identity

    def follow_end(self) -> None:
        """What is left of a run that has ended, such as its average, goes on in its status, where a kill has left that without an end."""
        if self.has_ended and self.is_writer and not status.read(self.path / run_files.STATUS)["is_finished"]:
            status.follow(self.path / run_files.STATUS)
            status.report(now=True, stopped_by=self.scalars["stopped_by"])

    def _tell_end(self, stopped_by: str | None) -> None:
        epochs, rest = self.scalars["epoch"], "it has left no weights to continue from; overwrite=True starts anew"
        if stopped_by is None and self._cfg.epochs > epochs:
            raise UserError(
                f"epochs={self._cfg.epochs}: {self.resumed_from} is of a run that ended after {epochs}, and {rest}"
            )
        text = f"this run was stopped by {stopped_by}" if stopped_by is not None else f"{epochs} epochs have ended"
        logger.info(f"nothing to do: {text}; {rest}")

    def check_disk_room(self, decoder: TransformerDecoder) -> None:
        """Runs :func:`check_disk_room` on the rank that writes."""
        epoch = self.scalars.get("epoch", 0)
        if self.is_writer and epoch < self._cfg.epochs:
            paths = [] if not self._replace else [path for each in self._old_outputs() for path in _files_in(each)]
            freed = sum(path.lstat().st_size for path in paths)  # by `begin`
            check_disk_room(self._cfg, decoder, freed_bytes=freed, first_epoch=epoch)

    def create(self) -> None:
        """Creates and locks the folder; what is in it stays. Raises UserError if another run holds the folder, or it cannot be written."""
        if self.is_writer:
            with self._os_error_as_user_error():
                files.make_folder(self.path)
                self._lock.acquire()
                # With overwrite the old run keeps its mark until `begin` removes it with the rest.
                if not self._replace:
                    (self.path / run_files.REQUEUE).unlink(missing_ok=True)

    def begin(self, config: Any) -> None:
        """Makes the folder this run's; called when the first step starts. Checkpoints later than the one that is resumed are archived.

        ``config`` is written to config.yaml. Raises UserError if a file cannot be removed or written.
        """
        if not self.is_writer:
            return
        with self._os_error_as_user_error():
            if self._replace:
                self._remove_old_run()
            if self.resumed_from is not None and checkpoint.archive_newer(self.path, self.resumed_from):
                self._archive_epochs(self.scalars["epoch"])
            with files.atomic_file(self.path / run_files.CONFIG) as partial:
                OmegaConf.save(config, partial)
        # A link there, or what a kill has left, is replaced.
        status.follow(self.path / run_files.STATUS)

    def _folder_of(self, epoch: str) -> str | None:
        """The folder of an epoch's model, or of its adapter, by its name; None: there is none."""
        return next((name for name in (epoch, f"{epoch}_adapter") if (self.path / name).is_dir()), None)

    def _archive_epochs(self, first: int) -> None:
        """Renames the models of steps that the run takes again: they are not what it ends with, should it end before."""
        links = (run_files.BEST, run_files.WITHIN_BUDGET)
        discarded = [path for (epoch, _), path in run_files.epoch_folders(self.path).items() if epoch >= first]
        for path in (path for link in links for path in self.path.glob(f"{link}_step_*")):
            step = path.name.removesuffix("_adapter").rpartition("_")[2]
            discarded += [path] if step.isdigit() and int(step) > self.scalars["step"] else []
        for path in discarded:
            checkpoint.archive(path)
        best = self.scalars["best"]
        if best is not None and (name := self._folder_of(best["epoch"])) is not None:
            self.link(run_files.BEST, name)
        for dangling in (self.path / link for link in links if not (self.path / link).exists()):
            dangling.unlink(missing_ok=True)

    def mark_requeue(self) -> None:
        """Creates REQUEUE: the run is not finished and should be started again."""
        if self.is_writer:
            status.report(now=True, is_requeued=True)
            with contextlib.suppress(OSError):
                (self.path / run_files.REQUEUE).touch()

    def interrupt(self, stop: Stop, step: int, *, is_saved: bool) -> bool:
        """Says how a run that has ended after ``step`` goes on, and marks one that whoever started it should start again; returns whether it has
        no such mark, as after Ctrl-C."""
        if stop.is_requeued:
            self.mark_requeue()
        last = f"step {step}" if is_saved else "the last checkpoint"
        remedy = f"the same command with resume_from_checkpoint=True continues from {last}"
        logger.info(f"stopped by {stop.reason} after step {step}; {remedy}")
        return not stop.is_requeued

    def link(self, link: str, name: str) -> None:
        """Makes ``link`` (``best``, ``within_budget``) a relative link to the folder ``name``, replaced in one step. Then removes the models of
        steps that were exported for it before, and for ``best`` with ``save_best_only`` those of epochs, unless another link leads there."""
        if not self.is_writer:
            return
        try:
            with files.atomic_file(self.path / link) as partial:
                partial.symlink_to(name)
        except OSError as error:
            logger.warning(f"{self.path / link} could not be set to {name} ({error.strerror}) and stays as it is")
            return
        # LoRA writes two folders for one step, a model and its adapter: both stay.
        links = [self.path / each for each in (run_files.BEST, run_files.WITHIN_BUDGET)]
        kept = {each.readlink().name.removesuffix("_adapter") for each in links if each.is_symlink()}
        old = list(self.path.glob(f"{link}_step_*"))
        if link == run_files.BEST and self._cfg.save_best_only:
            old += run_files.epoch_folders(self.path).values()
        for path in old:
            if path.name.removesuffix("_adapter") not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def export(self, write: Callable[[], None], name: str, parallel: Parallel) -> bool:
        """Writes a model's folder by ``write``, which every rank calls, since each sends its shards; a collective.

        Returns whether it could be written; a full disk does not end the run.
        """
        folder, start = self.path / name, time.perf_counter()
        message = None
        try:
            write()
        except WriteFailed as error:
            message = str(error)
        watchdog.heartbeat()
        # Only rank 0 writes: its outcome is that of all.
        message = parallel.gather_all_ranks(message)[0]
        if message is not None:
            logger.warning(f"{folder} could not be written ({message})")
        else:
            logger.info(f"saved {folder} in {time.perf_counter() - start:.1f} s")
        return message is None

    def no_room(self) -> UserError:
        """The error for a last epoch whose folder could not be written."""
        return UserError(
            f"output_dir={self.path} has no room for the last epoch's folder; make room, and resume_from_checkpoint=True writes it"
        )

    def is_whole(self, name: str, parallel: Parallel) -> bool:
        """Whether a folder that the run has exported is there and complete, see :func:`finch.weights.files.is_whole`; a collective."""
        folder = self.path / name
        found = bool(parallel.gather_all_ranks(self.is_writer and is_whole(folder))[0])
        if not found:
            logger.warning(f"{folder} is not complete: it is written again, from {self.resumed_from}")
        return found

    def close(self) -> None:
        self._lock.release()

    def _old_outputs(self) -> list[Path]:
        """What an earlier run has left, in the order of its removal, which may be interrupted: without checkpoints nothing resumes the
        old run, and as long as metrics.jsonl is there the folder counts as a run's."""
        links = [self.path / name for name in (run_files.BEST, run_files.WITHIN_BUDGET, run_files.AVERAGE)]
        models = [
            *self.path.glob("epoch_*"),
            *(path for link in links for path in self.path.glob(f"{link.name}_step_*")),
        ]
        # First the mark that the run has ended: one that is half removed starts again.
        first = [self.path / name for name in (run_files.REQUEUE, run_files.STATUS)]
        last = [self.path / name for name in (run_files.EVALUATION, run_files.LOSS_FIGURE, run_files.METRICS)]
        return [*first, *checkpoint.own_folders(self.path), *links, *models, *last]

    def _remove_old_run(self) -> None:
        for path in checkpoint.own_folders(self.path):
            (path / manifest.FILE_NAME).unlink(missing_ok=True)  # one that is half removed must not look damaged
        self._remove_old_logs()
        for path in self._old_outputs():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what is left there is a user's
            (self.path / run_files.CHECKPOINTS).rmdir()

    def _remove_old_logs(self) -> None:
        """Removes logs that are as they were before this run's metric logger was built; one that it appends to is emptied."""
        is_open = _open_files()
        for path, version in self._old_logs.items():
            if not os.path.lexists(path) or _version(path) != version:
                continue
            if not path.is_symlink() and (path.stat().st_dev, path.stat().st_ino) in is_open:
                # Unlinked, it would take along what the logger still writes into its open file.
                os.truncate(path, 0)
            else:
                path.unlink()
        # In this order a folder comes after those inside it.
        for folder in sorted({path.parent for path in self._old_logs}, reverse=True):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _os_error_as_user_error(self) -> contextlib.AbstractContextManager[None]:
        return writing(f"output_dir={self.path}", kind=Unavailable)


def _files_in(path: Path) -> list[Path]:
    """The files and links below a folder; a file or link itself."""
    if path.is_dir() and not path.is_symlink():
        return [each for each in path.rglob("*") if each.is_symlink() or each.is_file()]
    return [path] if os.path.lexists(path) else []


def _version(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_ino, status.st_mtime_ns


def _open_files() -> set[tuple[int, int]]:
    """(device, inode) of the files that this process has open; empty where the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                status = os.fstat(int(descriptor))
                found.add((status.st_dev, status.st_ino))
    return found


class RunLock:
    """One run per output folder: a run locks RUN/.lock, so that two never write into one folder.

    The lock is the operating system's (flock, through filelock) and is released when its holder ends, however that happens; on NFS
    it holds across machines. The file's content names the holder, for the error message.
    """

    def __init__(self, run: Path) -> None:
        self._path = run_files.inside(run, run_files.LOCK, is_file=True)
        # Not filelock's lock file without flock: it would outlive a killed holder.
        self._lock = FileLock(self._path, fallback_to_soft=False)

    def check(self, timeout_s: float | None = None) -> None:
        """Raises UserError that names the other run if one holds the folder; creates nothing."""
        with contextlib.suppress(OSError):  # the file cannot be opened: `acquire` reports that
            if self._path.exists():
                self._acquire(timeout_s)
                self.release()

    def holder(self) -> str | None:
        """The process that holds the folder now, in words; None: none does, as far as can be seen."""
        with warnings.catch_warnings(action="ignore"):
            try:
                self.check(timeout_s=0)
            except UserError:
                return self._holder()
        return None

    def acquire(self) -> None:
        """Locks the folder, which must exist, until ``release`` or the end of the process.

        Raises UserError that names the other run if one holds it, and OSError if the folder cannot be written.
        """
        self._acquire()
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self._path.write_text(json.dumps(holder) + "\n", encoding="utf-8")

    def release(self) -> None:
        self._lock.release(force=True)  # however often it was acquired

    def _acquire(self, timeout_s: float | None = None) -> None:
        try:
            self._lock.acquire(ACQUIRE_TIMEOUT_S if timeout_s is None else timeout_s)
        except Timeout:
            raise Unavailable(
                f"output_dir={self._path.parent} is in use by {self._holder()}; wait for it to end, or give another output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            warnings.warn(
                f"{self._path.parent} is on a file system without locks: a second run could write into it", stacklevel=2
            )

    def _holder(self) -> str:
        holder = files.read_object(self._path)
        if not {"pid", "host", "since"} <= holder.keys():
            return "another process"
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"


@dataclass(frozen=True)
class DiskUse:
    """Bytes that a run writes.

    Attributes:
        epoch: an epoch's export.
        num_epochs: epochs that are kept.
        num_replaced: epochs that lie there besides, while a better one is written.
        state: a state to resume from.
        num_states: states that are kept; one more lies there while it is written.
    """

    epoch: int
    num_epochs: int
    num_replaced: int
    state: int
    num_states: int

    @property
    def exports(self) -> int:
        return self.num_epochs * self.epoch

    @property
    def total(self) -> int:
        """Bytes while the last state is written."""
        return self.exports + self.num_replaced * self.epoch + (self.num_states + 1) * self.state


def disk_use(cfg: DictConfig, decoder: TransformerDecoder, first_epoch: int = 0) -> DiskUse:
    """What a run will write, without logs and caches. ``decoder`` may be on the meta device; ``first_epoch``, from 0: those before it are written."""
    dtype = None if cfg.export_dtype is None else precision_of(cfg.export_dtype).weights
    adapter_only = bool(cfg.get("save_adapter_weights_only", False))
    epoch = exported_bytes(decoder, dtype, adapter_only=adapter_only)
    if not adapter_only:
        epoch += sum(path.stat().st_size for path in side_files(Path(cfg.checkpointer.checkpoint_dir)))
    trained = [weight for weight in decoder.parameters() if weight.requires_grad]
    saved = trained if adapter_parameters(decoder) else list(decoder.parameters())
    states = sum(weight.numel() for weight in trained) * optimizer_bytes(cfg, precision_of(cfg.dtype))
    state = sum(weight.numel() * weight.itemsize for weight in saved) + int(states)
    is_replaced = cfg.save_best_only and not cfg.save_last_epoch_only and cfg.epochs - first_epoch > 1
    return DiskUse(epoch, num_exports(cfg, first_epoch), int(is_replaced), state, cfg.checkpoint.keep_last)


def check_disk_room(
    cfg: DictConfig, decoder: TransformerDecoder, *, freed_bytes: int = 0, first_epoch: int = 0
) -> None:
    """Checks that the weights of one epoch fit; logs what the complete run needs, as a warning if that does not fit.

    Args:
        decoder: may be on the meta device.
        freed_bytes: of an earlier run that is removed before anything is written.
        first_epoch: from 0; those before it are written already.

    Raises UserError if the weights of one epoch do not fit.
    """
    folder, use = Path(cfg.output_dir), disk_use(cfg, decoder, first_epoch)
    free = shutil.disk_usage(files.existing_part(folder)).free + freed_bytes
    if free < use.epoch:
        raise Unavailable(
            f"output_dir={folder} has {free:,} bytes of free disk, the weights of one epoch need {use.epoch:,}; make room, or give a "
            "folder on a larger disk"
        )
    weights = f"the weights of {use.num_epochs} epochs" if use.num_epochs > 1 else "the weights"
    once = "once one is saved " if cfg.save_best_only else ""
    states = f"{use.num_states} states" if use.num_states > 1 else "a state"
    text = (
        f"disk: {weights} take {files.gigabytes(use.exports)}, {once}{states} to resume from {files.gigabytes(use.num_states * use.state)}; "
        f"at most {files.gigabytes(use.total)} while they are written; {files.gigabytes(free)} free"
    )
    if free < use.total:
        logger.warning(text + ("; save_last_epoch_only=True writes one epoch" if use.num_epochs > 1 else ""))
    else:
        logger.info(text)


def num_exports(cfg: DictConfig, first_epoch: int = 0) -> int:
    """Epochs from ``first_epoch`` on whose weights a run writes."""
    return 1 if cfg.save_last_epoch_only or cfg.save_best_only else int(cfg.epochs) - first_epoch


def exported_bytes(decoder: TransformerDecoder, dtype: torch.dtype | None, *, adapter_only: bool = False) -> int:
    """Bytes of the weights that an epoch exports: with LoRA the adapter and, unless ``adapter_only``, the merged model."""
    adapters = adapter_parameters(decoder)
    exported = adapters if adapter_only else decoder.state_dict()
    return sum(weight.numel() * (dtype or weight.dtype).itemsize for weight in exported.values())


def identity_of(cfg: DictConfig, data: TrainingData, seed: int, prompts: Prompts | None, digest: str) -> dict[str, Any]:
    """Config keys, properties of the data and of the replayed ``prompts``, and the pretrained weights' ``digest``, as plain JSON; saved in every
    checkpoint."""
    stats, mixture = data.stats, data.mixture
    return {
        "model": OmegaConf.to_container(cfg.model, resolve=True),
        **({} if cfg.tokenizer.get("date") is None else {_DATE: cfg.tokenizer.date}),
        # Without the folders above it, which may be others where the run is resumed.
        "checkpointer.checkpoint_dir": Path(cfg.checkpointer.checkpoint_dir).resolve().name,
        "digest of the weights": digest[:16],
        "optimizer._component_": component_of(cfg.optimizer),
        "lr_scheduler._component_": component_of(cfg.lr_scheduler),
        "dtype": cfg.dtype,
        "number of samples": len(data.samples),
        "loss": OmegaConf.to_container(cfg.loss, resolve=True) if is_objective(cfg) else "cross-entropy",
        "regularizer": None if cfg.regularizer is None else OmegaConf.to_container(cfg.regularizer, resolve=True),
        "kl_penalty": None if cfg.kl_penalty is None else OmegaConf.to_container(cfg.kl_penalty, resolve=True),
        # Where the answers are kept changes nothing in the run.
        "self_replay": None if cfg.self_replay is None else {**cfg.self_replay, "cache": None},
        "digest of the replayed prompts": None if prompts is None else prompts.digest,
        # Of a mixture, a run of more epochs reads more rows.
        "number of target tokens": stats.num_targets if stats is not None and mixture is None else None,
        "digest of the tokenized rows": f"{stats.first_epoch_digest:016x}" if stats is not None else None,
        "digest of the validation rows": f"{data.validation_digest:016x}" if data.validation_digest else None,
        "rows of the mixed datasets": None if mixture is None else list(mixture.rows),
        "draws per epoch of the mixed datasets": None if mixture is None else list(mixture.draws),
        "seed": seed,
        "shuffle": cfg.shuffle,
        "global batch": data.order.global_batch,
        "drop_last": cfg.drop_last,
        "max_steps_per_epoch": cfg.max_steps_per_epoch,
    }


def update_best(
    best: dict[str, Any] | None, key: str | None, name: str, metrics: Mapping[str, float]
) -> dict[str, Any] | None:
    """The best epoch so far: ``{"epoch": name, key: value}``, or None.

    A ``best`` that was chosen by another metric does not count. Of an accuracy larger is better, of all other metrics smaller. Without
    a ``key`` no epoch is chosen.
    """
    if key is None:
        return best
    value, old = metrics.get(key), None if best is None else best.get(key)
    if value is None or not math.isfinite(value):
        return best
    sign = -1 if _is_accuracy(key) else 1
    return {"epoch": name, key: value} if old is None or sign * value < sign * old else best


def _is_accuracy(key: str) -> bool:
    """Whether a metric is ``probe/NAME/accuracy`` or that of a group of its rows."""
    return key.split("/")[2:3] == ["accuracy"]


def is_epoch_written(cfg: DictConfig, best: Any, new_best: Any, *, is_end: bool) -> bool:
    """Whether an epoch has a folder; ``best``, ``new_best``: the best one without and with it, see :func:`update_best`."""
    if cfg.save_best_only and not cfg.save_last_epoch_only:
        return new_best is not best or (is_end and best is None)
    return is_end or not cfg.save_last_epoch_only


def describe_best(best: Mapping[str, Any]) -> str:
    """The metric of the best epoch and its value: ``validation loss 2.5000 nats``."""
    key = next(name for name in best if name != "epoch")
    unit = "" if _is_accuracy(key) else " nats"
    return f"{key.replace('_', ' ')} {best[key]:.4f}{unit}"
