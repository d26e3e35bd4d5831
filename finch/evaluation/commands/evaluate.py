"""`finch evaluate`: the pretrained and the tuned models on suites of tasks, in this process or on several ranks."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finch.base import hub
from finch.base.errors import UserError, exit_without_teardown
from finch.base.extras import require_extras
from finch.base.log import logger, printable
from finch.cli.arguments import names
from finch.cli.run import SAFE_PYTHON, prepare_launcher
from finch.evaluation.commands.arguments import add_checks, find_models
from finch.evaluation.results import SuiteResult, read_samples
from finch.evaluation.tasks.registry import ALL, select_tasks
from finch.models.hf_config import check_folder

if TYPE_CHECKING:
    from finch.evaluation.model_folders import ModelFolder
    from finch.evaluation.runner import Evaluation
    from finch.evaluation.tasks.task import Task

HARNESS = "<0.5,>=0.4.13"
PUNKT = "python -c \"import nltk; nltk.download('punkt_tab')\""
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
DTYPES = ("auto", "fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("models").add_argument
    add("--base", required=True, metavar="DIR", help="the pretrained model's folder, or its name on the hub")
    text = "tuned models: Hugging Face folders, PEFT adapters, or output folders of runs (their best epoch)"
    add("--tuned", nargs="+", default=[], metavar="DIR_OR_RUN", help=text)

    add = parser.add_argument_group("tasks").add_argument
    text = "forgetting, reliability, knowledge, science, language or all; several with commas (default: finch's own rows of twelve skills)"
    add("--suite", type=names, default=[], metavar="NAMES", help=text)
    text = "only these tasks; without --suite also others of lm-eval"
    add("--tasks", type=names, default=[], metavar="NAMES", help=text)
    add("--limit", type=int, metavar="N", help="only the first N documents of each task")
    text = "folder of local data sets, as docs/tasks.md lists them (default: the hub)"
    add("--data-root", type=Path, metavar="DIR", help=text)
    add("--include-path", type=Path, metavar="DIR", help="folder of YAML files of your own lm-eval tasks")
    text = "which lm-eval tasks were learned; on the others a loss is forgetting"
    add("--new-task", type=names, default=[], metavar="NAMES", help=text)

    add = parser.add_argument_group("how").add_argument
    text = "folder for results that no run owns (default: evaluation)"
    add("--out", type=Path, default=Path("evaluation"), metavar="DIR", help=text)
    add("--batch-size", default="auto", metavar="N", help="rows of a batch, or auto (the default)")
    text = "of all models; auto: the base's on a GPU, fp32 on a CPU (the default)"
    add("--dtype", choices=DTYPES, default="auto", help=text)
    add("--device", metavar="NAME", help="cpu or cuda (default: a GPU where there is one)")
    add("--nproc_per_node", "--nproc-per-node", type=int, default=1, metavar="N", help="processes, one per GPU")
    add_checks(parser)

    add = parser.add_argument_group("skills, without --suite and --tasks").add_argument
    text = "exit code 3 if a skill's KL from the base is larger, its 95%% interval included"
    add("--max-kl", type=float, metavar="NATS", help=text)
    text = "exit code 3 if a skill's accuracy fell by more, its 95%% interval included"
    add("--max-drop", type=float, metavar="POINTS", help=text)
    add("--json", action="store_true", help="print JSON in place of tables")


def main(parsed: argparse.Namespace) -> None:
    """Evaluates, and prints a table for each suite.

    Raises:
        UserError: a mistake in the arguments, a folder, or the data; a model whose numbers are not finite.
    """
    require_extras("finch evaluate", "evaluate")
    find_models(parsed)
    for option, path in (("--base", parsed.base), *(("--tuned", each) for each in parsed.tuned)):
        check_folder(path, option)  # before torch is imported
    if not parsed.suite and not parsed.tasks:
        _skills(parsed)
        return
    tasks, others = _check(parsed)
    from finch.distributed.processes import is_launched
    from finch.evaluation.custom_tasks import custom_task
    from finch.evaluation.harness import Harness, has_chat_template, quiet_harness, task_manager
    from finch.evaluation.loading import join_ranks, resolve_dtype, shared_tokenizer
    from finch.evaluation.model_folders import find_base, find_tuned
    from finch.evaluation.runner import Evaluation, Options
    from finch.evaluation.wise_ft import models_in

    base = find_base(parsed.base)
    tuned = [find_tuned(path, base) for given in parsed.tuned for path in models_in(given)]
    check_data(tasks, parsed.data_root, parsed.include_path)
    for folder in (base, *tuned):
        _check_files(folder, by_digest=parsed.verify)
    tokenizer = shared_tokenizer(base, tuned)
    if parsed.nproc_per_node > 1 and not is_launched():
        _launch(parsed.nproc_per_node)
        return
    with quiet_harness():
        ranks = join_ranks(parsed.device)
        is_chat = has_chat_template(tokenizer)
        manager = task_manager(parsed.data_root, is_chat, parsed.include_path, others)
        tasks += [
            custom_task(name, manager, is_new=name in parsed.new_task, has_chat_template=is_chat) for name in others
        ]
        harness = Harness(manager, tasks, tokenizer, parsed.limit)
        dtype = resolve_dtype(parsed.dtype, base.path, ranks.device)
        options = Options(parsed.out, parsed.data_root, parsed.limit, dtype, parsed.batch_size, parsed.trust)
        evaluation = Evaluation([base, *tuned], tasks, harness, options, ranks)
        evaluation.run()
        if ranks.is_rank_zero:
            print(printable(_report(evaluation, tasks)))
    exit_without_teardown()


def _check(parsed: argparse.Namespace) -> tuple[list[Task], list[str]]:
    """The tasks of finch and the names of lm-eval's. Raises UserError for numbers and names that cannot be."""
    check_harness()
    if parsed.limit is not None and parsed.limit < parsed.nproc_per_node:
        raise UserError(
            f"--limit={parsed.limit} must be at least 1 and --nproc_per_node={parsed.nproc_per_node}; give more documents"
        )
    if parsed.nproc_per_node < 1:
        raise UserError(f"--nproc_per_node={parsed.nproc_per_node} must be at least 1")
    if parsed.batch_size != "auto" and not (parsed.batch_size.isdigit() and int(parsed.batch_size) > 0):
        raise UserError(f"--batch-size={parsed.batch_size} must be a number of rows or auto")
    for option, value in (("--max-kl", parsed.max_kl), ("--max-drop", parsed.max_drop), ("--json", parsed.json)):
        if value not in (None, False):
            raise UserError(f"{option} is for skills; leave out --suite and --tasks, or {option}")
    tasks, others = select_tasks(parsed.suite, parsed.tasks, "--suite ", "--tasks ")
    if unknown := next((name for name in parsed.new_task if name not in others), None):
        remedy = "finch knows the role of its own tasks"
        raise UserError(f"--new-task {unknown} is not one of the lm-eval tasks of --tasks; {remedy}")
    return tasks, others


