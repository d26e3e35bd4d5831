"""lm-eval's other tasks, and a user's own YAML files, by name: ``--tasks arc_easy --include-path DIR``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.instantiate import did_you_mean
from finch.evaluation.results import NEW, OLD, Sample
from finch.evaluation.tasks.task import Records, Task, mean

CUSTOM = "custom"
"""The suite of such tasks."""
_HEADLINES = ("acc_norm", "acc", "exact_match")


def check_name(name: str, manager: Any) -> None:
    """Raises UserError if lm-eval has no such task; loads nothing."""
    known = set(manager.task_index)
    if name not in known:
        raise UserError(
            f"--tasks {name} is neither a task of finch nor one of lm-eval{did_you_mean(name, known)}; give --include-path for your own"
        )


def custom_task(name: str, manager: Any, *, is_new: bool, has_chat_template: bool) -> Task:
    """A task for lm-eval's task, group or tag of that name.

    The headline is acc_norm, acc or exact_match, else the first metric; of a task with several filters, such as gsm8k's strict-match and
    flexible-extract, the first one's, and the others' means are in ``others``. Generated answers use the chat template where there is
    one, log-likelihoods do not.

    Args:
        manager: an ``lm_eval.tasks.TaskManager``.
        is_new: whether the model was tuned on it; otherwise a lower score is forgetting.
        has_chat_template: whether the tokenizer has one; without it the prompts are lm-eval's.

    Raises:
        UserError: there is no such task, its data cannot be loaded, or it has no score per document.
    """
    check_name(name, manager)
    try:
        parts = manager.load(name)["tasks"]
    except Exception as error:  # a broken YAML file, a data set that cannot be loaded: each library has its own
        raise UserError(f"--tasks {name}: lm-eval cannot load it ({' '.join(str(error).split())[:200]})") from error
    first = next(iter(parts.values()))
    metrics = [metric["metric"] for metric in first.config.metric_list or () if isinstance(metric["metric"], str)]
    metric = next((each for each in _HEADLINES if each in metrics), metrics[0] if metrics else None)
    if metric is None or "perplexity" in metric:
        raise UserError(f"--tasks {name} has no score per document ({metric or 'no metric'}); leave it out")
    chains = [[each["name"] for each in part.config.filter_list or ()] for part in parts.values()]
    firsts = dict.fromkeys(chain[0] for chain in chains if chain)
    filters = list(dict.fromkeys(each for chain in chains for each in chain[1:]))
    shown = f"{metric},{'|'.join(firsts)}" if filters else metric  # as lm-eval writes it
    if filters:
        logger.info(f"--tasks {name}: the table has {shown}; {', '.join(filters)}: in {CUSTOM}.json, under others")
    options: dict[str, Any] = next((each for each in first.config.metric_list if each["metric"] == metric), {})
    return Task(
        name=name,
        suite=CUSTOM,
        role=NEW if is_new else OLD,
        metric=shown,
        measure=f"{name} of lm-eval ({_digest(parts)}), {shown}",
        lm_eval_names=tuple(parts),
        read_samples=lambda records: _samples(records, metric),
        others=lambda samples: {each: mean(samples, each) for each in (f"{metric},{name}" for name in filters)},
        uses_chat_template=has_chat_template and first.OUTPUT_TYPE == "generate_until",
        is_higher_better=bool(options.get("higher_is_better", True)),
        shots=first.config.num_fewshot or 0,
    )


def _digest(parts: Mapping[str, Any]) -> str:
    """Of all settings, documents and examples, and of the modules of its functions: a task's file may change, its rows, and what a function calls."""
    # Here: torch is imported only where a task is loaded.
    from finch.distributed.parallel import launched_ranks
    from finch.evaluation.loading import SHORT, hash_values

    settings = {name: {**part.dump_config(), "metadata": None} for name, part in parts.items()}  # it has the data root
    documents = [str(document) for part in parts.values() for document in part.eval_docs]
    shots = [str(each) for part in parts.values() if part.config.num_fewshot for each in part.fewshot_docs() or ()]
    if shots and launched_ranks() > 1:  # each draws examples for its own documents
        shots.append(f"{launched_ranks()} ranks")
    functions = [value for part in parts.values() for value in vars(part.config).values() if inspect.isfunction(value)]
    files = sorted({file for function in functions if (file := inspect.getsourcefile(function))})
    values = [Path(file).read_text(encoding="utf-8") for file in files], shots
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(settings))  # functions have addresses
    return hash_values(text, documents, *filter(None, values))[:SHORT]


def _samples(records: Records, metric: str) -> list[Sample]:
    samples = []
    for task, documents in records.items():
        first_filter = documents[0]["filter"] if documents else None
        others: dict[Any, dict[str, Any]] = {document["doc_id"]: {} for document in documents}
        for document in documents:
            if document["filter"] != first_filter:
                others[document["doc_id"]][f"{metric},{document['filter']}"] = document.get(metric)
        for document in sorted(documents, key=lambda each: each["doc_id"]):
            if document["filter"] == first_filter:
                number = document["doc_id"]
                doc_id = f"{task}/{number}" if len(records) > 1 else number
                score = document.get(metric)
                if not isinstance(score, int | float):
                    raise UserError(
                        f"document {number}: {metric} is no number ({score!r}); such a task cannot be compared"
                    )
                if not 0 <= score <= 1:
                    raise UserError(
                        f"document {number}: {metric} is {score:g}, and scores are shown in percent; have process_results divide it, so that it lies between 0 and 1"
                    )
                # Texts, or log-likelihoods.
                responses = [each[0] if isinstance(each, tuple | list) else each for each in document["filtered_resps"]]
                sample = {"doc_id": doc_id, "doc_hash": document["doc_hash"], "score": float(score)}
                samples.append({**sample, "responses": responses, **others[number]})
    return samples
