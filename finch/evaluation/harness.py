"""lm-eval, called as a library: its tasks loaded once for all models, and one evaluation for each task."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch.base.errors import UserError
from finch.distributed.parallel import launched_ranks
from finch.evaluation.tasks.lm_eval_tasks import SUBJECTS
from finch.evaluation.tasks.task import Record, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finch.evaluation.language_model import LanguageModel

SEED, NUMPY_SEED, TORCH_SEED, SHOTS_SEED = 0, 1234, 1234, 1234
"""lm-eval's own defaults."""
_ESTIMATED = 4  # documents per task whose requests are counted ahead

_OWN_TASKS = Path(__file__).parent / "tasks" / "yaml"

_LM_EVAL_FOLDERS = ("hellaswag", "winogrande", "mmlu/default", "truthfulqa")
"""Of lm-eval's tasks that finch runs as they are; to index all of lm-eval's takes seconds."""

_MODULE = "finch.evaluation.tasks.lm_eval_tasks"

_PLAIN_IFEVAL = [
    f"doc_to_text: !function {_MODULE}.ifeval_plain_prompt",
    r'generation_kwargs: {until: ["\nQuestion:"], do_sample: false, temperature: 0.0, max_gen_toks: 1280}',
]
"""lm-eval's, but for the prompt and the end of the response."""

# What lm-eval prints in every evaluation and nobody needs; its other warnings stay.
_NOISE = (
    "`pretrained` model kwarg is not of type",  # the model is loaded before lm-eval sees it
    "Passed an already-initialized model",
    "Combined length of context",  # finch counts these requests
    "Left truncation applied",
    "Overwriting default num_fewshot",
)
_NOISE_INSIDE = (
    "Custom kwargs can be passed to `--metadata`",  # finch passes them
    "/finch-tasks-",  # finch's variant of a task of lm-eval replaces it
    "from None overrides existing task from None",  # a group of such tasks
)


class Harness:
    """
    Args:
        manager: an ``lm_eval.tasks.TaskManager`` that has the tasks.
        tasks: loaded here, with their data.
        tokenizer: of the pretrained model, used for all models.
        limit: documents per task; None: all.

    Raises:
        UserError: a task's data cannot be read.
    """

    def __init__(
        self, manager: Any, tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase, limit: int | None
    ) -> None:
        self.tokenizer, self.has_chat_template, self._limit = tokenizer, has_chat_template(tokenizer), limit
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
                number = min(len(part.eval_docs), self._documents_limit(task) or len(part.eval_docs))
                if number < launched_ranks():
                    raise UserError(
                        f"{task.name}: {number} documents of {part.config.task} are fewer than --nproc_per_node={launched_ranks()}; start fewer ranks, or raise --limit"
                    )
                if part.config.num_fewshot is None:
                    part.set_config(key="num_fewshot", value=0)
                part.set_fewshot_seed(seed=SHOTS_SEED)

    def num_requests(self, task: Task) -> int:
        """About how many requests a task has, from its first documents, as ``count_requests`` counts."""
        from finch.evaluation.language_model import count_requests

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
        is_chat = task.uses_chat_template and self.has_chat_template
        model.add_bos_token = False if is_chat else None  # the template has written it, or training had none
        for part in self._parts[task.name].values():
            part.set_fewshot_seed(seed=SHOTS_SEED)  # each model would draw on, and have other examples in its prompts
        results = lm_eval.evaluate(
            lm=model,
            task_dict={"tasks": self._parts[task.name], "groups": {}, "group_map": {}},
            limit=self._documents_limit(task),
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=is_chat,
        )
        return None if results is None else results["samples"]

    def _documents_limit(self, task: Task) -> int | None:
        """Of each lm-eval task: MMLU's subjects share the task's limit, other parts of a task have the same documents."""
        if self._limit is None or not task.is_divided:
            return self._limit
        return math.ceil(self._limit / len(self._parts[task.name]))


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def check_own_names(include_path: Path, tasks: Sequence[Task]) -> None:
    """Raises UserError if a user's task or group has the name of one of finch's ``tasks``, as which it would be reported."""
    import lm_eval.tasks

    own = lm_eval.tasks.TaskManager(include_path=str(include_path), include_defaults=False).task_index
    known = {name for task in tasks for name in (task.name, *task.lm_eval_names)}
    if taken := sorted(name for name in known & set(own) if own[name].kind.name != "TAG"):
        raise UserError(f"{include_path}: {taken[0]} is the name of a task of finch; give yours another one")


