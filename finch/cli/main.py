"""The `finch` command. A subcommand imports what it needs, so that `finch --help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finch import __version__
from finch.cli import doctor, evaluate, gpu_check, judge, slurm, sweep
from finch.cli.arguments import CommandsParser, Parser, complete_in_shell, containing, positive
from finch.distributed.processes import limit_spinning
from finch.errors import UsageError, UserError, report_user_errors
from finch.extras import require_extras
from finch.log import printable, quiet_dependencies

_GROUPS = {
    "train": {
        "run": "train: a config's recipe on one process or several ranks",
        "check": "check a run and estimate its memory, without training",
        "estimate": "memory, collectives and time of a step, from a step on fake tensors",
        "sweep": "train and evaluate the runs of a grid, here or as a Slurm job array",
        "select-lr": "the largest learning rate of a sweep that forgets little",
        "average": "average a run's model with its pretrained one, as far as it keeps what was learned",
        "wise-ft": "interpolate between the pretrained and the tuned model's weights",
        "data": "make rows to train on",
    },
    "measure": {
        "chat": "the pretrained and the tuned model's answers to a prompt, side by side",
        "evaluate": "measure what tuned models have learned and forgotten",
        "judge": "score the language task with a judge behind a server",
        "report": "what runs have learned and what they have forgotten, as a page and tables",
    },
    "look up": {
        "configs": "list, show and copy the configs and grids that come with finch",
        "keys": "list a config's keys: values, default, description",
        "methods": "list the methods that method=NAME trains with",
        "models": "list the model families that can be trained",
    },
    "machine and cluster": {
        "doctor": "check the installed packages and the machine",
        "gpu-check": "check that GPUs compute a training step right, and how fast they are",
        "slurm": "run as Slurm jobs",
    },
}
_WITH_CONFIG = ("run", "check", "estimate", "slurm", "sweep")  # which read key=value and others' options themselves


@report_user_errors
def main(arguments: list[str] | None = None) -> None:
    quiet_dependencies()
    limit_spinning(os.environ)  # before torch is imported
    parser, commands = build_parser()
    complete_in_shell(parser, {name: commands[name] for name in _WITH_CONFIG})
    parsed, rest = parser.parse_known_args(arguments)
    if rest and parsed.command not in _WITH_CONFIG:
        commands.get(parsed.command, parser).error(f"unrecognized arguments: {' '.join(rest)}")
    if parsed.command in ("run", "check", "estimate"):
        require_extras(f"finch {parsed.command}", "torchtune")
        module = importlib.import_module(f"finch.cli.{parsed.command}")
        getattr(module, parsed.command)(rest)
    elif parsed.command == "slurm":
        slurm.submit(parsed, rest)
    elif parsed.command == "sweep":
        sweep.sweep(parsed, rest)
    elif parsed.command is not None:
        _COMMANDS[parsed.command](parsed)
    else:
        parser.print_help()
        sys.exit(2)


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of `finch`, and those of its commands by their names."""
    parser = CommandsParser(
        _GROUPS,
        prog="finch",
        description="Forgetting-aware fine-tuning for the PyTorch-native stack.",
        epilog="Exit codes: 0; 1, a mistake in what the arguments name, or a failure; 2, arguments that a command does not take.",
    )
    parser.add_argument("--version", action="version", version=f"finch {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    helps = {name: text for group in _GROUPS.values() for name, text in group.items()}

    def add(name: str, **options: Any) -> argparse.ArgumentParser:
        return subparsers.add_parser(name, help=helps[name], description=helps[name].capitalize() + ".", **options)

    add("run", add_help=False)
    add("check", add_help=False)
    add("estimate", add_help=False)

    configs = add("configs")
    actions = configs.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="list the names with a description (the default)")
    show = actions.add_parser("show", help="print a config, references resolved and defaults filled in")
    _named(show)
    show.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as for `finch run`, ~key included")
    copy = actions.add_parser("cp", help="copy a config to a file")
    _named(copy)
    copy.add_argument("file", type=Path)

    keys = add("keys")
    keys.add_argument("word", nargs="?", metavar="WORD", help="only keys whose name or description contains it")

    methods = add("methods")
    methods.add_argument("word", nargs="?", default="", metavar="WORD", help="only methods whose line contains it")

    models = add("models")
    models.add_argument("word", nargs="?", default="", metavar="WORD", help="only families whose lines contain it")

    diagnosis = add("doctor")
    diagnosis.add_argument(
        "--full", action="store_true", help="also import torchtune, and print torch's collect_env and pip check"
    )

    gpu_check.add_arguments(add("gpu-check"))

    wise_ft = add("wise-ft")
    wise_ft.add_argument("--base", type=Path, required=True, metavar="DIR", help="the pretrained model's folder")
    wise_ft.add_argument(
        "--tuned", type=Path, required=True, metavar="DIR", help="the tuned model's folder, a run's, or a sweep's"
    )
    wise_ft.add_argument(
        "--alpha", type=float, nargs="+", default=[0.5], help="the tuned model's share, or several (default: 0.5)"
    )
    wise_ft.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the results, one folder alpha_A for each alpha",
    )

    average = add("average")
    average.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    average.add_argument("--base", type=Path, metavar="DIR", help="the pretrained folder, where it has moved")
    _add_checks(average)
    chosen = average.add_mutually_exclusive_group()
    chosen.add_argument(
        "--alpha", type=float, help="the tuned model's share; default: the knee of learning and forgetting"
    )
    chosen.add_argument("--keep", type=float, help="the smallest alpha that keeps this share of what was learned: 0.95")
    chosen.add_argument(
        "--budget", type=float, help="the largest alpha that forgets at most this many nats per token: 0.1"
    )

    chat_parser = add("chat")
    chat_parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or its average")
    chat_parser.add_argument("--base", type=Path, metavar="DIR", help="the pretrained folder, where it has moved")
    _add_checks(chat_parser)
    chat_parser.add_argument("--prompt", metavar="TEXT", help="answer this one and end; default: those that are typed")
    chat_parser.add_argument(
        "--max-new-tokens", type=positive(int), default=256, metavar="N", help="of an answer (default: 256)"
    )
    chat_parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest tokens"
    )

    data = add("data")
    data_actions = data.add_subparsers(dest="action", metavar="ACTION", required=True)
    judge.add_translate_arguments(
        data_actions.add_parser("translate", help="translate instruction rows through a server with OpenAI's protocol")
    )

    evaluation = add("evaluate", allow_abbrev=False)
    evaluate.add_arguments(evaluation)
    _add_checks(evaluation)
    sweep.add_sweep_arguments(add("sweep", allow_abbrev=False))
    sweep.add_select_lr_arguments(add("select-lr"))
    judge.add_judge_arguments(add("judge"))
    report_parser = add("report")
    report_parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a sweep's: all of its cells"
    )
    report_parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for report.html, report.md, summary.csv and figures",
    )
    report_parser.add_argument(
        "--new-task",
        metavar="NAME",
        help="the evaluated task, or the probe, that was learned, where there are several new ones",
    )
    report_parser.add_argument(
        "--old-tasks",
        type=evaluate.names,
        metavar="NAMES",
        help="the old tasks of the trade-off, with commas: evaluated tasks, or probes such as stories.loss or own_answers.kl, all of one unit "
        "(points or nats); default: all old tasks, those in points where there are both. The others are in the tables of changes",
    )
    report_parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="folder of the pretrained model's results, where they are no longer where finch evaluate wrote them",
    )

    jobs = add("slurm").add_subparsers(dest="action", metavar="ACTION", required=True)
    submit = jobs.add_parser(
        "submit",
        help="check a run and submit it with sbatch",
        usage="finch slurm submit {CONFIG | --titan NAME} [--nodes N] [--gpus-per-node N] [option of sbatch ...] [key=value ...]",
        allow_abbrev=False,
    )
    slurm.add_arguments(submit)
    return parser, subparsers.choices


