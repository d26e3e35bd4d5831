"""finch's objectives as TorchTitan losses, and ``init: dataset``: the mean loss over the training rows before the first step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, compute_logprobs
from torchtitan.config import CompileConfig
from torchtitan.distributed import utils as dist_utils

from finch.base import files
from finch.base.dtensor import full_tensor, to_local
from finch.base.errors import UserError
from finch.base.log import logger
from finch.data.row_files import local_files
from finch.objectives import DFT, EAFT, IGNORE_INDEX, TALR, Objective

CACHE = "initial_loss.json"
"""In the dump folder: fingerprint and mean loss in nats."""


class ObjectiveLoss(BaseLoss):
    """A reweighted cross-entropy: sum(weight * token loss) / target tokens, with weights from :mod:`finch.objectives`.

    TorchTitan gives a loss the logits and labels of one micro-batch, or of one chunk of it. That is enough for DFT, for EAFT, and for TALR
    with a constant tau. FLOW and STM need the pretrained model's losses, and TALR's other forms the losses of the complete step: finch's
    recipe has them. FINCH follows the unweighted cross-entropy, which is collected here; validation reports it as well.

    Raises UserError if an argument is out of range, or does not belong to the objective.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        objective: Literal["DFT", "TALR", "EAFT"] = "DFT"
        """Which one; `finch.objectives` describes them."""

        tau: float | None = None
        """TALR's temperature in nats."""

        w_min: float = 0.01
        """TALR's least weight of a token."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.objective = build_objective(config)  # not compiled, whatever compile_config says
        self._collected: torch.Tensor | None = None

    def __call__(
        self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The share of these tokens in the step's loss, [] in nats, and no metrics.

        ``pred``: [batch, seq, vocab] logits; ``labels``: [batch, seq], -100 where ignored; ``global_valid_tokens``: [] of the step; without
        it the sum of the unweighted cross-entropy is returned.
        """
        token_loss = -full_tensor(compute_logprobs(pred, labels))
        token_sum = token_loss.detach().sum(dtype=torch.float64)
        if global_valid_tokens is None:
            return token_sum.float(), {}
        if self._collected is None:
            self._collected = torch.zeros_like(token_sum)
        self._collected.add_(token_sum)  # in place, so that a CUDA graph repeats it
        batch = {"labels": labels}
        if "top_logits" in self.objective.needs:
            batch["top_logits"] = full_tensor(pred).detach().topk(EAFT.num_logits).values
        weight = self.objective.weights(token_loss.detach(), batch)
        return (weight * token_loss).sum() / global_valid_tokens, {}

    def read_and_reset(self) -> torch.Tensor:
        """[] fp64, the sum of the unweighted cross-entropy since the last call, in nats."""
        assert self._collected is not None
        result = self._collected.clone()
        self._collected.zero_()
        return result


def inner_loss(config: Any) -> Any:
    """The config of the loss itself, in a ``ChunkedLossWrapper`` or not."""
    return config.loss_fn if isinstance(config, ChunkedLossWrapper.Config) else config


def build_objective(config: ObjectiveLoss.Config) -> Objective:
    """The objective of a config. Raises UserError as :class:`ObjectiveLoss`."""
    if config.objective == "TALR":
        if config.tau is None:
            raise UserError(
                "loss.tau=None: the median of a step's losses, TALR's tau, cannot be known inside TorchTitan's loss; give a number of nats"
            )
        try:
            return TALR(config.tau, config.w_min)
        except ValueError as error:
            raise UserError(f"loss: {error}") from error
    if config.tau is not None:
        raise UserError(f"loss.tau={config.tau} belongs to TALR, and loss.objective={config.objective}; remove it")
    if config.objective not in ("DFT", "EAFT"):
        raise UserError(
            f"loss.objective={config.objective} must be DFT, TALR or EAFT: what the others need is not known inside TorchTitan's loss"
        )
    return DFT() if config.objective == "DFT" else EAFT()


