"""The rows a run trains and validates on, checked and ordered."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.instantiate import locate
from finch.data.dataset import Samples, load_dataset, row_lengths
from finch.data.loader import Batch, EvalLoader, EvalSettings, collator, load_batches
from finch.data.mixture import mix
from finch.data.order import GlobalOrder
from finch.data.prompts import context_limit
from finch.data.replay import Replay, WithReplay
from finch.data.row_files import file_errors, validation_sets
from finch.data.stats import Fit, describe_trained, name_rows, validate_dataset
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel


class TrainingData:
    """The rows of a run, read and ordered. ``needs_stats``: read every row even with ``check_dataset=False``; ``fit``: see there.

    Attributes:
        samples: the training rows.
        validations: the held-out sets, by the name of their loss in the metrics; see :func:`validation_sets`.
        mixture: how the datasets of ``samples`` are mixed; None: an epoch is every row once.
        order: how ``samples`` are distributed over steps and ranks, by tokens where the rows were read (``check_dataset``, or ``needs_stats``).
            A run that is resumed with another ``check_dataset`` has the same samples in each step, not the same bits.
        collator: from samples to what makes a batch of their rows.
        eval_settings: for rows that are none of these, such as a probe's.
        stats: of the training rows that the run draws; None: they have not been read.

    Raises UserError for rows that cannot be used, or fewer than one optimizer step needs.
    """

    def __init__(
        self,
        cfg: DictConfig,
        tokenizer: Any,
        parallel: Parallel,
        *,
        seed: int,
        needs_stats: bool,
        fit: Fit = lambda key, stats: None,
    ) -> None:
        self._cfg, self._parallel = cfg, parallel
        # All files first: to tokenize the training rows can take long, and the validation file may be missing.
        for _, error in file_errors(cfg):
            raise error
        self.samples = load_dataset(cfg, "dataset", tokenizer)
        sets = validation_sets(cfg.dataset_validation).items()
        self.validations = {name: load_dataset({key: node}, key, tokenizer) for name, (key, node) in sets}
        for each in (self.samples, *self.validations.values()):
            each.check_ranks(parallel)
        self.mixture = mix(cfg, self.samples, seed)
        if self.mixture is not None:
            logger.info(f"dataset: {self.mixture.describe([source for _, source in self.samples.parts])}")
        number = len(self.samples) if self.mixture is None else self.mixture.num_samples
        options = {"shuffle": cfg.shuffle, "seed": seed, "indices": self.mixture and self.mixture.indices}
        self.order = GlobalOrder.of(cfg, number, parallel.data_parallel_size, **options)
        self._check_sizes()
        collate = locate(cfg.collate_fn, "collate_fn")
        self.collator = functools.partial(collator, tokenizer=tokenizer, collate=collate)
        self.eval_settings = EvalSettings(parallel, self.collator, cfg.batch_size)
        max_seq_len = context_limit(None, tokenizer)
        is_read = cfg.check_dataset or needs_stats
        self.stats = validate_dataset(self.samples, max_seq_len, parallel, fit) if is_read else None
        if not is_read and (warning := fit("dataset", None)):
            logger.warning(warning)
        read = self.validations.values() if cfg.check_dataset else ()
        self.validation_digest = 0
        for each in read:
            self.validation_digest += validate_dataset(each, max_seq_len, parallel, fit).digest
            if known := describe_trained(each, self.samples):
                logger.warning(f"{each.key}: {known}")
        if not self.samples.packed:  # packs are full
            self.order = replace(self.order, lengths=self.samples.lengths)
        watchdog.heartbeat()
        logger.info(
            f"{self.order.num_samples} samples; {self.order.global_batch} per optimizer step, {self.order.steps_per_epoch} steps per epoch"
        )

    @property
    def steps_per_epoch(self) -> int:
        return min(self.order.steps_per_epoch, self._cfg.max_steps_per_epoch or self.order.steps_per_epoch)

    def rows_of(self, step: int) -> str:
        """The rows of the task in an optimizer step, which counts from 1, by their numbers."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        batch = self.order.permutation(epoch)[place * self.order.global_batch :][: self.order.global_batch]
        rows = {self.samples.row(i, n) for i in batch for n in range(len(row_lengths(self.samples.arrays(i))))}
        return name_rows(sorted(rows), len(rows))

    def batches(self, epoch: int, consumed: int, replay: Replay | None = None) -> Iterator[Batch]:
        """This rank's micro-batches of an epoch after its first ``consumed`` samples, on the host.

        Those of a step with ``replay`` have ``num_replayed``, [] fp64: the replayed tokens of the step, over all ranks.
        """
        rank, samples = self._parallel.data_parallel_rank, self.samples
        collate = self.collator(samples)
        options: dict[str, Any] = {"num_workers": self._num_workers(samples)}
        options["pin_memory"] = self._parallel.device.type == "cuda"
        if replay is None:
            return load_batches(samples, list(self.order.micro_batches(rank, epoch, consumed)), collate, **options)
        dealt = list(replay.deal(self.order, self.steps_per_epoch, rank, epoch, consumed))
        rows = [task + [len(samples) + row for row in replayed] for task, replayed, _ in dealt]
        batches = load_batches(WithReplay(samples, replay.samples), rows, collate, **options)
        counts = (torch.tensor(number, dtype=torch.float64) for *_, number in dealt)
        return ({**batch, "num_replayed": number} for batch, number in zip(batches, counts, strict=True))

    def eval_loader(self, samples: Samples, title: str, *, is_once: bool = False) -> EvalLoader:
        """One pass over all rows of ``samples``; ``is_once``: over those that are equal once."""
        return EvalLoader(
            samples,
            self.collator(samples),
            self._parallel,
            self._cfg.batch_size,
            num_workers=self._num_workers(samples),
            title=title,
            is_once=is_once,
        )

    def _num_workers(self, samples: Samples) -> int:
        # torchtune builds the block mask of packed rows on the GPU while it collates, which a forked worker cannot.
        return 0 if samples.packed and torch.cuda.is_available() else self._cfg.num_workers

    def _check_sizes(self) -> None:
        self.order.check()
        packed = any(samples.packed for samples in (self.samples, *self.validations.values()))
        if packed and self._parallel.device.type == "cpu" and torch.cuda.is_available():
            raise UserError(
                "dataset.packed=True with device=cpu: torchtune builds the mask of packed rows on the GPU where there is one; use device=cuda, "
                "or hide the GPU with CUDA_VISIBLE_DEVICES="
            )
