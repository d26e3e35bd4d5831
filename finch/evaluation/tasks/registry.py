"""The table of tasks and suites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from finch.base.errors import UserError
from finch.config.instantiate import did_you_mean
from finch.evaluation.results import NEW, OLD, RELIABILITY
from finch.evaluation.tasks import confidence, galician_alpaca, halueval, lm_eval_tasks, sciknoweval, tofu
from finch.evaluation.tasks.task import Task

_FORGETTING = partial(Task, suite="forgetting", role=OLD)
_RELIABILITY = partial(Task, suite="reliability", role=RELIABILITY)

_TOFU = Task(
    name="tofu",
    suite="knowledge",
    role=NEW,
    metric="acc_norm",
    measure="TOFU, which of six answers to the paraphrased question is right: the paraphrased answer and five perturbed ones, shuffled with a seed a row, compared by log-likelihood per character",
    lm_eval_names=("finch_tofu", "finch_tofu_letters"),
    sources=(tofu.PERTURBED,),
    read_samples=tofu.samples,
    others=tofu.others,
    chance=1 / 6,
)

_SCIKNOWEVAL_ROWS = "SciKnowEval Chemistry L3, the letter that a greedy response states last, without one it is wrong; multiple-choice rows"
_SCIKNOWEVAL = Task(
    name="sciknoweval",
    suite="science",
    role=NEW,
    metric="acc",
    measure=f"{_SCIKNOWEVAL_ROWS} of the 25% test part",
    lm_eval_names=("finch_sciknoweval", "finch_sciknoweval_letters"),
    sources=(sciknoweval.ROWS,),
    read_samples=sciknoweval.samples,
    others=sciknoweval.others,
    chance=1 / 4,
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _FORGETTING(
            name="hellaswag",
            metric="acc_norm",
            measure="HellaSwag of lm-eval, log-likelihood of the endings per character",
            lm_eval_names=("hellaswag",),
            sources=(lm_eval_tasks.HELLASWAG,),
            read_samples=lm_eval_tasks.hellaswag_samples,
            others=lm_eval_tasks.hellaswag_others,
            uses_chat_template=False,
            chance=1 / 4,
        ),
        _FORGETTING(
            name="winogrande",
            metric="acc",
            measure="WinoGrande XL of lm-eval, log-likelihood of the rest of the sentence after each option",
            lm_eval_names=("winogrande",),
            sources=(lm_eval_tasks.WINOGRANDE,),
            read_samples=lm_eval_tasks.winogrande_samples,
            uses_chat_template=False,
            chance=1 / 2,
        ),
        _FORGETTING(
            name="mmlu",
            metric="acc",
            measure="MMLU of lm-eval, log-likelihood of the letters; mean over the documents of all 57 subjects, as lm-eval's group mmlu weighs them",
            lm_eval_names=tuple(f"mmlu_{subject}" for subject in lm_eval_tasks.SUBJECTS),
            sources=(lm_eval_tasks.MMLU, lm_eval_tasks.MMLU_DEV),
            read_samples=lm_eval_tasks.mmlu_samples,
            others=lm_eval_tasks.mmlu_others,
            uses_chat_template=False,
            chance=1 / 4,
            is_divided=True,
        ),
        _FORGETTING(
            name="ifeval",
            metric="prompt_level_strict_acc",
            measure="IFEval of lm-eval, prompts all of whose instructions are followed, strictly; greedy",
            lm_eval_names=("ifeval",),
            sources=(lm_eval_tasks.IFEVAL,),
            read_samples=lm_eval_tasks.ifeval_samples,
            others=lm_eval_tasks.ifeval_others,
        ),
        _RELIABILITY(
            name="truthfulqa",
            metric="mc2",
            measure="TruthfulQA mc2 of lm-eval with its prompt of six questions, the share of the true answers in the probability of all answers",
            lm_eval_names=("truthfulqa_mc1", "truthfulqa_mc2"),
            sources=(lm_eval_tasks.TRUTHFULQA,),
            read_samples=lm_eval_tasks.truthfulqa_samples,
            others=lm_eval_tasks.truthfulqa_others,
            uses_chat_template=False,
        ),
        _RELIABILITY(
            name="halueval",
            metric="acc",
            measure="HaluEval QA, question and two answers without the knowledge, which one is hallucinated: log-likelihood of the letter; both orders, mean per question",
            lm_eval_names=("finch_halueval",),
            sources=(halueval.ROWS,),
            read_samples=halueval.samples,
            others=halueval.others,
            chance=1 / 2,
        ),
        _RELIABILITY(
            name="confidence",
            metric="brier",
            measure="Brier score of verbalised confidence on TruthfulQA: (confidence - right)^2 over responses that state both; the right option and three wrong ones of mc1, drawn and shuffled with a seed a row; rows with fewer wrong ones are left out; greedy",
            lm_eval_names=("finch_confidence",),
            sources=(lm_eval_tasks.TRUTHFULQA,),
            read_samples=confidence.samples,
            others=confidence.others,
            chance=3 / 16,  # any letter with the confidence 25
            is_higher_better=False,
        ),
        _TOFU,
        replace(
            _TOFU,
            name="tofu_validation",
            suite="knowledge_validation",
            measure=f"{_TOFU.measure}; the rows whose question is in the 10% validation part of TOFU",
            lm_eval_names=("finch_tofu_validation", "finch_tofu_validation_letters"),
            sources=(tofu.PERTURBED, tofu.FULL),
        ),
        _SCIKNOWEVAL,
        replace(
            _SCIKNOWEVAL,
            name="sciknoweval_120",
            suite="science_120",
            measure=f"{_SCIKNOWEVAL_ROWS} of the 25% test part, 120 of them drawn with a seed: the paper's number, 5% of all rows",
            lm_eval_names=("finch_sciknoweval_120", "finch_sciknoweval_120_letters"),
        ),
        replace(
            _SCIKNOWEVAL,
            name="sciknoweval_validation",
            suite="science_validation",
            measure=f"{_SCIKNOWEVAL_ROWS} of the 5% validation part",
            lm_eval_names=("finch_sciknoweval_validation", "finch_sciknoweval_validation_letters"),
        ),
        Task(
            name="galician_alpaca",
            suite="language",
            role=NEW,
            metric="win_tie_rate",
            measure="answers to the Galician Alpaca instructions of the 25% test part, greedy; finch evaluate --judge scores them",
            lm_eval_names=("finch_galician_alpaca",),
            sources=(galician_alpaca.ROWS,),
            read_samples=galician_alpaca.samples,
            others=galician_alpaca.others,
            is_judged=True,
        ),
    )
}
"""By name."""

SUITES: dict[str, tuple[str, ...]] = {}
"""The names of each suite's tasks."""
for _task in TASKS.values():
    SUITES[_task.suite] = (*SUITES.get(_task.suite, ()), _task.name)

