"""A model for lm-eval whose answers are known: it prefers a given choice, and writes a given response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from finch.evaluation.harness import task_manager
from finch.evaluation.results import Sample
from finch.evaluation.tasks.registry import TASKS
from finch.evaluation.tasks.task import Task

Document = dict[str, Any]


class KnownAnswerModel(LM):
    """
    Args:
        prefer: from a document to the index of the choice it finds likely; None: all are equally likely, per character.
        respond: from a document to its response.
    """

    def __init__(
        self,
        prefer: Callable[[Document], int | None] = lambda document: None,
        respond: Callable[[Document], str] = lambda document: "",
    ) -> None:
        super().__init__()
        self._prefer, self._respond = prefer, respond

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        return [
            (-0.01 if request.idx == self._prefer(request.doc) else -float(len(request.args[1].strip())), False)
            for request in requests
        ]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        return [self._respond(request.doc) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        raise NotImplementedError

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        turns = "".join(f"<{turn['role']}>{turn['content']}</{turn['role']}>" for turn in chat_history)
        return f"{turns}<assistant>" if add_generation_prompt else turns

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "known"

    @property
    def tokenizer_name(self) -> str:
        return "known"


def evaluate(
    task: Task, model: LM, data_root: Path, *, has_chat_template: bool = True, limit: int | None = None
) -> list[Sample]:
    """The samples of a task, as lm-eval and the task make them."""
    results = lm_eval.evaluate(  # simple_evaluate also starts processes to describe the machine
        lm=model,
        task_dict={"tasks": load(task.name, data_root, has_chat_template), "groups": {}, "group_map": {}},
        apply_chat_template=task.uses_chat_template and has_chat_template,
        limit=limit,
        bootstrap_iters=0,
    )
    return task.samples(results["samples"])


@lru_cache(maxsize=4)
def manager(data_root: Path | None, has_chat_template: bool) -> Any:
    return task_manager(data_root, has_chat_template)


@lru_cache(maxsize=32)
def load(name: str, data_root: Path | None, has_chat_template: bool) -> dict[str, Any]:
    """lm-eval's tasks of a task of ours, by name."""
    tasks = manager(data_root, has_chat_template).load(list(TASKS[name].lm_eval_names))["tasks"]
    for task in tasks.values():
        task.set_config("num_fewshot", 0)
    return tasks


def score(samples: Sequence[Sample]) -> float:
    """The mean of the scores that count."""
    scores = [sample["score"] for sample in samples if sample["score"] is not None]
    return sum(scores) / len(scores)
