"""A small data root for `finch evaluate`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.tiny_text import WORDS
from helpers.rows import write_lines


def write_data_root(folder: Path, number: int = 12) -> Path:
    """HellaSwag and WinoGrande rows of the tiny tokenizer's words."""
    rng = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    hellaswag, winogrande = [], []
    for _ in range(number):
        row = {"activity_label": "Birds", "ctx": f"{words(2, 5)}. {words(1, 3)}"}
        hellaswag.append({**row, "endings": [words(1, 5) for _ in range(4)], "label": str(rng.randrange(4))})
        row = {"sentence": f"{words(1, 4)} _ {words(1, 4)}.", "option1": words(1, 1), "option2": words(1, 2)}
        winogrande.append({**row, "answer": str(rng.randint(1, 2))})
    for name, rows in (("hellaswag", hellaswag), ("winogrande", winogrande)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_lines(folder / name / "validation.jsonl", *rows)
    return folder


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
