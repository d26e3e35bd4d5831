"""Jinja's environment for chat templates. As a program it renders one under limits of time and memory, and so imports nothing of finch."""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS, MEMORY_BYTES = 5, 2 * 2**30
_ENDLESS = f"its chat template does not end well (a row took {CPU_SECONDS} s)"
RUNAWAY = (RecursionError, MemoryError, ArithmeticError)
"""What a template that does too much ends in; ranges that are too long are an ArithmeticError."""
RENDER_ERRORS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, *RUNAWAY)
"""The errors of a template that Jinja lets through."""


class _Generation(Extension):
    """The block that marks assistant turns in training templates; its content is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment(strftime_now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    """The dialect that chat templates are written for: transformers'."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # Jinja's own filter escapes <, > and & as HTML wants it, and the model would read the escapes.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    found.filters["tojson"] = to_json
    found.globals["raise_exception"] = refuse
    found.globals["strftime_now"] = strftime_now
    return found


def in_time(render: Callable[[Any], str], variables: Any) -> str:
    """What ``render`` returns. Raises TimeoutError, which says so, after ``CPU_SECONDS`` of this process, in its main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        return render(variables)
    _handle()
    # Time of this process, not of the clock: on a machine that is busy no template fails for it.
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, 1)  # again, where something in between has caught the first
    try:
        return render(variables)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def _handle() -> None:
    """Installs the handler once: one for each row would take a tenth of its time."""

    def end(*_: Any) -> None:
        raise TimeoutError(_ENDLESS)

    signal.signal(signal.SIGVTALRM, end)


def main() -> None:
    """Renders a conversation by the template on standard input; exits with a line where that takes too much."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # The signal at the limit of time would leave a core dump of up to 2 GiB.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = json.load(sys.stdin)
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    try:
        template = environment(datetime.now().strftime).from_string(job["source"])
        # Both ways in which templates are rendered later: with an answer, and for one.
        for messages, generation in ((turns, False), (turns[:1], True)):
            template.render(**job["variables"], messages=messages, add_generation_prompt=generation)
    except RUNAWAY as error:
        sys.exit(type(error).__name__)
    except RENDER_ERRORS:
        pass  # it may refuse this conversation, and says so where it is used


if __name__ == "__main__":
    main()
