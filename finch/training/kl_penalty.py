"""The KL penalty of a run: its block of the config, the pretrained model it needs, its term of the loss and its line in the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig
from torchtune.modules import TransformerDecoder

from finch.base import run_files
from finch.base.dtensor import to_local
from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.instantiate import build, component_of
from finch.data.loader import REFERENCES, Batch
from finch.data.training_data import TrainingData
from finch.distributed.parallel import Parallel
from finch.models.lora import adapter_layers
from finch.objectives.regularization import KL
from finch.training.chunked_loss import TokenLoss
from finch.training.readouts import Readout, kl_from, kl_from_pretrained
from finch.training.reference import ReferenceFile, ReferenceTopK, compute_reference_top_k
from finch.weights.huggingface import PretrainedFolder


def build_kl(cfg: DictConfig) -> KL | None:
    """The settings under ``kl_penalty``; None without the block. Raises UserError if an argument is out of its range, or the component is
    another one."""
    if cfg.kl_penalty is None:
        return None
    settings = build(cfg.kl_penalty, "kl_penalty")
    if not isinstance(settings, KL):
        raise UserError(
            f"kl_penalty._component_={component_of(cfg.kl_penalty)} is not finch.regularization.KL; set it to that, or kl_penalty to null"
        )
    return settings


def needs_reference(settings: KL | None, decoder: TransformerDecoder) -> bool:
    """Whether a frozen copy of the pretrained model is needed; with LoRA the decoder without its adapters is that model."""
    return settings is not None and settings.is_online and not adapter_layers(decoder)


class KLPenalty:
    """strength * mean of the token KL over a step's target tokens; does nothing without the config's block.

    The mean is over all target tokens, also with an objective that has another denominator (STM).

    Attributes:
        is_cached: whether the pretrained model's distributions are computed once, before training.
        has_reference: whether the model needs a frozen copy of the pretrained one.

    Raises UserError if a setting is out of its range.
    """

    def __init__(self, cfg: DictConfig, decoder: TransformerDecoder, parallel: Parallel) -> None:
        self._settings, self._parallel = build_kl(cfg), parallel
        self.is_cached = self._settings is not None and not self._settings.is_online
        self.has_reference = needs_reference(self._settings, decoder)
        self._targets = self._sum = torch.zeros((), dtype=torch.float64)
        self._cache: ReferenceFile | None = None
        self._top_k: ReferenceTopK | None = None
        vocabulary = decoder.tok_embeddings.weight.shape[0]
        if self._settings is not None and self.is_cached and self._settings.top_k > vocabulary:
            raise UserError(
                f"kl_penalty.top_k={self._settings.top_k} is above the model's vocabulary of {vocabulary} tokens; give at most that"
            )

    @property
    def needs_pretrained(self) -> bool:
        """Whether the pretrained weights must be loaded, also in a run that is resumed."""
        return self._settings is not None and self._top_k is None

    def load_cache(self, cfg: DictConfig, base: PretrainedFolder, data: TrainingData, run: Path) -> None:
        """Reads cached distributions, if an earlier start has computed them; a collective."""
        if self._settings is None or not self.is_cached:
            return
        path, top_k = run / run_files.REFERENCE_TOP_K, self._settings.top_k
        self._cache = ReferenceFile.of_training_rows(path, cfg, base, data, top_k=top_k)
        if self._load(self._cache):
            logger.info(f"the pretrained model's most likely tokens are read from {path}")

    def prepare(self, model: TokenLoss, data: TrainingData) -> None:
        """Computes what is cached and not there yet, with the pretrained weights, and logs what the reference costs on this rank; a collective."""
        if self._settings is None:
            return
        start = f"KL penalty {self._settings.strength:g} x the mean token KL from the pretrained model:"
        if self._cache is not None:
            if self._top_k is None:
                self._compute(model, data, self._settings.top_k, self._cache)
            reference = f"{self._settings.top_k} cached tokens and the rest as one, a lower bound"
        elif model.reference is None:
            reference = "the model without its adapters, a second forward pass and no further weights"
        else:
            weights = model.reference.parameters()
            size = sum(to_local(weight).numel() * weight.element_size() for weight in weights)
            reference = f"a second forward pass, and {size / 1e6:,.1f} MB of frozen weights on each rank"
        logger.info(f"{start} {reference}")

    def _load(self, cache: ReferenceFile) -> bool:
        """Takes what the cache holds; a collective."""
        tensors = cache.load(self._parallel)
        self._top_k = None if tensors is None else ReferenceTopK(**tensors)
        return self._top_k is not None

    def _compute(self, model: TokenLoss, data: TrainingData, top_k: int, cache: ReferenceFile) -> None:
        """Computes the pretrained model's distributions and saves them; a collective."""
        start = time.perf_counter()
        loader = data.eval_loader(
            data.samples, "pretrained model's most likely tokens on the training rows", is_once=True
        )
        computed = compute_reference_top_k(model, loader, top_k)
        if self._parallel.is_rank_zero:
            cache.save(vars(computed))
        self._parallel.all_true(True)  # the others read what is complete
        size = (computed.log_probs.nbytes + computed.tokens.nbytes) / 1e6
        logger.info(
            f"pretrained model's {top_k} most likely tokens at {len(computed.log_probs):,} target tokens: {size:,.1f} MB in "
            f"{cache.path} ({time.perf_counter() - start:.1f} s)"
        )
        if not self._load(cache):  # else the ranks of a machine share the file's pages
            self._top_k = computed

    def add_to(self, batches: Iterator[Batch], data: TrainingData, epoch: int, consumed: int) -> Iterator[Batch]:
        """This rank's micro-batches of an epoch after its first ``consumed`` samples, with the distributions that are cached."""
        if self._top_k is None:
            return batches
        # From the order that also deals the samples: neither dataset nor collator has to know of distributions.
        rows = data.order.micro_batches(self._parallel.data_parallel_rank, epoch, consumed)
        return (self._top_k.add_to(*each) for each in zip(batches, rows, strict=True))

    def readouts(self, model: TokenLoss, batch: Batch) -> list[Readout]:
        """The token KL of a micro-batch; nothing where no gradient is computed."""
        if self._settings is None or not torch.is_grad_enabled():
            return []
        return [kl_from(*map(batch.__getitem__, REFERENCES)) if self.is_cached else kl_from_pretrained(model)]

    def start_step(self, targets: torch.Tensor) -> None:
        """``targets``: [], the number of target tokens of the step, over all ranks and micro-batches."""
        # A step may have no target at all; its sum is then 0.
        self._targets, self._sum = targets.clamp(min=1), torch.zeros_like(targets)

    @property
    def scale(self) -> torch.Tensor | None:
        """[] what a micro-batch's sum of the token KL is multiplied by, FSDP2's mean over ranks undone; None: it is not differentiated."""
        if self._settings is None or self._settings.strength == 0:
            return None
        return self._settings.strength * self._parallel.data_parallel_size / self._targets

    def observe(self, outputs: dict[str, torch.Tensor]) -> None:
        """Records a micro-batch's divergence, ``outputs["kl"]`` [batch, seq] in nats."""
        if self._settings is not None:
            self._sum += outputs["kl"].sum(dtype=torch.float64)

    def metrics(self) -> dict[str, torch.Tensor]:
        """``kl``: [] the step's mean token KL in nats, over all ranks; a collective."""
        if self._settings is None:
            return {}
        return {"kl": self._parallel.all_reduce_sum_(self._sum) / self._targets}
