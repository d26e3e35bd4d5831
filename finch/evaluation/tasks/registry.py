"""The table of tasks and suites."""

from __future__ import annotations

from finch.evaluation.results import NEW, OLD
from finch.evaluation.tasks import lm_eval_tasks, tofu
from finch.evaluation.tasks.task import Task

_TOFU = (
    "TOFU, which of six answers to the paraphrased question is right: the paraphrased answer and five perturbed ones, shuffled with a seed a "
    "row, compared by log-likelihood per character"
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="hellaswag",
            suite="forgetting",
            role=OLD,
            metric="acc_norm",
            measure="HellaSwag of lm-eval, log-likelihood of the endings per character",
            lm_eval_names=("hellaswag",),
            sources=(lm_eval_tasks.HELLASWAG,),
            read_samples=lm_eval_tasks.hellaswag_samples,
            compute_others=lm_eval_tasks.hellaswag_others,
            uses_chat_template=False,
            chance=1 / 4,
        ),
        Task(
            name="winogrande",
            suite="forgetting",
            role=OLD,
            metric="acc",
            measure="WinoGrande XL of lm-eval, log-likelihood of the rest of the sentence after each option",
            lm_eval_names=("winogrande",),
            sources=(lm_eval_tasks.WINOGRANDE,),
            read_samples=lm_eval_tasks.winogrande_samples,
            compute_others=lm_eval_tasks.no_others,
            uses_chat_template=False,
            chance=1 / 2,
        ),
        Task(
            name="mmlu",
            suite="forgetting",
            role=OLD,
            metric="acc",
            measure="MMLU of lm-eval, log-likelihood of the letters; mean over the documents of all 57 subjects, as lm-eval's group mmlu weighs them",
            lm_eval_names=tuple(f"mmlu_{subject}" for subject in lm_eval_tasks.SUBJECTS),
            sources=(lm_eval_tasks.MMLU, lm_eval_tasks.MMLU_DEV),
            read_samples=lm_eval_tasks.mmlu_samples,
            compute_others=lm_eval_tasks.mmlu_others,
            uses_chat_template=False,
            chance=1 / 4,
        ),
        Task(
            name="tofu",
            suite="knowledge",
            role=NEW,
            metric="acc_norm",
            measure=_TOFU,
            lm_eval_names=("finch_tofu", "finch_tofu_letters"),
            sources=(tofu.PERTURBED,),
            read_samples=tofu.samples,
            compute_others=tofu.others,
            uses_chat_template=True,
            chance=1 / 6,
        ),
        Task(
            name="tofu_validation",
            suite="knowledge_validation",
            role=NEW,
            metric="acc_norm",
            measure=f"{_TOFU}; the rows whose question is in the 10% validation part of TOFU",
            lm_eval_names=("finch_tofu_validation", "finch_tofu_validation_letters"),
            sources=(tofu.PERTURBED, tofu.FULL),
            read_samples=tofu.samples,
            compute_others=tofu.others,
            uses_chat_template=True,
            chance=1 / 6,
        ),
    )
}
"""By name."""

SUITES: dict[str, tuple[str, ...]] = {}
"""The names of each suite's tasks."""
for _task in TASKS.values():
    SUITES[_task.suite] = (*SUITES.get(_task.suite, ()), _task.name)

ALL = ("forgetting", "reliability", "knowledge", "science", "language")
"""The suites that are evaluated after tuning; those of validation rows choose a checkpoint or a setting."""