def _skills(parsed: argparse.Namespace) -> None:
    """What the tuned models forgot of each skill. Raises UserError as ``main``; exits with 3 where a limit is exceeded."""
    from finch.objectives.divergence import MIN_ROWS

    if not parsed.tuned:
        raise UserError(
            f"--tuned is missing; give the model to compare with --base, or --suite {', '.join(ALL)} or all"
        )
    for option, value, least in (
        ("--limit", parsed.limit, MIN_ROWS),  # fewer have no interval
        ("--max-kl", parsed.max_kl, 0),
        ("--max-drop", parsed.max_drop, 0),
    ):
        if value is not None and not value >= least:
            raise UserError(f"{option}={value} must be at least {least}")
    for option in ("batch_size", "data_root", "include_path", "new_task"):
        if (value := getattr(parsed, option)) not in ("auto", None, []):
            raise UserError(
                f"--{option.replace('_', '-')}={value} is for suites; give --suite or --tasks, or leave it out"
            )
    if parsed.nproc_per_node > 1:
        raise UserError(f"--nproc_per_node={parsed.nproc_per_node} is for suites; skills are measured by one process")
    from finch.distributed.parallel import local_device
    from finch.evaluation.loading import is_one_vocabulary, resolve_dtype, shared_tokenizer
    from finch.evaluation.model_folders import find_base, find_tuned, labels
    from finch.evaluation.skill_changes import as_json, beyond, compare, table
    from finch.evaluation.skills import CPU_ROWS, measure
    from finch.evaluation.skills_page import write_page
    from finch.evaluation.wise_ft import models_in

    base = find_base(parsed.base)
    tuned = [find_tuned(path, base, of_any_size=True) for given in parsed.tuned for path in models_in(given)]
    for folder in (base, *tuned):
        _check_files(folder, by_digest=parsed.verify)
    if by_text := not is_one_vocabulary(base, tuned):
        if parsed.max_kl is not None:
            raise UserError(
                f"--max-kl={parsed.max_kl:g}: --base and --tuned have other tokens, so that there is no KL; give --max-drop, or leave it out"
            )
        logger.warning("--base and --tuned have other tokens: the base's answers are compared as text, without a KL")
    else:
        shared_tokenizer(base, tuned)
    device, limit = local_device(parsed.device), parsed.limit
    if limit is None and device.type == "cpu":
        limit = CPU_ROWS
        logger.info(f"skills: {limit} rows of each on a CPU; --limit N takes more")
    options = {"out": parsed.out, "trust": parsed.trust, "dtype": resolve_dtype(parsed.dtype, base.path, device)}
    outputs = measure(base, tuned, limit=limit, device=device, by_text=by_text, **options)
    found = [compare(output) for output in outputs]
    if parsed.json:
        print(json.dumps(as_json(labels(tuned), found, by_text), indent=2))
    else:
        for label, output, skills in zip(labels(tuned), outputs, found, strict=True):
            few = few_documents({each.skill: each.n for each in skills})
            print(printable("\n".join(["", label, aligned(table(skills, by_text)), *few])))
            print(printable(f"Answers side by side: {write_page(output, label, skills, by_text)}"))
    problems = [
        f"{label}: {line}"
        for label, skills in zip(labels(tuned), found, strict=True)
        for line in beyond(skills, parsed.max_kl, parsed.max_drop)
    ]
    for line in problems:
        print(printable(line), file=sys.stderr)
    if problems:
        sys.exit(3)


