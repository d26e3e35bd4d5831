"""A small data root for `finch evaluate`, and a model's requests as lm-eval makes them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.tiny_text import WORDS


def write_data_root(folder: Path, number: int = 12) -> Path:
    """HellaSwag and WinoGrande rows of the tiny tokenizer's words."""
    rng = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    hellaswag = [
        {"activity_label": "Birds", "ctx": f"{words(2, 5)}. {words(1, 3)}", "endings": [words(1, 5) for _ in range(4)], "label": str(rng.randrange(4))}
        for _ in range(number)
    ]  # fmt: skip
    winogrande = [
        {"sentence": f"{words(1, 4)} _ {words(1, 4)}.", "option1": words(1, 1), "option2": words(1, 2), "answer": str(rng.randint(1, 2))}
        for _ in range(number)
    ]  # fmt: skip
    for name, rows in (("hellaswag", hellaswag), ("winogrande", winogrande)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "validation.jsonl").write_text(text, encoding="utf-8")
    return folder


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Requests of one task, a document each."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, 0, ("some_task", number, 1)) for number, each in enumerate(arguments)]


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
