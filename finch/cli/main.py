"""The `finch` command: a table of commands, each a module of the room that it belongs to, imported when it is the one that is typed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from finch import __version__
from finch.base.errors import report_user_errors
from finch.base.extras import require_extras
from finch.base.log import quiet_dependencies
from finch.cli.arguments import CommandsParser, Parser, complete_in_shell
from finch.distributed.processes import limit_spinning

_COMMANDS = {
    "train": {
        "run": ("cli.run", "train: a config's recipe on one process or several ranks"),
        "check": ("plan.commands.check", "check a run and estimate its memory, without training"),
        "sweep": ("study.commands.sweep", "train and evaluate the runs of a grid, here or as a Slurm job array"),
        "average": ("evaluation.commands.average", "average a run and its base model, keeping most of what it learned"),
    },
    "measure": {
        "chat": ("evaluation.commands.chat", "the pretrained and the tuned model's answers to a prompt, side by side"),
        "evaluate": ("evaluation.commands.evaluate", "measure what tuned models have learned and forgotten"),
        "report": ("study.commands.report", "what runs have learned and what they have forgotten: a page and tables"),
    },
    "look up": {
        "list": ("plan.commands.lists", "methods, models, and the keys of a config; configs, to be shown and copied")
    },
    "machine and cluster": {
        "doctor": ("plan.commands.doctor", "check the installed packages and the machine"),
        "slurm": ("integrations.commands.slurm", "submit a run of TorchTitan as a Slurm job"),
    },
}
"""The commands by group and name: the module below ``finch``, with ``main`` and perhaps ``add_arguments``, and what it does."""
_MODES = {
    "run": ("--slurm", "cli.slurm_submit", "check a run's config and submit it with sbatch"),
    "check": ("--exact", "plan.commands.estimate", "memory, collectives and time of a step, from one on fake tensors"),
    "average": ("--tuned DIR", "evaluation.commands.wise_ft", "average a model, run or sweep with --base at any alpha"),
    "evaluate": ("--judge URL", "evaluation.commands.judge", "score the language task by a model on a server"),
    "report": ("--select-lr", "study.commands.select_lr", "the largest learning rate of a sweep that forgets little"),
    "doctor": ("--gpu", "plan.commands.gpu_check", "check that this machine's GPUs compute a training step right"),
}
"""The option that makes a command another one, of a module with its own arguments: as it is typed, that module, and what it does."""
_READ_ALL = ("run", "check")  # which read all that follows themselves
_WITH_CONFIG = (*_READ_ALL, "slurm", "sweep")  # which take key=value and others' options


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    quiet_dependencies()
    limit_spinning(os.environ)  # before torch is imported
    arguments = sys.argv[1:] if arguments is None else arguments
    # A shell that completes passes no arguments; what has been typed is in COMP_LINE.
    typed = os.environ["COMP_LINE"].split()[1:] if "_ARGCOMPLETE" in os.environ else arguments
    name = next((word for word in typed if not word.startswith("-")), None)
    parser, commands, module = build_parser(name, typed)
    complete_in_shell(parser, {name: commands[name] for name in _WITH_CONFIG})
    parsed, rest = parser.parse_known_args(arguments)
    if parsed.command in _WITH_CONFIG:
        module.main(parsed, rest)
    elif rest:
        # The command's own parser knows the options among which the nearest one is sought.
        commands.get(parsed.command, parser).error(f"unrecognized arguments: {' '.join(rest)}")
    elif module is not None:
        module.main(parsed)
    else:
        parser.print_help()
        sys.exit(2)


def build_parser(
    chosen: str | None = None, words: Sequence[str] = ()
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser], Any]:
    """The parser of `finch`, those of its commands by their names, and the module of the ``chosen`` one, which alone has its arguments: those that belong
    to the ``words`` that are typed."""
    helps = {group: {name: text for name, (_, text) in commands.items()} for group, commands in _COMMANDS.items()}
    parser = CommandsParser(
        helps,
        prog="finch",
        description="Forgetting-aware fine-tuning for the PyTorch-native stack.",
        epilog="Exit codes: 0; 1, a mistake in what the arguments name, or a failure; 2, arguments that a command does not take; 3, a limit of evaluate that is exceeded.",
    )
    parser.add_argument("--version", action="version", version=f"finch {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    module = None
    for name, (path, text) in {name: each for group in _COMMANDS.values() for name, each in group.items()}.items():
        option, mode, mode_text = _MODES.get(name, ("", "", ""))
        flag, _, metavar = option.partition(" ")
        is_mode = name == chosen and bool(flag) and flag in [word.partition("=")[0] for word in words]
        if is_mode:
            path, text = mode, mode_text
        command = subparsers.add_parser(
            name,
            prog=f"finch {name} {option}" if is_mode else None,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            # Commands of _READ_ALL print a help of their own.
            add_help=is_mode or name not in _READ_ALL,
            # An abbreviation would take an option that belongs to torchrun or sbatch.
            allow_abbrev=False,
        )
        if name == chosen:
            if name in _READ_ALL:
                require_extras(f"finch {name}", "torchtune")
            module = importlib.import_module(f"finch.{path}")
            getattr(module, "add_arguments", lambda _: None)(command)
            if flag:
                kind: Any = {"metavar": metavar} if metavar else {"action": "store_true"}
                note = argparse.SUPPRESS if is_mode else f"{mode_text}; see finch {name} {option} --help"
                command.add_argument(flag, help=note, **kind)
    return parser, subparsers.choices, module