def _check_files(folder: ModelFolder, *, by_digest: bool) -> None:
    """Of a model that finch has written, and of an adapter, whose model may be another one."""
    from finch.evaluation.adapters import check_adapter
    from finch.weights.files import check_export

    check_export(folder.path, by_digest=by_digest)
    if folder.base is not None:
        named = check_adapter(folder.path, str(folder)).get("base_model_name_or_path")
        if named and Path(named).name != hub.name_of(folder.base):
            logger.warning(f"{folder} was trained on {named}, and is merged into {folder.base}")


def check_harness() -> None:
    """lm-eval's version must be in the tested range."""
    from packaging.specifiers import SpecifierSet  # finch doctor works without it

    installed = importlib.metadata.version("lm-eval")
    if installed not in SpecifierSet(HARNESS):
        raise UserError(
            f"lm-eval {installed} is installed; finch evaluate needs lm-eval{HARNESS}: pip install 'lm-eval{HARNESS}'"
        )


def check_data(tasks: Sequence[Task], data_root: Path | None, include_path: Path | None) -> None:
    """The files must be there, without ``data_root`` the hub must be allowed; a user's own tasks need other names than ``tasks``."""
    if include_path is not None:
        if not include_path.is_dir():
            raise UserError(f"--include-path={include_path} is not a folder; give the folder of your tasks' YAML files")
        from finch.evaluation.harness import check_own_names, quiet_harness

        with quiet_harness():
            check_own_names(include_path, tasks)
    if data_root is not None and not data_root.is_dir():
        raise UserError(
            f"--data-root={data_root} is not a folder; give the folder of the data sets, or leave it out to use the hub"
        )
    for name in _OFFLINE if data_root is None and tasks else ():
        if os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON"):
            raise UserError(
                f"--data-root is missing and {name}={os.environ[name]} forbids the hub; give --data-root DIR"
            )
    for task in tasks:
        task.check_data(data_root)
    if any(task.name == "ifeval" for task in tasks):
        import nltk

        try:  # lm-eval would report a download that failed as done, and stop in the middle of IFEval
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError as error:
            raise UserError(f"ifeval: NLTK's punkt_tab is missing; fetch it: {PUNKT}, or set NLTK_DATA") from error


