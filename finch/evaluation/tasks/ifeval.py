"""IFEval as lm-eval has it: prompts whose instructions can be checked by a program."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from finch.evaluation.results import Sample
from finch.evaluation.tasks.rows import Row, Source, table
from finch.evaluation.tasks.task import Records, by_doc_id, identity, mean, plain_or_chat, response

ROWS = Source("ifeval/prompts.jsonl", "google/IFEval", "train", ("key", "prompt", "instruction_id_list", "kwargs"))
SEED = 0


def local_dataset(data_root: str, **_: Any) -> dict[str, Any]:
    """Rows with ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs``, as on the hub."""
    return {"train": table(ROWS.load(data_root))}


def plain_prompt(document: Row) -> str:
    return plain_or_chat(document["prompt"], has_chat_template=False)


def process_results(document: Row, responses: Sequence[str]) -> dict[str, Any]:
    """lm-eval's results of a document, with its random choices fixed: those of langdetect, and arguments that it draws where a row's are 0."""
    from lm_eval.tasks.ifeval import instructions, utils

    instructions.langdetect.DetectorFactory.seed = SEED
    state = random.getstate()
    random.seed(document["key"])
    try:
        return utils.process_results(document, responses)
    finally:
        random.setstate(state)


def samples(records: Records) -> list[Sample]:
    """With lm-eval's four results, of the prompt and of each of its instructions, and the response."""
    return [
        {
            **identity(record),
            "score": float(record["prompt_level_strict_acc"]),
            "prompt_level_loose_acc": float(record["prompt_level_loose_acc"]),
            "inst_level_strict_acc": [bool(value) for value in record["inst_level_strict_acc"]],
            "inst_level_loose_acc": [bool(value) for value in record["inst_level_loose_acc"]],
            "response": response(record),
        }
        for record in by_doc_id(records["ifeval"]).values()
    ]


def others(samples: Sequence[Sample]) -> dict[str, float | None]:
    """The other three accuracies, those of instructions over all of them, and the responses' mean length in words."""
    words = [{"words": len(sample["response"].split())} for sample in samples]
    return {
        "prompt_level_loose_acc": mean(samples, "prompt_level_loose_acc"),
        **{
            level: mean([{"value": value} for sample in samples for value in sample[level]], "value")
            for level in ("inst_level_strict_acc", "inst_level_loose_acc")
        },
        "response_words": mean(words, "words"),
    }
