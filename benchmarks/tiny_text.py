"""Reproducible text for a small model: words, a SentencePiece tokenizer trained on them, question-answer rows."""

from __future__ import annotations

import json
import random
from pathlib import Path

VOCAB_SIZE = 64
WORDS = [
    "the", "a", "small", "old", "red", "bird", "fox", "tree", "river", "stone",
    "sings", "runs", "sleeps", "near", "under", "over", "quietly", "often", "never", "again",
]  # fmt: skip


def train_tokenizer(folder: Path, rng: random.Random) -> None:
    """Writes tokenizer.model and tokenizer.vocab; ``rng`` draws its training text."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(400)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=VOCAB_SIZE,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    text.unlink()


def make_rows(file: Path, number: int, rng: random.Random, words: tuple[int, int] = (1, 7)) -> None:
    """Writes question-answer rows as JSON lines; answers have ``words[0]`` to ``words[1]`` words."""
    rows = [
        {
            "question": " ".join(rng.choices(WORDS, k=rng.randint(1, 4))),
            "answer": " ".join(rng.choices(WORDS, k=rng.randint(*words))),
        }
        for _ in range(number)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