def _add_checks(parser: argparse.ArgumentParser) -> None:
    trust = "the run is your own: import all that its config.yaml names, from the current folder too; take rows and links to anywhere"
    parser.add_argument("--trust", action="store_true", help=trust)
    verify = "read the models' files completely, and compare them with the digests from when they were written"
    parser.add_argument("--verify", action="store_true", help=verify)


def _named(parser: argparse.ArgumentParser) -> None:
    """An argument that names a config or a grid; shells complete it."""
    from finch.config.instantiate import config_names, grid_names

    name: Any = parser.add_argument("name", help="as finch configs lists it, or a file")
    name.completer = lambda **_: [*config_names(), *grid_names()]


def configs(parsed: argparse.Namespace) -> None:
    """Shows or copies a config, or lists all."""
    {"show": show_config, "cp": copy_config}.get(parsed.action, list_configs)(parsed)


def list_configs(_: argparse.Namespace) -> None:
    """Prints each config's name and what it is, then those of the grids for `finch sweep`."""
    from finch.config.instantiate import config_names, grid_names

    names = {**config_names(), **grid_names()}
    for name, path in names.items():
        header = path.read_text(encoding="utf-8").splitlines()[1].removeprefix("#").strip()  # below the schema's path
        print(f"{name:<{max(map(len, names))}}  {header}")


def list_methods(parsed: argparse.Namespace) -> None:
    """Prints each method's name and summary."""
    from finch.config.methods import METHODS

    lines = {name: f"{name:<{max(map(len, METHODS))}}  {method.summary}" for name, method in METHODS.items()}
    print("\n".join(containing(parsed.word, lines, "method")))


def list_keys(parsed: argparse.Namespace) -> None:
    """Prints the keys of a config with their values, defaults and descriptions."""
    require_extras("finch keys", "torchtune")
    from finch.config.key_search import format_keys

    print(format_keys(parsed.word))


