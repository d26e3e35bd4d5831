"""lm-eval's TaskManager for the tasks of finch, and for a user's own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finch.evaluation.tasks.lm_eval_tasks import SUBJECTS

OWN = Path(__file__).parent / "yaml"

_FOLDERS = ("hellaswag", "winogrande", "mmlu/default", "truthfulqa")
"""Of lm-eval's tasks that finch runs as they are; to index all of lm-eval's takes seconds."""

_MODULE = "finch.evaluation.tasks"

_PLAIN_IFEVAL = [
    f"doc_to_text: !function {_MODULE}.ifeval.plain_prompt",
    r'generation_kwargs: {until: ["\nQuestion:"], do_sample: false, temperature: 0.0, max_gen_toks: 1280}',
]
"""lm-eval's, but for the prompt and the end of the response."""


def task_manager(
    data_root: Path | None,
    has_chat_template: bool,
    *,
    include_paths: Sequence[Path] = (),
    include_defaults: bool = False,
) -> Any:
    """An ``lm_eval.tasks.TaskManager`` that loads the lm-eval tasks of ``finch.evaluation.tasks.registry.TASKS``.

    With local rows, lm-eval's own tasks keep their files, prompts and metrics, and only read their rows from there.

    Args:
        data_root: folder of local rows; None: the hub.
        has_chat_template: whether the tokenizer has one; otherwise prompts are plain.
        include_paths: folders of further YAML files; a task there replaces one of the same name.
        include_defaults: whether all of lm-eval's tasks can be loaded as well.
    """
    import lm_eval.tasks

    tasks = Path(lm_eval.tasks.__file__).parent
    is_local = data_root is not None
    folder = tempfile.TemporaryDirectory(prefix="finch-tasks-")
    _write_variants(Path(folder.name), tasks, is_local=is_local, has_chat_template=has_chat_template)
    lm_evals = [] if is_local or include_defaults else [tasks / name for name in _FOLDERS]
    manager = lm_eval.tasks.TaskManager(
        include_path=[*lm_evals, OWN, Path(folder.name), *include_paths],
        include_defaults=include_defaults,
        metadata={
            "data_root": None if data_root is None else str(data_root.resolve()),
            "has_chat_template": has_chat_template,
        },
    )
    # lm-eval reads a file again when it loads the task; the folder is removed together with the manager.
    manager.finch_folder = folder
    return manager


def _write_variants(folder: Path, tasks: Path, *, is_local: bool, has_chat_template: bool) -> None:
    """Writes the YAML files that include lm-eval's own: with local rows, and IFEval with fixed random choices and perhaps a plain prompt."""
    variants: dict[str, tuple[str, list[str]]] = {}
    if is_local:
        variants["hellaswag"] = ("hellaswag/hellaswag.yaml", _local("lm_eval_tasks.hellaswag_dataset"))
        variants["winogrande"] = ("winogrande/default.yaml", _local("lm_eval_tasks.winogrande_dataset"))
        for subject in SUBJECTS:
            rows = [*_local("lm_eval_tasks.mmlu_dataset"), f"dataset_kwargs: {{subject: {subject}}}"]
            variants[f"mmlu_{subject}"] = (f"mmlu/default/mmlu_{subject}.yaml", rows)
        for name in ("truthfulqa_mc1", "truthfulqa_mc2"):
            variants[name] = (f"truthfulqa/{name}.yaml", _local("truthfulqa.local_dataset"))
    ifeval = [f"process_results: !function {_MODULE}.ifeval.process_results"]
    ifeval += _local("ifeval.local_dataset") if is_local else []
    variants["ifeval"] = ("ifeval/ifeval.yaml", ifeval if has_chat_template else [*ifeval, *_PLAIN_IFEVAL])
    for name, (file, lines) in variants.items():
        text = "\n".join([f"include: {tasks / file}", f"task: {name}", *lines])
        (folder / f"{name}.yaml").write_text(text + "\n", encoding="utf-8")


def _local(function: str) -> list[str]:
    """Rows from a function of this package; no training split, which is not needed without shots."""
    return [f"custom_dataset: !function {_MODULE}.{function}", "training_split: null"]
