"""A tiny Llama and rows of tokens for the training loops of other libraries, and FINCH in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn import functional as F

Row = dict[str, list[int]]


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads))


def make_token_rows(number: int, seed: int = 0) -> list[Row]:
    """Rows of unequal lengths; the first tokens of each are a prompt without loss."""
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        tokens = [draw.randrange(1, 64) for _ in range(draw.randint(6, 20))]
        prompt = draw.randint(1, 4)
        rows.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return rows


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Padded on the right with token 0, whose label is -100."""
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    batch = {name: [row[name] + [fill[name]] * (length - len(row[name])) for row in rows] for name in fill}
    batch["attention_mask"] = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
    return {name: torch.tensor(values) for name, values in batch.items()}


def sums(model: Any, rows: list[Row]) -> tuple[torch.Tensor, int]:
    """Sum of the cross-entropies in nats, and number, of the target tokens: row by row, without padding."""
    total, number = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        targets = torch.tensor(row["labels"][1:])
        total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        number += int((targets != -100).sum())
    return total, number


@torch.no_grad()
def mean_loss(model: Any, rows: list[Row]) -> float:
    total, number = sums(model, rows)
    return float(total) / number


def finch_rates(
    losses: list[float], eta_base: float, eta_max: float, init: float | None, ema: float = 0.9, eps: float = 1e-8
) -> list[float]:
    """The learning rates that belong to the losses of successive steps; ``init=None`` starts from the first of them."""
    average, rates = init, []
    for loss in losses:
        average = loss if average is None else ema * average + (1 - ema) * loss
        rates.append(min(eta_base / (average + eps) ** 0.5, eta_max))
    return rates


def train_plainly(
    model: Any,
    rows: list[Row],
    batch: int,
    eta_base: float,
    eta_max: float,
    *,
    init: float | None = None,
    epochs: int = 1,
    num_shares: int = 1,
    sums: Callable[[Any, list[Row]], tuple[torch.Tensor, int]] = sums,
    replay_kl: Callable[[], torch.Tensor] = lambda: torch.zeros((), requires_grad=True),
    strength: float = 0.0,
) -> dict[str, list[float]]:
    """FINCH over rows in their order, as Section 3.3 writes it; the steps' values by their names in the metrics.

    Args:
        init: of the EMA; None: the mean loss of all rows.
        num_shares: the gradient is the mean of their means, as of ranks that each take their own share of a batch.
        sums: of a model and rows, as the function of this name.
        replay_kl, strength: a term of the objective and its factor.
    """
    if init is None:
        with torch.no_grad():
            total, number = sums(model, rows)
        init = float(total) / number
    optimizer = torch.optim.AdamW(model.parameters(), lr=eta_base, weight_decay=0.0)
    average, steps = init, []
    for start in list(range(0, len(rows), batch)) * epochs:
        shares = [sums(model, rows[start : start + batch][share::num_shares]) for share in range(num_shares)]
        kl = replay_kl()
        (torch.stack([total / number / num_shares for total, number in shares]).sum() + strength * kl).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss = sum(float(total.detach()) for total, _ in shares) / sum(number for _, number in shares)
        average = 0.9 * average + 0.1 * loss
        optimizer.param_groups[0]["lr"] = rate = min(eta_base / (average + 1e-8) ** 0.5, eta_max)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": loss, "ema_loss": average, "lr": rate, "grad_norm": float(norm)})
        steps[-1] |= {"replay_kl": float(kl.detach())} if strength else {}
    return {name: [step[name] for step in steps] for name in steps[0]}
