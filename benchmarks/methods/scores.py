"""Scores of a tuned stories260k: accuracy on TOFU's paraphrased questions, loss on the stories it was pretrained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torchtune import config
from torchtune.data import InputOutputToMessages, padded_collate_sft
from torchtune.datasets._sft import SFTTransform

from finch.config.registry import find_config
from finch.objectives import IGNORE_INDEX
from finch.torchtune_names import shift_labels
from finch.training.chunked_loss import TokenLoss
from finch.weights.huggingface import HuggingFaceFolder

NUM_STORIES = 200
FIRST_ROW = 3600  # of TOFU's 4,000: the questions that come with paraphrases and wrong answers are 3600 to 3999
TOKENS_PER_BATCH = 16384


@dataclass(frozen=True)
class Scores:
    """``accuracy`` over all questions, over those whose row was trained on, and over the others, in [0, 1]; ``story_loss`` in nats
    a token."""

    accuracy: float
    accuracy_trained: float
    accuracy_held_out: float
    story_loss: float


class Evaluation:
    """Tokenizes once; scores any number of tuned models.

    A question counts as correct if the paraphrased answer has a higher mean log-probability a token than each of the five wrong
    ones, after the paraphrased question, in the form of the training rows. Chance is 1/6.

    Args:
        data: the folder that stories260k/tofu_sft takes as data_root.
        held_out: indices of the questions whose rows are not trained on.
    """

    def __init__(self, data: Path, held_out: set[int]) -> None:
        node = OmegaConf.load(find_config("stories260k/tofu_sft"))
        node.data_root = str(data)
        self._model = node.model
        tokenizer = config.instantiate(node.tokenizer)
        transform = SFTTransform(InputOutputToMessages(column_map={"input": "question", "output": "answer"}), tokenizer)
        questions = read_rows(data / "tofu" / "forget10_perturbed.jsonl")
        self._options = [  # six a question, the correct one first
            _shift(transform({"question": row["paraphrased_question"], "answer": answer}))
            for row in questions
            for answer in (row["paraphrased_answer"], *row["perturbed_answer"])
        ]
        self._stories = []
        for row in read_rows(data / "tinystories" / "stories.jsonl")[:NUM_STORIES]:
            tokens = tokenizer.encode(row["text"], add_bos=True, add_eos=False)[: node.tokenizer.max_seq_len]
            self._stories.append({"tokens": tokens, "labels": [*tokens[1:], IGNORE_INDEX]})
        self._is_held_out = torch.tensor([number in held_out for number in range(len(questions))])

    def score(self, folder: Path) -> Scores:
        """``folder``: a Hugging Face folder of the model."""
        model = config.instantiate(self._model)
        model.load_state_dict(dict(HuggingFaceFolder(str(folder)).weights()))
        model = TokenLoss(model).eval()
        sums, counts = _losses(model, self._options)
        correct = (sums / counts).view(-1, 6).argmin(dim=1) == 0
        story_sums, story_counts = _losses(model, self._stories)
        return Scores(
            accuracy=_mean(correct),
            accuracy_trained=_mean(correct[~self._is_held_out]),
            accuracy_held_out=_mean(correct[self._is_held_out]),
            story_loss=float(story_sums.sum() / story_counts.sum()),
        )


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _shift(row: dict[str, Any]) -> dict[str, list[int]]:
    """Moves each label to the position of the token that predicts it."""
    return {"tokens": row["tokens"], "labels": shift_labels(torch.tensor(row["labels"])).tolist()}


@torch.no_grad()
def _losses(model: TokenLoss, samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[samples] each: summed loss in nats, and number of target tokens. Samples of similar length share a batch."""
    sums, counts = torch.zeros(len(samples), dtype=torch.float64), torch.zeros(len(samples), dtype=torch.float64)
    remaining = sorted(range(len(samples)), key=lambda number: len(samples[number]["tokens"]))
    while remaining:
        width = max(1, TOKENS_PER_BATCH // len(samples[remaining[-1]]["tokens"]))
        remaining, chosen = remaining[:-width], remaining[-width:]
        batch = padded_collate_sft([samples[number] for number in chosen], padding_idx=0, ignore_idx=IGNORE_INDEX)
        labels = batch["labels"]
        targets = (labels != IGNORE_INDEX).flatten().nonzero().flatten()
        losses = model(tokens=batch["tokens"], labels=labels, targets=targets)
        sums[chosen] = losses.sum(dim=1, dtype=torch.float64)
        counts[chosen] = (labels != IGNORE_INDEX).sum(dim=1).double()
    return sums, counts


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean()) if len(values) else float("nan")
