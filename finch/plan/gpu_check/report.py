"""What a check has seen: lines of phases, as JSON and as a Markdown page."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finch.base.errors import UserError, one_line
from finch.base.files import replace_text

OK, FAILED, MEASURED, NOT_RUN = "ok", "failed", "measured", "not run"
LATE = "not done before the phase's deadline"
NOT_QUICK = "not with --quick: it takes too long"


class Late(Exception):
    """A deadline has come before a case was seen: it is not run, since no machine is wrong because it is slow."""


@dataclass(frozen=True)
class Line:
    """One thing that was looked at; ``status`` is ``"ok"``, ``"failed"``, ``"measured"`` (nothing was expected of it) or ``"not run"``."""

    name: str
    status: str
    seen: Any = None
    expected: Any = None
    tolerance: Any = None
    note: str = ""


@dataclass
class Check:
    """What a phase is given, and where it records what it sees.

    Attributes:
        folder: for the phase's files; removed after the check.
        ranks: GPUs; with ``device="cpu"`` processes.
        quick: whether fewer cases are run.
        end: by ``time.time()``, when the phase is ended.
        lines: recorded so far by this process.
    """

    device: str
    folder: Path
    ranks: int = 1
    quick: bool = True
    end: float = math.inf
    lines: list[Line] = field(default_factory=list)

    def at_most(self, name: str, seen: float, tolerance: float, *, expected: Any = 0, note: str = "") -> None:
        """An error that must not be above ``tolerance``; NaN is."""
        self._add(Line(name, OK if seen <= tolerance else FAILED, seen, expected, tolerance, note))

    def equal(self, name: str, seen: Any, expected: Any, *, note: str = "") -> None:
        self._add(Line(name, OK if seen == expected else FAILED, seen, expected, "equal", note))

    def measured(self, name: str, seen: Any, *, expected: Any = None, note: str = "") -> None:
        """A number nothing is compared with; ``expected`` is what was computed before."""
        self._add(Line(name, MEASURED, seen, expected, note=note))

    def not_run(self, name: str, why: str) -> None:
        self._add(Line(name, NOT_RUN, note=why))

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Runs one case of several: an error becomes a failed line, :class:`Late` one that is not run, and the next case is run."""
        try:
            yield
        except Late:
            self.not_run(name, LATE)
        except Exception as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self._add(Line(name, FAILED, note=one_line(f"{kind}{error}")))

    def has_time(self, name: str, seconds: float = 0.0) -> bool:
        """Whether ``seconds`` are left before the deadline; otherwise the case is recorded as not run."""
        if time.time() + seconds < self.end:
            return True
        self.not_run(name, LATE)
        return False

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        with (self.folder / "lines.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(asdict(line), default=str))  # after what a process that was ended has begun

    def all_lines(self) -> list[Line]:
        """What all processes of the phase have recorded, also one that was ended while it wrote."""
        file, lines = self.folder / "lines.jsonl", []
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):
                lines.append(Line(**json.loads(text)))
        return lines


@dataclass
class PhaseReport:
    """A phase that has ended; ``stacks`` of those of its processes that were ended at a deadline."""

    number: int
    title: str
    deadline_s: float
    status: str = "interrupted"
    seconds: float = 0.0
    lines: list[Line] = field(default_factory=list)
    stacks: str = ""

    def __str__(self) -> str:
        """What a terminal shows: the status and the failed lines."""
        counts = Counter(line.status for line in self.lines)
        numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
        text = [f"{self.number}. {self.title}: {self.status} ({numbers}; {self.seconds:.0f} s)"]
        for line in self.lines:
            if line.status == FAILED:
                seen = f"seen {_format(line.seen)}, tolerance {_format(line.tolerance)} " * (line.seen is not None)
                text.append(f"   failed: {line.name}: {seen}{line.note}")
        return "\n".join(text)


def write(out: Path, machine: dict[str, Any], phases: list[PhaseReport]) -> None:
    """Writes both files anew, ``out`` with .json and .md."""
    content = {"machine": machine, "phases": [asdict(phase) for phase in phases]}
    texts = {".json": json.dumps(content, indent=1) + "\n", ".md": _page(out.name, machine, phases)}
    for suffix, text in texts.items():
        replace_text(out.with_suffix(suffix), text)


def _page(title: str, machine: dict[str, Any], phases: list[PhaseReport]) -> str:
    text = [f"# finch {title}", "", *(f"- {name}: {value}" for name, value in machine.items())]
    for phase in phases:
        text += ["", f"## {phase.number}. {phase.title}: {phase.status} ({phase.seconds:.0f} s)", ""]
        text += ["| | expected | seen | tolerance | |", "|---|---|---|---|---|"]
        for line in phase.lines:
            cells = [line.name, *map(_format, (line.expected, line.seen, line.tolerance))]
            cells.append(f"{line.status}: {line.note}" if line.note else line.status)
            text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if phase.stacks:
            text += ["", "Stacks:", "", "```", phase.stacks, "```"]
    return "\n".join(text) + "\n"


def _format(value: Any) -> str:
    """A number with three digits, or what it is."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"
