"""How far an evaluation is, over the requests of all its models and tasks."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm

from finch.log import logger
from finch.progress import LINE_INTERVAL_S, duration, make_bar


class EvaluationProgress:
    """A bar in a terminal, else a log line every half minute. The time left follows from the requests that were run.

    Args:
        estimates: requests of each task to come, as far as they are known; corrected when a task starts.
        is_shown: whether this process shows it.
    """

    def __init__(self, estimates: list[int], *, is_shown: bool) -> None:
        self._estimates, self._is_shown = list(estimates), is_shown
        self._total = sum(estimates)
        self._done = self._num_cached = 0
        self._title = ""
        self._start_time = self._last_line_time = time.perf_counter()
        self._stack = contextlib.ExitStack()
        self._bar: Any = None
        if is_shown and sys.stderr.isatty():
            self._bar = make_bar(desc="", total=self._total, smoothing=0)
            self._stack.enter_context(logging_redirect_tqdm([logger]))

    def start_task(self, title: str) -> None:
        """The next task; ``title`` names it and its model."""
        self._title = title
        if self._bar is not None:
            self._bar.set_description_str(title)

    def expect(self, number: int) -> None:
        """The task turns out to have this number of requests."""
        self._total += number - (self._estimates.pop(0) if self._estimates else 0)
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
            logger.info(f"{self._title}: {self._done:,} of {self._total:,} requests, {duration(max(seconds, 0))} left")

    def close(self) -> None:
        """Ends the bar, so that what is printed next starts on a line of its own."""
        self._stack.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
