"""What an sbatch script says: sbatch's options in its header, and the shell variables that it sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from finch.errors import UserError

# The options that have a short form and are read here.
_SHORT = {"N": "nodes", "t": "time", "o": "output", "G": "gpus"}
_ONE_OPTION = re.compile(r"#SBATCH\s+--([\w-]+)(?:[\s=]\s*[^\s#]+)?\s*(?:#.*)?")


def options_of(script: str) -> dict[str, str]:
    """sbatch's options in a script's header, without their dashes; a flag's value is empty."""
    found: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s(.*)", script, flags=re.MULTILINE):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote too few, which sbatch reports
            continue
        for word, after in zip(words, [*words[1:], "-"], strict=True):
            if not word.startswith("-"):
                continue
            name, equals, value = word.partition("=")
            if not word.startswith("--"):
                name, equals, value = f"--{_SHORT.get(word[1:2], word[1:2])}", word[2:], word[2:]
            found[name[2:]] = value if equals else "" if after.startswith("-") else after
    return found


def value_of(script: str, name: str, quoted: bool = False) -> str:
    """What a script sets a variable to, in its first line that does; with ``quoted``, as it stands there."""
    found = re.search(rf"""^{name}=((?:"[^"\n]*"|'[^'\n]*'|[^\s"'#])*)""", script, flags=re.MULTILINE)
    if found is None:
        return ""
    return found[1] if quoted else "".join(shlex.split(found[1]))


def seconds_of(limit: str) -> int | None:
    """Slurm's time limits: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None: no limit, or none of these."""
    found = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+))?|(?:(\d+):)??(\d+))(?::(\d+))?", limit)
    if found is None:
        return None
    days, day_hours, day_minutes, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return (days * 24 + day_hours + hours) * 3600 + (day_minutes + minutes) * 60 + seconds or None


def fill_in(script: str, header: Mapping[str, str | None], variables: Mapping[str, str]) -> str:
    """The script with sbatch's options and its own variables set.

    Args:
        script: a shell script with a block of ``#SBATCH --name=value`` lines and lines ``NAME=...``.
        header: sbatch's options without their dashes; an empty value is a flag, None removes the script's line.
        variables: shell variables, their values quoted as the shell needs it.

    Raises:
        UserError: the script has no ``#SBATCH`` lines, or sets a variable nowhere.
    """
    lines: list[str] = []
    after_header, left = None, dict(header)
    for line in script.splitlines():
        found = _ONE_OPTION.fullmatch(line)  # where there are more, ours go below: the later one holds
        if found and found[1] in header:
            value = left.pop(found[1], None)
            lines += [] if value is None else [_option(found[1], value)]
        else:
            lines.append(line)
        if line.startswith("#SBATCH"):
            after_header = len(lines)
    if after_header is None:
        raise UserError("--script has no #SBATCH lines; start from what --dry-run prints without it")
    lines[after_header:after_header] = [_option(name, value) for name, value in left.items() if value is not None]
    filled = "\n".join(lines) + "\n"
    for name, value in variables.items():
        line = f"{name}={value}".replace("\\", r"\\")
        filled, number = re.subn(rf"^{name}=(?:\((?:\n  .*)*\n\)|.*)$", line, filled, count=1, flags=re.MULTILINE)
        if not number:
            raise UserError(f"--script has no line {name}=..., which is to be filled in; put one where the script's is")
    return filled


def _option(name: str, value: str) -> str:
    return f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")