def task_manager(
    data_root: Path | None, has_chat_template: bool, include_path: Path | None = None, others: Sequence[str] = ()
) -> Any:
    """An ``lm_eval.tasks.TaskManager`` that loads the lm-eval tasks of ``finch.evaluation.tasks.registry.TASKS``, and ``others``.

    With local rows, lm-eval's own tasks keep their files, prompts and metrics, and only read their rows from there.

    Args:
        data_root: folder of local rows; None: the hub.
        has_chat_template: whether the tokenizer has one; otherwise prompts are plain.
        include_path: a folder of further YAML files; a task there replaces lm-eval's of the same name.
        others: names of further tasks. Indexing all of lm-eval's takes seconds, and is left out where those of ``include_path`` suffice.
    """
    import lm_eval.tasks

    tasks = Path(lm_eval.tasks.__file__).parent
    folder = tempfile.TemporaryDirectory(prefix="finch-tasks-")
    _write_variants(Path(folder.name), tasks, is_local=data_root is not None, has_chat_template=has_chat_template)
    lm_evals = [tasks / name for name in _LM_EVAL_FOLDERS] if data_root is None else []
    own = [_OWN_TASKS, Path(folder.name), *([] if include_path is None else [include_path])]
    rows = None if data_root is None else str(data_root.resolve())
    metadata = {"data_root": rows, "has_chat_template": has_chat_template}
    manager: Any = lm_eval.tasks.TaskManager(include_path=[*lm_evals, *own], include_defaults=False, metadata=metadata)
    if not set(others) <= set(manager.task_index):
        manager = lm_eval.tasks.TaskManager(include_path=own, include_defaults=True, metadata=metadata)
    # lm-eval reads a file again when it loads the task; the folder is removed together with the manager.
    manager.finch_folder = folder
    return manager


def _write_variants(folder: Path, tasks: Path, *, is_local: bool, has_chat_template: bool) -> None:
    """Writes the YAML files that include lm-eval's own: with local rows, and IFEval with fixed random choices and perhaps a plain prompt."""
    variants: dict[str, tuple[str, list[str]]] = {}
    if is_local:
        variants["hellaswag"] = ("hellaswag/hellaswag.yaml", _local("hellaswag_dataset"))
        variants["winogrande"] = ("winogrande/default.yaml", _local("winogrande_dataset"))
        for subject in SUBJECTS:
            rows = [*_local("mmlu_dataset"), f"dataset_kwargs: {{subject: {subject}}}"]
            variants[f"mmlu_{subject}"] = (f"mmlu/default/mmlu_{subject}.yaml", rows)
        for name in ("truthfulqa_mc1", "truthfulqa_mc2"):
            variants[name] = (f"truthfulqa/{name}.yaml", _local("truthfulqa_dataset"))
    ifeval = [f"process_results: !function {_MODULE}.ifeval_results"]
    ifeval += _local("ifeval_dataset") if is_local else []
    variants["ifeval"] = ("ifeval/ifeval.yaml", ifeval if has_chat_template else [*ifeval, *_PLAIN_IFEVAL])
    for name, (file, lines) in variants.items():
        text = "\n".join([f"include: {tasks / file}", f"task: {name}", *lines, ""])
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def _local(function: str) -> list[str]:
    """Rows from a function of that module; no training split, which is not needed without shots."""
    return [f"custom_dataset: !function {_MODULE}.{function}", "training_split: null"]


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """While the context lasts. Imports lm-eval, transformers and datasets."""
    import datasets
    import lm_eval.api.task
    import transformers

    harness = logging.getLogger("lm_eval")
    handler = logging.StreamHandler()
    handler.addFilter(_is_worth_reading)
    level, propagates, bar = harness.level, harness.propagate, lm_eval.api.task.tqdm
    harness.addHandler(handler)
    harness.setLevel(logging.WARNING)
    harness.propagate = False
    lm_eval.api.task.tqdm = lambda iterable, **_: iterable
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        harness.removeHandler(handler)
        harness.setLevel(level)
        harness.propagate = propagates
        lm_eval.api.task.tqdm = bar


def _is_worth_reading(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not message.startswith(_NOISE) and not any(part in message for part in _NOISE_INSIDE)
