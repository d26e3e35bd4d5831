"""What the commands' parsers share: errors in one line that name the nearest word, commands in groups, and completion in shells."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from finch.base.errors import UsageError
from finch.config.instantiate import config_names, did_you_mean, grid_names


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors look like all others of finch. Help has colours where rich-argparse is installed."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        with contextlib.suppress(ModuleNotFoundError):  # it comes with the extra torchtune
            from rich_argparse import RichHelpFormatter

            class Formatter(RichHelpFormatter):
                group_name_formatter = str  # titles as they are

            return Formatter(prog=self.prog)
        return super()._get_formatter()

    def error(self, message: str) -> NoReturn:
        """Raises UsageError: in place of the usage, what was meant."""
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            # Python's versions differ in whether the choices are quoted.
            known = re.findall(r"[\w.-]+", found[2])
            is_word = re.search("COMMAND|KIND|ACTION", message)
            message = f"{self.prog} {found[1]} does not exist" if is_word else message
            message += did_you_mean(found[1], known) if "choose from" not in message else ""
        elif found := re.match(r"unrecognized arguments: (\S+)", message):
            known = [option for action in self._actions for option in action.option_strings]
            message = f"{self.prog} does not take {found[1]}{did_you_mean(found[1], known)}"
        raise UsageError(f"{message}{'' if message.endswith('?') else ';'} see {self.prog} --help")


class CommandsParser(Parser):
    """A parser whose help lists its commands in groups.

    Args:
        groups: each title's commands and what they do.
    """

    def __init__(self, groups: Mapping[str, Mapping[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self._groups = groups

    def format_help(self) -> str:
        """The usage, the groups, and the options."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, commands in self._groups.items():
            formatter.start_section(title)
            # As positional arguments, a line each: argparse itself puts all commands into one group.
            formatter.add_arguments([argparse.Action([], name, help=text) for name, text in commands.items()])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def positive(kind: type[float]) -> Callable[[str], Any]:
    """The type of an option that takes whole numbers of at least 1 (``int``), or numbers above 0 (``float``)."""

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (value := kind(text)) > 0:
                return value
        expected = "a whole number of at least 1" if kind is int else "a number above 0"
        raise argparse.ArgumentTypeError(f"{text} must be {expected}")

    return convert


def names(text: str) -> list[str]:
    """The values of an option that takes several with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def complete_in_shell(parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Answers a shell that asks for completions, and ends the process then.

    Args:
        commands: those that take configs or grids, and ``key=value``, without arguments of the parser's own.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ModuleNotFoundError:  # it comes with the extra torchtune
        return
    for name, command in commands.items():
        names = grid_names if name == "sweep" else config_names
        # For completion only: these commands read such words themselves.
        words: Any = command.add_argument("words", nargs="*")
        words.completer = lambda prefix, names=names, **_: [*names(), *_keys(prefix)]
    argcomplete.autocomplete(parser)


def _keys(prefix: str) -> Sequence[str]:
    from finch.config.key_search import all_keys

    # Before the first letter the many keys would hide the configs.
    return [f"{key}=" for key in all_keys() if prefix and key.startswith(prefix)]
