"""finch's objectives as TorchTitan losses, and ``init: dataset``: the mean loss over the training rows before the first step."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, compute_logprobs
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig
from torchtitan.distributed import utils as dist_utils

from finch import files
from finch.dtensor import full_tensor, to_local
from finch.errors import UserError
from finch.log import logger
from finch.objectives import DFT, EAFT, IGNORE_INDEX, TALR, Objective

CACHE = "initial_loss.json"
"""In the dump folder: fingerprint and mean loss in nats."""


class ObjectiveLoss(BaseLoss):
    """A reweighted cross-entropy: sum(weight * token loss) / target tokens, with weights from :mod:`finch.objectives`.

    TorchTitan gives a loss the logits and labels of one micro-batch, or of one chunk of it. That is enough for DFT, for EAFT, and for TALR
    with a constant tau. FLOW and STM need the pretrained model's losses, and TALR's other forms the losses of the complete step: finch's
    recipe has them. FINCH follows the unweighted cross-entropy, which is collected here; validation reports it as well.

    Raises:
        UserError: an argument is out of range, or does not belong to the objective.
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
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The share of these tokens in the step's loss.

        Args:
            pred: [batch, seq, vocab] logits.
            labels: [batch, seq], -100 where ignored.
            global_valid_tokens: [] of the step; None: the sum of the unweighted cross-entropy is returned.

        Returns:
            [] in nats, and no metrics.
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


def build_objective(config: ObjectiveLoss.Config) -> Objective:
    """
    Raises:
        UserError: see :class:`ObjectiveLoss`.
    """
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


def objective_of(loss: BaseLoss) -> ObjectiveLoss | None:
    """The ObjectiveLoss that a loss is, or applies to its chunks."""
    inner = loss.loss_fn if isinstance(loss, ChunkedLossWrapper) else loss
    return inner if isinstance(inner, ObjectiveLoss) else None


class DatasetLoss(Validator):
    """One pass over the rows of a dataloader with TorchTitan's forward pass, each row once, summed in fp64.

    TorchTitan's ``validate`` sums in fp32, and waits for ever where ranks have unequal numbers of batches. Here a rank that runs out of
    them continues with one that has no targets, since FSDP's forward is a collective.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    @torch.no_grad()
    def mean(self, model_parts: list[nn.Module], device: torch.device) -> float:
        """Token-weighted mean cross-entropy in nats; a collective.

        Raises:
            UserError: no row has a target.
        """
        for part in model_parts:
            part.eval()
        batch_mesh = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        loss_sum, num_targets = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        for batch, labels in self._batches(device, batch_mesh):
            num_targets += (labels != IGNORE_INDEX).sum()
            inputs, labels, options = self.post_dataloading_process(batch, labels, model_parts)
            with self.validation_context():
                loss, _ = self.loss_fn(model_parts[0](inputs, **options), labels)
            loss_sum += to_local(loss).double()  # a DTensor under tensor parallel
        targets = dist_utils.dist_sum(num_targets, batch_mesh)
        total = dist_utils.dist_sum(loss_sum, self.parallel_dims.get_optional_mesh("loss"))
        for part in model_parts:
            part.train()
        if targets == 0:
            raise UserError(
                "dataloader: no row has a target token within training.seq_len; raise it, or check the template"
            )
        return total / targets

    def _batches(self, device: torch.device, mesh: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """This rank's batches on the device, with as many as the rank that has most."""
        loader = self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        batches, last = iter(loader), None
        while True:
            batch = next(batches, None)
            has_batch = torch.tensor(batch is not None, dtype=torch.int64, device=device)
            if dist_utils.dist_sum(has_batch, mesh) == 0:
                return
            if batch is None:
                if last is None:
                    raise UserError("dataloader: it has fewer rows than there are data-parallel ranks; use fewer ranks")
                inputs, labels = last[0], torch.full_like(last[1], IGNORE_INDEX)
            else:
                inputs, labels = last = batch
            yield {name: value.to(device) for name, value in inputs.items()}, labels.to(device)


def initial_loss(trainer: Any) -> float:
    """The mean loss of the weights that a run starts from over its training rows, in nats; a collective.

    It is read from the dump folder where an earlier start of the run, with the same weights, rows and settings, has left it.

    Args:
        trainer: a FinchTrainer whose weights are loaded.

    Raises:
        UserError: the dataloader cannot end, or has no target.
    """
    config, dims = trainer.config, trainer.parallel_dims
    if not hasattr(config.dataloader, "infinite"):
        raise UserError(
            f"lr_scheduler.init=dataset needs a dataloader that can end, and {type(config.dataloader).__qualname__} has no field infinite; "
            "set init to first_batch or a number of nats"
        )
    file, identity = Path(config.dump_folder) / CACHE, identity_of(config) if trainer.step == 1 else None
    fingerprint = identity and hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    value = _load(file, fingerprint) if fingerprint else None
    missing = torch.tensor(value is None, dtype=torch.int64, device=trainer.device)
    if dist_utils.dist_sum(missing, dims.get_optional_mesh("batch")) == 0 and value is not None:
        logger.info(f"mean loss over the training rows before the first step: {value:.4f} nats, from {file}")
        return value
    ranks = dims.get_mesh("batch") if dims.dp_enabled else None
    dataset_loss = DatasetLoss.Config(
        steps=-1, dataloader=dataclasses.replace(config.dataloader, infinite=False, num_workers=0)
    ).build(
        parallelism=config.parallelism,
        dp_world_size=1 if ranks is None else ranks.size(),
        dp_rank=0 if ranks is None else ranks.get_local_rank(),
        tokenizer=trainer.tokenizer,
        parallel_dims=dims,
        loss_fn=trainer.loss_fn,
        validation_context=trainer.train_context,
        metrics_processor=trainer.metrics_processor,
        seq_len=config.training.seq_len,
        local_batch_size=config.training.local_batch_size,
    )
    value = dataset_loss.mean(trainer.model_parts, trainer.device)
    logger.info(f"mean loss over the training rows before the first step: {value:.4f} nats")
    if fingerprint and torch.distributed.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_file(file) as partial:
            files.write_text(partial, json.dumps({"fingerprint": fingerprint, "mean_loss": value}) + "\n")
    return value


def identity_of(config: Any) -> dict[str, Any] | None:
    """What the loss before the first step belongs to: weights, rows, tokenizer, model and precision. None: nothing identifies the weights.

    Args:
        config: a ``FinchTrainer.Config``.
    """
    checkpoint = config.checkpoint
    weights = checkpoint.initial_load_path or (config.hf_assets_path if checkpoint.initial_load_in_hf else None)
    if not checkpoint.enable or weights is None:
        return None
    paths = [path for folder in sorted({weights, config.hf_assets_path}) for path in sorted(Path(folder).glob("*"))]
    if names := getattr(config.dataloader, "data_files", None):
        paths += map(Path, sorted(glob.glob(names)))
    return {
        "model": [config.model_spec.name, config.model_spec.flavor],
        "dataloader": config.dataloader.to_dict(),
        "seq_len": config.training.seq_len,
        "dtype": [config.training.dtype, config.training.mixed_precision_param],
        "files": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.is_file()],
    }


def _load(file: Path, fingerprint: str) -> float | None:
    try:
        content = json.loads(file.read_text())
        return float(content["mean_loss"]) if content["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):  # none, of other rows or weights, or damaged
        return None