def initial_loss(trainer: Any) -> float:
    """The mean loss of the weights that a run starts from over its training rows, in nats; a collective.

    It is read from the dump folder where an earlier start of the run, with the same weights, rows and settings, has left it.
    """
    config = trainer.config
    file, identity = Path(config.dump_folder) / CACHE, identity_of(config) if trainer.step == 1 else None
    fingerprint = identity and hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    value = _load(file, fingerprint) if fingerprint else None
    missing = torch.tensor(value is None, dtype=torch.int64, device=trainer.device)
    if dist_utils.dist_sum(missing, trainer.parallel_dims.get_optional_mesh("batch")) == 0 and value is not None:
        logger.info(f"mean loss over the training rows before the first step: {value:.4f} nats, from {file}")
        return value
    value = _mean_loss(trainer)
    logger.info(f"mean loss over the training rows before the first step: {value:.4f} nats")
    if fingerprint and torch.distributed.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace_text(file, json.dumps({"fingerprint": fingerprint, "mean_loss": value}) + "\n")
    return value


@torch.no_grad()
def _mean_loss(trainer: Any) -> float:
    """Token-weighted mean cross-entropy in nats, by the trainer's own forward pass in evaluation mode; a collective."""
    dims, [model] = trainer.parallel_dims, trainer.model_parts
    batch_mesh = dims.get_mesh("batch") if dims.dp_enabled else None
    num_tokens_seen = trainer.ntokens_seen
    # In fp64, for a sum over millions of tokens.
    loss_sum, num_targets = torch.zeros(2, dtype=torch.float64, device=trainer.device).unbind()
    model.eval()
    for batch, labels in _each_row_once(trainer, batch_mesh):
        num_targets += (labels != IGNORE_INDEX).sum()
        inputs, labels, options = trainer.post_dataloading_process(batch, labels)
        with trainer.train_context():
            loss, _ = trainer.loss_fn(model(inputs, **options), labels)
        loss_sum += to_local(loss).double()  # a DTensor under tensor parallel
    model.train()
    trainer.ntokens_seen = num_tokens_seen
    targets = dist_utils.dist_sum(num_targets, batch_mesh)
    return dist_utils.dist_sum(loss_sum, dims.get_optional_mesh("loss")) / targets


def _each_row_once(trainer: Any, mesh: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """This rank's batches on the device, with as many as the rank that has most.

    A rank that runs out of them continues with one that has no targets, since FSDP's forward is a collective.
    """
    config = trainer.config
    loader = dataclasses.replace(config.dataloader, infinite=False, num_workers=0).build(
        dp_world_size=1 if mesh is None else mesh.size(),
        dp_rank=0 if mesh is None else mesh.get_local_rank(),
        tokenizer=trainer.tokenizer,
        seq_len=config.training.seq_len,
        local_batch_size=config.training.local_batch_size,
    )
    batches, last = iter(loader), None
    while True:
        batch = next(batches, None)
        has_batch = torch.tensor(batch is not None, dtype=torch.int64, device=trainer.device)
        if dist_utils.dist_sum(has_batch, mesh) == 0:
            return
        if batch is None:
            if last is None:
                raise UserError("dataloader: it has fewer rows than there are data-parallel ranks; use fewer ranks")
            inputs, labels = last[0], torch.full_like(last[1], IGNORE_INDEX)
        else:
            inputs, labels = last = batch
        yield {name: value.to(trainer.device) for name, value in inputs.items()}, labels.to(trainer.device)


def identity_of(config: Any) -> dict[str, Any] | None:
    """What the loss before the first step belongs to: weights, rows, tokenizer, model and precision. None: nothing identifies the weights."""
    checkpoint = config.checkpoint
    weights = checkpoint.initial_load_path or (config.hf_assets_path if checkpoint.initial_load_in_hf else None)
    if not checkpoint.enable or weights is None:
        return None
    paths = [path for folder in sorted({weights, config.hf_assets_path}) for path in sorted(Path(folder).glob("*"))]
    if names := getattr(config.dataloader, "data_files", None):
        paths += local_files(names)
    return {
        "model": [config.model_spec.name, config.model_spec.flavor],
        "dataloader": config.dataloader.to_dict(),
        "seq_len": config.training.seq_len,
        "dtype": [config.training.dtype, config.training.mixed_precision_param],
        "files": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.is_file()],
    }


def _load(file: Path, fingerprint: str) -> float | None:
    content = files.read_object(file)  # none, of other rows or weights, or damaged
    value = content.get("mean_loss") if content.get("fingerprint") == fingerprint else None
    return float(value) if isinstance(value, (int, float)) else None
