"""A tiny Llama and rows of tokens for the training loops of other libraries, and FINCH in plain Python."""

from __future__ import annotations

import random
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


@torch.no_grad()
def mean_loss(model: Any, rows: list[Row]) -> float:
    """Mean cross-entropy over the target tokens, row by row, in nats."""
    total, number = 0.0, 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        targets = torch.tensor(row["labels"][1:])
        total += float(F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
        number += int((targets != -100).sum())
    return total / number


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
    model: Any, samples: list[tuple[list[int], int]], batch: int, eta_base: float, eta_max: float
) -> tuple[list[float], list[float], list[float]]:
    """FINCH over an epoch of rows in their order, as the paper's authors write it: losses, averages and learning rates of the steps.

    Args:
        samples: token ids, and the number of them that are the prompt.
    """

    def mean_loss(rows: list[tuple[list[int], int]]) -> torch.Tensor:
        sums = [
            F.cross_entropy(
                model(torch.tensor([ids])).logits[0, start - 1 : -1], torch.tensor(ids[start:]), reduction="sum"
            )
            for ids, start in rows
        ]
        return torch.stack(sums).sum() / sum(len(ids) - start for ids, start in rows)

    with torch.no_grad():
        average = mean_loss(samples).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=eta_base, weight_decay=0.0)
    steps = []
    for first in range(0, len(samples), batch):
        loss = mean_loss(samples[first : first + batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        average = 0.9 * average + 0.1 * loss.item()
        optimizer.param_groups[0]["lr"] = rate = min(eta_base / (average + 1e-8) ** 0.5, eta_max)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), average, rate))
    losses, averages, rates = (list(column) for column in zip(*steps, strict=True))
    return losses, averages, rates
