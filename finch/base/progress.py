"""How far a run is, or whatever has items: a bar in a terminal, and at most a line per half minute in a log file or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from finch.base import status
from finch.base.log import logger

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_INTERVAL_S = 30.0
_BAR_FORMAT = "{desc} {n_fmt}/{total_fmt} {remaining} left{postfix} {bar}"  # a narrow terminal cuts off the right end
Item = TypeVar("Item")


class Progress:
    """How much of a total is done. The time left follows from the mean speed, which includes all interruptions.

    Args:
        total: how much there is to do.
        is_shown: whether this process shows it.
        leave: whether the bar stays in the terminal when it ends.
    """

    def __init__(self, total: int, *, is_shown: bool, leave: bool = True) -> None:
        self._total, self._is_shown, self._leave, self._title = total, is_shown, leave, ""
        self._bar: tqdm | None = None
        self._stack = contextlib.ExitStack()
        self.start(0)

    def start(self, done: int) -> None:
        """Starts the clock; ``done`` was done before."""
        self._done = self._num_free = done  # free: took no time
        self._start_time = self._last_line_time = time.perf_counter()

    def set_title(self, title: str) -> None:
        """Says what is going on; the first title opens the bar."""
        self._title = title
        self._report()
        if self._bar is not None:
            self._bar.set_description_str(title)
        elif self._is_shown and sys.stderr.isatty():
            self._bar = _make_bar(desc=title, total=self._total, initial=self._done, leave=self._leave)
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._stack.enter_context(logging_redirect_tqdm([logger]))  # log lines appear above the bar

    def advance(self, number: int, *, is_free: bool = False) -> None:
        """``number`` more are done; ``is_free``: they took no time."""
        self._done += number
        self._num_free += number if is_free else 0
        if self._bar is not None:
            # tqdm leaves out of its mean speed what it takes for done initially.
            self._bar.initial = self._num_free
            self._bar.update(number)
        self._report()

    def close(self) -> None:
        """Ends the bar, so that what is printed next starts on a new line."""
        self._stack.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def time_left(self) -> str:
        """The time left, as :func:`duration` writes it."""
        return duration(self._seconds_left())

    def _seconds_left(self) -> float:
        seconds = time.perf_counter() - self._start_time
        return seconds / max(self._done - self._num_free, 1) * max(self._total - self._done, 0)

    def _report(self) -> None:
        if self._is_shown:
            left = round(self._seconds_left()) if self._done > self._num_free else None  # before that there is no speed
            status.report(phase=self._title, done=self._done, total=self._total, seconds_left=left)

    def is_line_due(self) -> bool:
        """Whether a log file should get a line now."""
        is_waiting = time.perf_counter() - self._last_line_time < LINE_INTERVAL_S
        return self._is_shown and self._bar is None and not is_waiting

    def log(self, line: str) -> None:
        logger.info(line)
        self._last_line_time = time.perf_counter()


class RunProgress(Progress):
    """The optimizer steps of a run, over all of its epochs. A log file also gets the last step of each epoch.

    Args:
        total: steps of the run.
        epochs: how many the run has.
        is_shown: whether this rank shows it.
    """

    def __init__(self, total: int, epochs: int, *, is_shown: bool) -> None:
        super().__init__(total, is_shown=is_shown)
        self._epochs = epochs
        self._pending_line: str | None = None

    def start_epoch(self, epoch: int) -> None:
        """Says which epoch begins; ``epoch`` counts from 0."""
        self.set_title(f"epoch {epoch + 1}/{self._epochs}")

    def update(self, line: Mapping[str, Any], tokens_per_second: float) -> None:
        """Shows a step.

        Args:
            line: step, epoch, loss (nats), ema_loss (nats or None) and lr.
            tokens_per_second: target tokens, of all ranks.
        """
        if not self._is_shown:
            return
        ema = "" if line["ema_loss"] is None else f"{line['ema_loss']:.4f}"
        if self._bar is not None:
            text = (
                f"loss {line['loss']:.4f}{ema and f', ema {ema}'}, lr {line['lr']:.2e}, {tokens_per_second:,.0f} tok/s"
            )
            # advance() below draws the bar, no more often than tqdm's interval.
            self._bar.set_postfix_str(text, refresh=False)
        self.advance(line["step"] - self._done)
        self._pending_line = (
            f"epoch {line['epoch'] + 1}/{self._epochs}, step {line['step']} of {self._total}: loss {line['loss']:.4f}"
            f"{ema and f', EMA {ema}'}, learning rate {line['lr']:.2e}, {tokens_per_second:,.0f} tokens/s, {self.time_left()} left"
        )
        if self.is_line_due():
            self._log_pending()

    def end_epoch(self) -> None:
        """Shows the last step."""
        if self._bar is not None:
            self._bar.refresh()
        self._log_pending()

    def close(self) -> None:
        """Ends the bar; after an error the last step is shown."""
        self._log_pending()
        super().close()

    def _log_pending(self) -> None:
        if self._pending_line is not None and self._bar is None:
            self.log(self._pending_line)
        self._pending_line = None


def track(items: Iterable[Item], *, title: str, total: int, unit: str, is_shown: bool = True) -> Iterator[Item]:
    """Yields ``items`` and shows how many of ``total`` have been yielded; nothing in a log file if it takes less than half a minute.

    Args:
        unit: the name of one item.
    """
    progress = Progress(total, is_shown=is_shown, leave=False)
    progress.set_title(title)
    try:
        for done, item in enumerate(items):
            # Before the first item has been done there is no speed to tell the time left by.
            if done and progress.is_line_due():
                progress.log(f"{title}: {unit} {done} of {total}, {progress.time_left()} left")
            yield item
            progress.advance(1)
    finally:
        progress.close()


def duration(seconds: float) -> str:
    """A time in seconds, written as ``0:05:12``."""
    return str(timedelta(seconds=round(seconds)))


def _make_bar(**options: Any) -> tqdm:
    """A bar as wide as the terminal, or as the environment variable COLUMNS says."""
    from tqdm import tqdm

    size = os.terminal_size((0, 0))
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(sys.stderr.fileno())
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() or not size.columns:  # without a size tqdm would show nothing
        options.update(ncols=int(columns) if columns.isdigit() else 80, nrows=size.lines or 24)
    else:
        options["dynamic_ncols"] = True
    return tqdm(bar_format=_BAR_FORMAT, smoothing=0, **options)  # smoothing=0: the mean speed