def _report(evaluation: Evaluation, tasks: Sequence[Task]) -> str:
    from finch.evaluation.model_folders import labels

    base, *tuned = evaluation.targets
    models = ["base", *labels([target.folder for target in tuned])]
    parts = []
    for suite in evaluation.suites:
        results = [(target.output, evaluation.result(target, suite)) for target in evaluation.targets]
        of_suite = [task for task in tasks if task.suite == suite]
        table = _table(models, results, [task.name for task in of_suite])
        parts.append(f"\n{suite}: {base.output / suite}.json\n{table}")
        judged = [task.name for task in of_suite if task.is_judged]
        unscored = [str(out) for out, each in results[1:] if any(each.tasks[name].score is None for name in judged)]
        if unscored:
            parts.append(
                f"not scored yet; compare the answers with a judge: finch evaluate --judge URL --model NAME {' '.join(unscored)}"
            )
    return "\n".join(parts)


def _table(models: Sequence[str], results: Sequence[tuple[Path, SuiteResult]], tasks: Sequence[str]) -> str:
    """One suite's table, scores in percent and deltas in points, then the tasks' definitions; the base's result is the first."""
    from finch.evaluation.statistics import mean_interval, paired_delta

    base_folder, base = results[0]
    rows = [["task", "metric", "model", "score", "delta", "95% interval", "n", "chance"]]
    for name in tasks:
        before = base.tasks[name]
        samples = read_samples(base_folder, before)
        metric = before.metric if before.is_higher_better else f"{before.metric}, lower is better"
        for model, (folder, result) in zip(models, results, strict=True):
            task, is_base = result.tasks[name], result is base
            number, delta, interval = task.n, "", ""
            if before.score is not None and task.score is not None:
                measured = mean_interval(samples) if is_base else paired_delta(samples, read_samples(folder, task))
                number, delta = measured.n, "" if is_base else f"{100 * measured.mean:+.1f}"
                low, high, sign = 100 * measured.low, 100 * measured.high, "" if is_base else "+"
                interval = f"[{low:{sign}.1f}, {high:{sign}.1f}]"
                if math.isnan(low):
                    interval = "no document differs" if delta and measured.mean == 0 else ""
            first, last = ([name, metric], _percent(task.chance)) if is_base else (["", ""], "")
            rows.append([*first, model, _percent(task.score), delta, interval, str(number), last])
    few = few_documents({name: base.tasks[name].n for name in tasks})
    return "\n".join([aligned(rows), *few, "", *(f"{name}: {base.tasks[name].definition}" for name in tasks)])


def few_documents(numbers: Mapping[str, int]) -> list[str]:
    """A caution where a task has few documents, in a list."""
    from finch.evaluation.statistics import FEW_DOCUMENTS

    few = [f"{name} ({number})" for name, number in numbers.items() if number < FEW_DOCUMENTS]
    return [f"Caution: fewer than {FEW_DOCUMENTS} documents, so rough intervals: {', '.join(few)}."] if few else []


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def _launch(number: int) -> None:
    """Starts the same command on several ranks, and ends this process with the exit code of the first one that fails."""
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from finch.cli.restarts import failed_rank

    prepare_launcher(number)
    arguments = ["--standalone", f"--nproc_per_node={number}", "--no_python", *SAFE_PYTHON, "finch.cli", *sys.argv[1:]]
    try:
        launcher.run(launcher.get_args_parser().parse_args(arguments))
    except ChildFailedError as error:
        sys.exit(failed_rank(error)[1])
