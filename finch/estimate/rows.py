"""Micro-batches of made-up rows: an estimate needs their lengths alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from finch.config.instantiate import locate
from finch.data.loader import Batch, collator
from finch.objectives import IGNORE_INDEX, Objective
from finch.training.kl_penalty import build_kl

TOFU_TOKENS, TOFU_TARGETS = 85, 37
"""Mean tokens and target tokens of a TOFU row with SmolLM2's chat template."""


@dataclass(frozen=True)
class Rows:
    """
    Attributes:
        seq: tokens of each row.
        targets: target tokens of each row, its last ones.
    """

    seq: int = TOFU_TOKENS
    targets: int = TOFU_TARGETS


@dataclass(frozen=True)
class _Source:
    """Stands for the samples and the tokenizer in :func:`finch.data.loader.collator`."""

    packed: bool = False
    pad_id: int = 0


def micro_batch(cfg: DictConfig, rows: Rows, objective: Objective, vocab_size: int) -> Batch:
    """``cfg.batch_size`` rows as the recipe's collator makes them, with what objective and penalty need beside; real tensors.

    No two rows begin with the same tokens, so that no prefix is shared.
    """
    source = _Source(_is_packed(cfg))
    row = functools.partial(_pack, total=cfg.tokenizer["max_seq_len"]) if source.packed else _row
    samples = [row(rows, first_token=number % vocab_size) for number in range(cfg.batch_size)]
    batch = collator(source, source, locate(cfg.collate_fn, "collate_fn"))(samples)  # type: ignore[arg-type]
    if "pretrained_token_loss" in objective.needs:
        batch["pretrained_token_loss"] = torch.ones(batch["labels"].shape)
    kl = build_kl(cfg)
    if kl is not None and not kl.is_online:
        number = len(batch["targets"])
        batch["reference_log_probs"] = torch.zeros(number, kl.top_k + 1)
        batch["reference_tokens"] = torch.zeros(number, kl.top_k, dtype=torch.int64)
    return batch


def num_tokens(batch: Batch) -> int:
    """Tokens that the layers see: without padding where the batch has a layout for that."""
    layout = batch.get("layout")
    return batch["tokens"].numel() if layout is None else layout.indices.numel()


def _row(rows: Rows, first_token: int) -> dict[str, Any]:
    tokens = [first_token] + [0] * (rows.seq - 1)
    return {"tokens": tokens, "labels": _labels(rows)}


def _pack(rows: Rows, first_token: int, total: int) -> dict[str, Any]:
    """As many rows as fit into ``total`` tokens, and padding."""
    number = max(1, total // rows.seq)
    rest = max(0, total - number * rows.seq)
    seq_lens = [rows.seq] * number + [rest] * (rest > 0)
    return {
        "tokens": torch.full((sum(seq_lens),), first_token),
        "labels": torch.tensor(_labels(rows) * number + [IGNORE_INDEX] * rest),
        "input_pos": torch.cat([torch.arange(length) for length in seq_lens]),
        "seq_lens": torch.tensor(seq_lens),
    }


def _labels(rows: Rows) -> list[int]:
    return [IGNORE_INDEX] * (rows.seq - rows.targets) + [0] * rows.targets


def _is_packed(cfg: DictConfig) -> bool:
    node = cfg.dataset if isinstance(cfg.dataset, Mapping) else cfg.dataset[0]
    return bool(node.get("packed"))
