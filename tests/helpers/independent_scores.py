"""HellaSwag's and WinoGrande's log-likelihoods by plain transformers, one sequence at a time: no lm-eval, no batch, no cache."""

from __future__ import annotations

import re
from typing import Any

import torch


def hellaswag_requests(row: dict[str, Any]) -> list[tuple[str, str]]:
    def clean(text: str) -> str:
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    *sentences, rest = re.split(r"(?<=[.!?]) ", row["ctx"])
    rest = rest if sentences and rest[-1] not in ".!?" else ""
    start = row["ctx"].removesuffix(rest).strip()
    query = clean(f"{row['activity_label']}: {start} {rest.capitalize()}")
    return [(query, " " + clean(ending)) for ending in row["endings"]]


def winogrande_requests(row: dict[str, Any]) -> list[tuple[str, str]]:
    before, after = row["sentence"].split("_")
    return [(before + option, " " + after.strip()) for option in (row["option1"], row["option2"])]


@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """Of the continuation, in nats."""
    context, space = context.rstrip(), " " * (len(context) - len(context.rstrip()))
    length = len(tokenizer.encode(context))
    tokens = torch.tensor(tokenizer.encode(context + space + continuation))
    log_probabilities = model(tokens[None]).logits[0].float().log_softmax(-1)
    return log_probabilities[length - 1 : -1].gather(1, tokens[length:, None]).sum().item()
