"""lm-eval, called as a library: its tasks loaded once for all models, and one evaluation for each task."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch.errors import UserError
from finch.evaluation.progress import count_requests
from finch.evaluation.tasks.task import Record, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finch.evaluation.language_model import LanguageModel

SEED, NUMPY_SEED, TORCH_SEED, SHOTS_SEED = 0, 1234, 1234, 1234
"""lm-eval's own defaults."""
_ESTIMATED = 4  # documents of a task whose requests are counted ahead


class Harness:
    """
    Args:
        manager: an ``lm_eval.tasks.TaskManager`` that has the tasks.
        tasks: loaded here, with their data.
        tokenizer: of the pretrained model, used for all models.
        limit: documents of a task; None: all.

    Raises:
        UserError: a task's data cannot be read.
    """

    def __init__(
        self, manager: Any, tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase, limit: int | None
    ) -> None:
        self.tokenizer, self._limit = tokenizer, limit
        self._parts: dict[str, dict[str, Any]] = {}
        for task in tasks:
            try:
                self._parts[task.name] = manager.load(list(task.lm_eval_names))["tasks"]
            except UserError:
                raise
            except Exception as error:  # the hub, datasets and lm-eval have an exception for each kind of trouble
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise UserError(
                    f"{task.name}: its data cannot be loaded ({reason}); give --data-root, or check the network"
                ) from error
            for part in self._parts[task.name].values():
                if part.config.num_fewshot is None:
                    part.set_config(key="num_fewshot", value=0)
                part.set_fewshot_seed(seed=SHOTS_SEED)

    @property
    def has_chat_template(self) -> bool:
        return has_chat_template(self.tokenizer)

    def num_requests(self, task: Task) -> int:
        """About how many requests a task has, from its first documents, as ``count_requests`` counts."""
        number, limit = 0, self._documents_limit(task)
        for part in self._parts[task.name].values():
            documents = min(len(part.eval_docs), limit or len(part.eval_docs))
            counted = min(documents, _ESTIMATED)
            part.build_all_requests(limit=counted)
            number += count_requests(part.instances) * documents // counted
        return number

    def evaluate(self, model: LanguageModel, task: Task) -> dict[str, list[Record]] | None:
        """
        Returns:
            lm-eval's logged samples of each of its tasks, of all ranks; None on ranks but the first.

        Raises:
            UserError: a log-likelihood is not finite.
        """
        import lm_eval
        import numpy as np
        import torch

        random.seed(SEED)
        np.random.seed(NUMPY_SEED)
        torch.manual_seed(TORCH_SEED)
        results = lm_eval.evaluate(
            lm=model,
            task_dict={"tasks": self._parts[task.name], "groups": {}, "group_map": {}},
            limit=self._documents_limit(task),
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=task.uses_chat_template and self.has_chat_template,
        )
        return None if results is None else results["samples"]

    def _documents_limit(self, task: Task) -> int | None:
        """Of each lm-eval task: MMLU's subjects share the task's limit, other parts of a task have the same documents."""
        if self._limit is None or not task.is_divided:
            return self._limit
        return math.ceil(self._limit / len(self._parts[task.name]))


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def make_manager(
    data_root: Path | None, tokenizer: PreTrainedTokenizerBase, include_path: Path | None, others: Sequence[str]
) -> Any:
    """lm-eval's ``TaskManager`` for the tasks of finch, and for ``others``.

    To index all of lm-eval's tasks takes seconds, and is left out where those of ``include_path`` suffice.
    """
    from finch.evaluation.tasks.manager import task_manager

    include_paths = [] if include_path is None else [include_path]
    manager = task_manager(data_root, has_chat_template(tokenizer), include_paths=include_paths)
    if set(others) <= set(manager.task_index):
        return manager
    return task_manager(data_root, has_chat_template(tokenizer), include_paths=include_paths, include_defaults=True)