VALIDATION = "_validation"
"""How the suites end that have the validation rows of another one's task."""
ALL = ("forgetting", "reliability", "knowledge", "science", "language")
"""The suites that are evaluated after tuning; those of validation rows choose a checkpoint or a setting, science_120
has rows of science."""


def select_tasks(
    suites: Sequence[str], names: Sequence[str], suites_key: str, names_key: str
) -> tuple[list[Task], list[str]]:
    """The tasks of finch, and the names of those that only lm-eval can have; without ``names`` all tasks of the suites.

    Args:
        suites_key, names_key: what stands before a suite and a name in errors.

    Raises:
        UserError: an unknown suite; with suites, a task of none of them.
    """
    for suite in suites:
        if suite not in (known := [*SUITES, "all"]):
            hint = did_you_mean(suite, known) or f"; there are {', '.join(known)}"
            raise UserError(f"{suites_key}{suite} is unknown{hint}")
    chosen = [each for suite in suites for each in (ALL if suite == "all" else [suite])]
    of_suites = [task for suite in dict.fromkeys(chosen) for task in SUITES[suite]]
    for name in names if suites else ():
        if name not in of_suites:
            hint = did_you_mean(name, of_suites) or f": it has {', '.join(of_suites)}"
            raise UserError(
                f"{names_key}{name} is not in {suites_key}{','.join(suites)}{hint}; without suites any task can be given"
            )
    names = list(dict.fromkeys(names or of_suites))
    return [TASKS[name] for name in names if name in TASKS], [name for name in names if name not in TASKS]
