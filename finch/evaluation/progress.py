"""How far an evaluation is, over the requests of all its models and tasks.

A generated answer takes far longer than a log-likelihood, so that it counts as several requests.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm

from finch.log import logger
from finch.progress import LINE_INTERVAL_S, duration, make_bar

_TOKENS_A_REQUEST = 5
"""Generated tokens that take about as long as a log-likelihood; measured on a CPU, estimated for a GPU."""


def count_requests(requests: Iterable[Any], default_max_tokens: int = 256) -> int:
    """How many requests lm-eval's ``Instance`` objects count as."""
    number = 0
    for request in requests:
        number += 1
        if request.request_type == "generate_until":
            number += request.args[1].get("max_gen_toks", default_max_tokens) // _TOKENS_A_REQUEST
    return number


class EvaluationProgress:
    """A bar in a terminal, else a log line every half minute. The time left follows from the requests that were run.

    Args:
        estimates: requests of each task to come, about; corrected when a task starts. As ``count_requests`` counts.
        is_shown: whether this process shows it.
    """

    def __init__(self, estimates: list[int], *, is_shown: bool) -> None:
        self._estimates, self._is_shown = list(estimates), is_shown
        self._total = sum(estimates)
        self._done = self._num_cached = self._estimate = 0
        self._title = ""
        self._start_time = self._last_line_time = time.perf_counter()
        self._stack = contextlib.ExitStack()
        self._bar: Any = None
        if is_shown and sys.stderr.isatty():
            self._bar = make_bar(desc="", total=self._total, smoothing=0)
            self._stack.enter_context(logging_redirect_tqdm([logger]))

    def set_title(self, title: str) -> None:
        """What is going on."""
        self._title = title
        if self._bar is not None:
            self._bar.set_description_str(title)

    def start_task(self, title: str) -> None:
        """The next task; ``title`` names it and its model."""
        self.set_title(title)
        self._estimate = self._estimates.pop(0) if self._estimates else 0

    def expect(self, number: int) -> None:
        """The task has this number of requests; in several calls where it has several kinds of them."""
        self._total += number - self._estimate
        self._estimate = 0
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()

    def advance(self, number: int, *, is_cached: bool) -> None:
        """So many requests were answered; cached ones took no time."""
        self._done += number
        self._num_cached += number if is_cached else 0
        if self._bar is not None:
            self._bar.initial = self._num_cached
            self._bar.update(number)
            return
        now = time.perf_counter()
        if self._is_shown and now - self._last_line_time >= LINE_INTERVAL_S:
            self._last_line_time = now
            seconds = (now - self._start_time) / max(self._done - self._num_cached, 1) * (self._total - self._done)
            logger.info(
                f"{self._title}: {self._done / self._total:.0%} of all requests, {duration(max(seconds, 0))} left"
            )

    def close(self) -> None:
        """Ends the bar, so that what is printed next starts on a line of its own."""
        self._stack.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
