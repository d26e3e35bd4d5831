"""Scores of a quickstart model on a world: exact-match accuracy and mean loss of the answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torchtune.data import InputOutputToMessages, padded_collate_sft
from torchtune.datasets._sft import SFTTransform
from torchtune.models.llama2 import llama2_tokenizer

from examples.quickstart.base import build_decoder
from examples.quickstart.world import World
from finch.objectives import IGNORE_INDEX
from finch.weights.huggingface import HuggingFaceFolder


@dataclass(frozen=True)
class Scores:
    """``accuracy``: share of facts whose complete answer greedy decoding gives, in [0, 1]; ``loss``: nats per target token."""

    accuracy: float
    loss: float


def tokenize(world: World, folder: Path) -> dict[str, torch.Tensor]:
    """Each fact once, as one padded batch: ``tokens`` and shifted ``labels``, [facts, seq]."""
    tokenizer = llama2_tokenizer(str(folder / "tokenizer.model"), prompt_template=None)
    transform = SFTTransform(InputOutputToMessages(column_map={"input": "question", "output": "answer"}), tokenizer)
    batch = padded_collate_sft(
        [transform(row) for row in world.first_phrasings], padding_idx=tokenizer.pad_id, ignore_idx=IGNORE_INDEX
    )
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    return {"tokens": batch["tokens"], "labels": labels}


@torch.no_grad()
def evaluate(folder: Path, batches: dict[str, dict[str, torch.Tensor]]) -> dict[str, Scores]:
    """
    Args:
        folder: a Hugging Face folder of the quickstart's model.
        batches: name of a world to its facts from ``tokenize``.
    """
    base = HuggingFaceFolder(str(folder))
    model = build_decoder(base.config).eval()
    model.load_state_dict(dict(base.weights()))
    scores = {}
    for name, batch in batches.items():
        logits, labels = model(batch["tokens"]), batch["labels"]
        # Greedy decoding gives the answer if each of its tokens is the most likely one after those before it.
        correct = (logits.argmax(-1) == labels) | (labels == IGNORE_INDEX)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        scores[name] = Scores(float(correct.all(dim=1).float().mean()), float(loss))
    return scores