def wise_ft(parsed: argparse.Namespace) -> None:
    """Writes the interpolated models and prints their folders."""
    require_extras("finch wise-ft", "torchtune")
    from finch.weights.wise_ft import wise_ft as interpolate

    for folder in interpolate(parsed.base, parsed.tuned, parsed.alpha, parsed.out):
        print(folder)


def average(parsed: argparse.Namespace) -> None:
    """Writes RUN/average and says what was chosen."""
    require_extras("finch average", "torchtune")
    from finch.average import Choice
    from finch.average import average as choose

    for line in choose(
        parsed.run,
        Choice(parsed.alpha, parsed.keep, parsed.budget),
        base=parsed.base,
        trust=parsed.trust,
        verify=parsed.verify,
    ):
        print(printable(line))


def chat(parsed: argparse.Namespace) -> None:
    """Prints both answers to each prompt."""
    require_extras("finch chat", "torchtune")
    from rich.console import Console

    from finch.chat import Chat, talk
    from finch.cli.early_checks import only_errors_logged

    options = {
        "max_new_tokens": parsed.max_new_tokens,
        "temperature": parsed.temperature,
        "trust": parsed.trust,
        "verify": parsed.verify,
    }
    with only_errors_logged():
        models = Chat(parsed.run, parsed.base, **options)
    talk(models, parsed.prompt, Console())


def report(parsed: argparse.Namespace) -> None:
    """Writes the report and prints where it is."""
    require_extras("finch report", "torchtune", "report")
    from finch.report.report import write_report

    options = {"new_task": parsed.new_task, "old_tasks": parsed.old_tasks, "base": parsed.base}
    print(printable(str(write_report(parsed.runs, parsed.out, **options))))


def show_config(parsed: argparse.Namespace) -> None:
    """Prints the config as a run would see it; a missing value as ``<key>``."""
    require_extras("finch configs show", "torchtune")
    from omegaconf import OmegaConf

    from finch.config.instantiate import find_config, grid_names, load_config
    from finch.config.parser import complete, merge, named_errors, readable, recipe_of
    from finch.config.schema import RECIPES
    from finch.config.validation import check, drop_null_blocks, fill_in

    if parsed.name in grid_names():
        if parsed.overrides:
            raise UsageError(
                f"{parsed.name} is a grid, shown as it is; finch sweep {parsed.name} --dry-run {' '.join(parsed.overrides)} lists its cells"
            )
        print(grid_names()[parsed.name].read_text(encoding="utf-8"), end="")
        return
    path, overrides = find_config(parsed.name), readable(parsed.overrides)
    with named_errors(path):
        file_cfg = load_config(path)
        cfg, is_changed = file_cfg, bool(overrides) or "method" in file_cfg
        if is_changed:  # only then, since torchtune's parser takes seconds to import
            file_blocks: Any = OmegaConf.to_container(file_cfg)
            cfg, _ = merge(complete(file_blocks, overrides)[0], overrides)
            drop_null_blocks(cfg)
        for key in [str(key) for key in cfg if OmegaConf.is_missing(cfg, key)]:
            cfg[key] = f"<{key}>"
        model = RECIPES[recipe_of(cfg)]
        fill_in(cfg, model)
        if is_changed:
            check(cfg, model, user_keys=file_cfg)
        print(OmegaConf.to_yaml(cfg, resolve=True), end="")


def copy_config(parsed: argparse.Namespace) -> None:
    """Copies a config or a grid to a new file."""
    from finch.config.instantiate import find_config, grid_names

    is_grid = parsed.name in grid_names()
    source = grid_names()[parsed.name] if is_grid else find_config(parsed.name)
    text = source.read_text(encoding="utf-8")
    schema = Path(__file__).parents[1] / "config" / f"{'grid' if is_grid else 'finch'}.schema.json"
    text = re.sub(r"^(# yaml-language-server: \$schema=).*", rf"\g<1>{schema}", text)
    if parsed.file.exists():
        raise UserError(f"{parsed.file} exists; give another name")
    try:
        parsed.file.parent.mkdir(parents=True, exist_ok=True)
        parsed.file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{parsed.file} cannot be written ({error.strerror}); give another path") from error
    missing_keys = re.findall(r"^(\w+): \?\?\?", text, re.MULTILINE)
    overrides = "".join(f" {key}=..." for key in missing_keys)
    start = "finch sweep" if is_grid else "finch run --config"
    print(f"copied to {parsed.file}; start it with: {start} {parsed.file}{overrides}")


_COMMANDS = {
    "average": average,
    "chat": chat,
    "configs": configs,
    "data": judge.translate,
    "doctor": doctor.main,
    "evaluate": evaluate.evaluate,
    "gpu-check": gpu_check.gpu_check,
    "judge": judge.judge,
    "keys": list_keys,
    "methods": list_methods,
    "models": doctor.list_models,
    "report": report,
    "select-lr": sweep.select_lr,
    "wise-ft": wise_ft,
}
