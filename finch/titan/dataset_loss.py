"""``init: dataset``: the mean loss over the training rows before the first step, kept in the run's folder."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator
from torchtitan.distributed import utils as dist_utils

from finch import files
from finch.dtensor import to_local
from finch.errors import UserError
from finch.log import logger

CACHE = "initial_loss.json"
"""In the dump folder: fingerprint and mean loss in nats."""


class DatasetLoss(Validator):
    """One pass over the rows of a dataloader with TorchTitan's forward pass, each row once.

    Ranks that run out of batches continue with one that has no targets, since FSDP's forward is a collective.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
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
        # [sum of losses, target tokens]; fp64, for a sum over millions of tokens.
        loss_sum, num_targets = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        for batch, labels in self._batches(device, batch_mesh):
            num_targets += (labels != IGNORE_INDEX).sum()
            inputs, labels, options = self.post_dataloading_process(batch, labels, model_parts)
            with self.validation_context():
                loss, _ = self.loss_fn(model_parts[0](inputs, **options), labels)
            loss_sum += to_local(loss).double()  # a DTensor under tensor parallel
        loss_mesh = self.parallel_dims.get_optional_mesh("loss")
        targets = dist_utils.dist_sum(num_targets, batch_mesh)
        total = dist_utils.dist_sum(loss_sum, loss_mesh)
        for part in model_parts:
            part.train()
        if targets == 0:
            raise UserError(
                "dataloader: no row has a target token within training.seq_len; raise it, or check the template"
            )
        return total / targets

    def _batches(self, device: torch.device, mesh: Any) -> Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]:
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
    config = trainer.config
    if not hasattr(config.dataloader, "infinite"):
        raise UserError(
            f"lr_scheduler.init=dataset needs a dataloader that can end, and {type(config.dataloader).__qualname__} has no field infinite; "
            "set init to first_batch or a number of nats"
        )
    file, fingerprint = Path(config.dump_folder) / CACHE, _fingerprint(trainer)
    value = _load(file, fingerprint) if fingerprint else None
    missing = torch.tensor(value is None, dtype=torch.int64, device=trainer.device)
    world = trainer.parallel_dims.get_optional_mesh("batch")
    if dist_utils.dist_sum(missing, world) == 0 and value is not None:
        logger.info(f"mean loss over the training rows before the first step: {value:.4f} nats, from {file}")
        return value
    pass_config = DatasetLoss.Config(
        steps=-1, dataloader=dataclasses.replace(config.dataloader, infinite=False, num_workers=0)
    )
    dims = trainer.parallel_dims
    ranks = dims.get_mesh("batch") if dims.dp_enabled else None
    dataset_loss = pass_config.build(
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


def _load(file: Path, fingerprint: str) -> float | None:
    try:
        content = json.loads(file.read_text())
        return float(content["mean_loss"]) if content["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):  # none, of other rows or weights, or damaged
        return None


def _fingerprint(trainer: Any) -> str | None:
    """A digest of what the loss belongs to; None: nothing identifies the weights."""
    content = None if trainer.step > 1 else identity_of(trainer.config)
    return None if content is None else hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
