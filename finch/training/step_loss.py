"""What a training step differentiates: an objective's weighted token losses, the KL penalty and the regularizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.modules import TransformerDecoder

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.instantiate import build
from finch.data.loader import Batch, model_inputs
from finch.data.training_data import TrainingData
from finch.distributed.parallel import Parallel
from finch.objectives import EAFT, CrossEntropy, Objective, median
from finch.training import readouts
from finch.training.chunked_loss import TokenLoss
from finch.training.config_checks import is_objective
from finch.training.kl_penalty import KLPenalty
from finch.training.one_pass_loss import Weighting
from finch.training.optimizer import uses_dataset_init
from finch.training.reference import ReferenceLossCache, ReferenceLosses
from finch.training.self_replay import SelfReplay
from finch.weights.huggingface import PretrainedFolder

NUM_CHUNKS = 8
"""In how many chunks an objective's logits are computed; torchtune's default for its chunked cross-entropy."""


class StepLoss:
    """Objective, TALR's median, KL penalty, self-replay and regularizer of a run.

    A step calls :meth:`counts`, :meth:`start`, the loss of each micro-batch, :meth:`add_gradients` and :meth:`finish`, in this order.

    Attributes:
        num_chunks: in how many chunks logits are computed.
        kl_penalty, replay: each does nothing without its block in the config.
        reference: the pretrained model's losses on the training rows, once :meth:`prepare` has run; None: not needed.

    Raises UserError if a setting is out of its range.
    """

    def __init__(
        self, cfg: DictConfig, decoder: TransformerDecoder, parallel: Parallel, scalars: dict[str, Any] | None = None
    ) -> None:
        self._parallel = parallel
        self.objective, self.num_chunks = build_objective(cfg)
        self.median = StepMedian(self.objective, parallel, cfg.gradient_accumulation_steps, scalars or None)
        self.kl_penalty = KLPenalty(cfg, decoder, parallel)
        self.replay = SelfReplay(cfg, decoder, parallel)
        self.regularizer = None if cfg.regularizer is None else build(cfg.regularizer, "regularizer")
        self._is_weighted_by_reference = "pretrained_token_loss" in self.objective.needs
        # Of a resumed run the EMA comes from the checkpoint.
        self._needs_losses = self._is_weighted_by_reference or (not scalars and uses_dataset_init(cfg))
        # Reference losses are cached under the digest of the rows.
        self.needs_stats = self._is_weighted_by_reference or uses_dataset_init(cfg) or self.kl_penalty.is_cached
        self._cache: ReferenceLossCache | None = None
        self.reference: ReferenceLosses | None = None

    def model_options(self) -> dict[str, Any]:
        """What :meth:`finch.training.loaded_model.LoadedModel.parallelize` has to know of the loss."""
        return {"num_chunks": self.num_chunks, "has_reference": self.kl_penalty.has_reference}

    def load_caches(self, cfg: DictConfig, base: PretrainedFolder, data: TrainingData, run: Path) -> bool:
        """Reads what an earlier start has computed with the pretrained model; a collective.

        Returns whether :meth:`prepare` needs the pretrained weights, also in a run that is resumed.
        """
        if self._needs_losses:
            self._cache = ReferenceLossCache(cfg, base, data, run)
            self.reference = self._cache.load(self._parallel)
        self.kl_penalty.load_cache(cfg, base, data, run)
        self.replay.load_cache(base)
        # All caches are read before the answer: each reading is a collective, which no rank may leave out.
        has_losses = not self._needs_losses or self.reference is not None
        terms_need = self.kl_penalty.needs_pretrained or self.replay.needs_pretrained
        return not has_losses or self.regularizer is not None or terms_need

    def prepare(self, model: TokenLoss, data: TrainingData) -> None:
        """Computes with the pretrained weights what is missing of their outputs and gives it to the objective; a collective.

        Raises UserError if the objective would have nothing to learn.
        """
        self.kl_penalty.prepare(model, data)
        self.replay.prepare(model)
        if self._cache is not None and self.reference is None:
            self.reference = self._cache.compute(model)
        if self.median.mode is not None:
            which = "the step before" if self.median.mode == "lagged" else "the step"
            name = type(self.objective).__name__
            logger.info(f"{name}: tau is the median sequence loss of {which} ({self.median.mode})")
        if self.reference is not None and self._is_weighted_by_reference:
            data.samples.reference_losses = self.reference.row
            try:
                logger.info(self.objective.prepare(self.reference.losses, self.reference.sequence_losses))
            except ValueError as error:
                raise UserError(f"loss: {error}") from error
        if self.regularizer is not None:
            self.regularizer.start(model.trained_parameters().items())

    def steps(self, data: TrainingData, epoch: int, consumed: int) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step of an epoch after its first ``consumed`` samples, on the host, with all that the loss needs."""
        batches = data.batches(epoch, consumed, self.replay.rows)
        batches = self.kl_penalty.add_to(batches, data, epoch, consumed)
        order = data.order
        for start in range(consumed, order.samples_in(data.steps_per_epoch), order.global_batch):
            yield list(itertools.islice(batches, order.micro_batches_in_step(start)))

    def counts(self, batches: Sequence[Batch]) -> torch.Tensor:
        """[2] fp64 on the host: this rank's target tokens of a step, and what the objective divides by (the same except for STM)."""
        num_targets = sum(batch["targets"].numel() for batch in batches)
        num_counted = sum(self.objective.count(batch) for batch in batches)
        # A copy to the device from pageable memory would make the host wait.
        pin_memory = self._parallel.device.type == "cuda"
        return torch.tensor([num_targets, num_counted], dtype=torch.float64, pin_memory=pin_memory)

    def start(self, model: TokenLoss, batches: Sequence[Batch], targets: torch.Tensor) -> None:
        """Called before the first forward of a step with this rank's micro-batches and ``targets`` [], the target tokens of the step.

        A collective where the objective needs the step's median.
        """
        self.kl_penalty.start_step(targets)
        self.replay.start_step()
        self.median.before_step(batches, lambda batch: model(model_inputs(batch))["loss"])

    def __call__(self, model: TokenLoss, batch: Batch, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward pass of a micro-batch; ``scale`` [] multiplies the weighted sum of the token losses.

        Returns [batch, seq] token losses in nats, detached; and [] the micro-batch's share of what is differentiated, with its graph.
        """
        is_known = self.median.add_to(batch)

        def weights(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
            if not is_known:  # this forward pass decides it
                self.median.observe(outputs["loss"], batch)
            return self.objective.weights(outputs["loss"], {**batch, **outputs})

        weighting = Weighting(weights, self.objective.is_elementwise and is_known, scale, self.kl_penalty.scale)
        read = self.kl_penalty.readouts(model, batch)
        if "top_logits" in self.objective.needs:
            read = [readouts.top_logits(EAFT.num_logits), *read]
        outputs = model(model_inputs(batch), read, weighting, self.replay.readout(batch))
        # Not within `weights`: an elementwise objective calls it with each chunk, while later losses are still 0.
        if is_known:
            self.median.observe(outputs["loss"], batch)
        self.kl_penalty.observe(outputs)
        return outputs["loss"], self.replay.add_to(outputs["total"], outputs, batch)

    def add_gradients(self) -> dict[str, torch.Tensor]:
        """Adds the regularizer's gradient after the last backward; returns its norm, []."""
        return {} if self.regularizer is None else self.regularizer.add_gradients()

    def finish(self) -> None:
        """Called once the step's losses are known."""
        self.median.after_step()

    def metrics(self) -> dict[str, Any]:
        """``tau``, ``kl`` and ``replay_kl`` of the step in nats, where the run has them; a collective."""
        return {**self.kl_penalty.metrics(), **self.replay.metrics(), **self.median.metrics()}

    def state_dict(self) -> dict[str, Any]:
        return {"median": self.median.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.median.last = state["median"]


def build_objective(cfg: DictConfig) -> tuple[Objective, int]:
    """The objective, and in how many chunks its logits are computed. Every cross-entropy of torchtune's is ``CrossEntropy``."""
    loss = build(cfg.loss, "loss")
    if is_objective(cfg):
        return loss, NUM_CHUNKS
    num_chunks = getattr(loss, "num_output_chunks", 1)
    # A KL divergence needs several tensors as large as the logits: they are never kept for the backward.
    has_kl = cfg.kl_penalty is not None or cfg.self_replay is not None
    return CrossEntropy(), NUM_CHUNKS if num_chunks == 1 and has_kl else num_chunks


class StepMedian:
    """TALR's tau: puts the median of the step, over all micro-batches and ranks, into ``batch["statistic"]`` where the objective declares one.

    ``exact`` is this step's median. With several micro-batches each forward then runs a second time, without gradients,
    since the median is needed before the first backward. ``lagged`` is the last finite median of an earlier step and
    costs one gathering of the losses; the first step has none and uses its own. ``auto`` is exact with one micro-batch; in a resumed run
    it stays what it was. Either way the host reads the device at each step.

    Attributes:
        last: the last finite median in nats, or None; part of the checkpoint.
        mode: None, ``"exact"`` or ``"lagged"``.
    """

    def __init__(
        self, objective: Objective, parallel: Parallel, micro_batches: int = 1, resumed: dict[str, Any] | None = None
    ) -> None:
        self._objective, self._parallel = objective, parallel
        self.mode = objective.statistic
        if self.mode == "auto":
            is_exact = micro_batches == 1 if resumed is None else resumed["median"] is None
            self.mode = "exact" if is_exact else "lagged"
        self.last: float | None = None
        self._value: float | None = None
        self._used: float | None = None
        self._losses: list[torch.Tensor] = []

    def before_step(self, batches: Sequence[Batch], token_losses: Callable[[Batch], torch.Tensor]) -> None:
        """Computes the median before the first backward, where the objective needs it then; ``token_losses`` is the forward, [batch, seq] in nats."""
        self._losses = []
        self._value = self.last if self.mode == "lagged" else None
        # One micro-batch needs no second forward: the median is taken between its forward and its backward.
        if self.mode is not None and self._value is None and len(batches) > 1:
            with torch.no_grad():
                losses = [self._objective.sequence_losses(token_losses(batch), batch) for batch in batches]
            self._value = self._median(losses)

    def add_to(self, batch: Batch) -> bool:
        """Sets ``batch["statistic"]`` where it is known before the forward pass. Returns whether the objective then has all it needs."""
        if self._value is not None:
            batch["statistic"] = torch.tensor(self._value, dtype=torch.float64)
        return self.mode is None or self._value is not None

    def observe(self, token_loss: torch.Tensor, batch: Batch) -> None:
        """Records a micro-batch's losses, [batch, seq] in nats, and sets ``batch["statistic"]``, [] in nats."""
        if self.mode is None:
            return
        self._losses.append(self._objective.sequence_losses(token_loss, batch))
        self._used = self._median(self._losses) if self._value is None else self._value
        batch["statistic"] = torch.tensor(self._used, dtype=torch.float64)

    def metrics(self) -> dict[str, float]:
        """What a training log holds of a step: the median that its weights used, ``tau`` in nats."""
        return {} if self._used is None else {"tau": self._used}

    def after_step(self) -> None:
        if self.mode == "lagged":
            value = self._median(self._losses)
            # A NaN would decide every weight of the next step.
            self.last = value if math.isfinite(value) else self.last

    def _median(self, losses: list[torch.Tensor]) -> float:
        # A median of medians would be another number: all ranks need all losses.
        losses_of_ranks = self._parallel.gather(torch.cat(losses).double().cpu())
        return float(median(torch.cat(losses_of_ranks)))
