"""Whether the disk has room for what a run writes, computed before weights are loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from omegaconf import DictConfig
from torchtune.modules import TransformerDecoder

from finch.errors import UserError
from finch.log import logger
from finch.models.lora import adapter_parameters


def check_disk_room(
    cfg: DictConfig,
    decoder: TransformerDecoder,
    *,
    dtype: torch.dtype | None,
    freed_bytes: int = 0,
    first_epoch: int = 0,
) -> None:
    """Checks that the weights of one epoch fit; warns if those of all epochs that are written and a checkpoint do not.

    Args:
        cfg: a recipe's config.
        decoder: may be on the meta device.
        dtype: of the exported weights; None: as they are.
        freed_bytes: of an earlier run that is removed before anything is written.
        first_epoch: from 0; those before it are written already.

    Raises:
        UserError: the weights of one epoch do not fit.
    """
    folder, adapter_only = Path(cfg.output_dir), cfg.get("save_adapter_weights_only", False)
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free + freed_bytes
    needed = exported_bytes(decoder, dtype, adapter_only=adapter_only)
    if free < needed:
        raise UserError(
            f"output_dir={folder} has {free:,} bytes of free disk, the weights of one epoch need {needed:,}; make room, or give a "
            "folder on a larger disk"
        )
    trained = sum(weight.numel() * weight.itemsize for weight in decoder.parameters() if weight.requires_grad)
    epochs = num_exports(cfg, first_epoch)
    total = epochs * needed + trained
    if free < total:
        names, advice = (
            ("one epoch", "") if epochs == 1 else (f"{epochs} epochs", "; save_last_epoch_only=True writes one")
        )
        logger.warning(
            f"output_dir={folder} has {free:,} bytes of free disk; the weights of {names} and a checkpoint need more than {total:,}{advice}"
        )


def num_exports(cfg: DictConfig, first_epoch: int = 0) -> int:
    """Epochs from ``first_epoch`` on whose weights a run writes."""
    return 1 if cfg.save_last_epoch_only else int(cfg.epochs) - first_epoch


def exported_bytes(decoder: TransformerDecoder, dtype: torch.dtype | None, *, adapter_only: bool = False) -> int:
    """Bytes of the weights that an epoch exports: with LoRA the adapter and, unless ``adapter_only``, the merged model."""
    adapters = adapter_parameters(decoder)
    exported = adapters if adapter_only else decoder.state_dict()
    return sum(weight.numel() * (dtype or weight.dtype).itemsize for weight in exported.values())
