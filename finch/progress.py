"""How far a run is: a bar in a terminal, and in a log file a line every half minute and at each epoch's end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from finch.log import logger

LINE_INTERVAL_S = 30.0
_BAR_FORMAT = "{desc} {n_fmt}/{total_fmt} {remaining} left{postfix} {bar}"  # a narrow terminal cuts off the right end
Item = TypeVar("Item")


class RunProgress:
    """The progress of a run over all of its epochs.

    Args:
        total: optimizer steps of the run.
        epochs: of the run.
        is_shown: whether this rank shows it.
    """

    def __init__(self, total: int, epochs: int, *, is_shown: bool) -> None:
        self._total, self._epochs, self._is_shown = total, epochs, is_shown
        self._bar: tqdm | None = None
        self._stack = contextlib.ExitStack()
        self._first_step = 0
        self._start_time = self._last_line_time = time.perf_counter()
        self._pending_line: str | None = None

    def start(self, done: int) -> None:
        """Starts the clock; ``done`` steps were taken before."""
        self._first_step = done
        self._start_time = self._last_line_time = time.perf_counter()

    def start_epoch(self, epoch: int) -> None:
        """``epoch`` counts from 0."""
        title = f"epoch {epoch + 1}/{self._epochs}"
        if self._bar is not None:
            self._bar.set_description_str(title)
        elif self._is_shown and sys.stderr.isatty():
            # smoothing=0: the time left follows from the mean speed, with validation and saving
            self._bar = make_bar(desc=title, total=self._total, initial=self._first_step, smoothing=0)
            self._stack.enter_context(logging_redirect_tqdm([logger]))  # log lines appear above the bar

    def update(self, line: Mapping[str, Any], tokens_per_second: float) -> None:
        """Shows a step.

        Args:
            line: step, epoch, loss (nats), ema_loss (nats or None) and lr.
            tokens_per_second: target tokens, of all ranks.
        """
        if not self._is_shown:
            return
        step, has_ema = line["step"], line["ema_loss"] is not None
        if self._bar is not None:
            ema = f", ema {line['ema_loss']:.4f}" if has_ema else ""
            text = f"loss {line['loss']:.4f}{ema}, lr {line['lr']:.2e}, {tokens_per_second:,.0f} tok/s"
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        ema = f", EMA {line['ema_loss']:.4f}" if has_ema else ""
        self._pending_line = (
            f"epoch {line['epoch'] + 1}/{self._epochs}, step {step} of {self._total}: loss {line['loss']:.4f}{ema}, "
            f"learning rate {line['lr']:.2e}, {tokens_per_second:,.0f} tokens/s, {self._time_left(step)} left"
        )
        if time.perf_counter() - self._last_line_time >= LINE_INTERVAL_S:
            self._log_pending()

    def end_epoch(self) -> None:
        """Shows the last step."""
        if self._bar is not None:
            self._bar.refresh()
        self._log_pending()

    def close(self) -> None:
        """Ends the bar, so that what is printed next starts on a line of its own. After an error the last step is shown."""
        self._log_pending()
        self._stack.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _log_pending(self) -> None:
        if self._pending_line is not None:
            logger.info(self._pending_line)
            self._pending_line, self._last_line_time = None, time.perf_counter()

    def _time_left(self, step: int) -> str:
        seconds = time.perf_counter() - self._start_time
        return duration(seconds / max(step - self._first_step, 1) * max(self._total - step, 0))


def track(items: Iterable[Item], *, title: str, total: int, unit: str, is_shown: bool = True) -> Iterator[Item]:
    """Yields ``items`` and shows how many of ``total`` have been yielded; nothing in a log file if it takes less than half a minute.

    Args:
        unit: the name of one item.
    """
    if is_shown and sys.stderr.isatty():
        with make_bar(total=total, desc=title, leave=False) as bar:
            for item in items:
                yield item
                bar.update()
        return
    start = last_line_time = time.perf_counter()
    for done, item in enumerate(items):
        now = time.perf_counter()
        if is_shown and done and now - last_line_time >= LINE_INTERVAL_S:
            left = duration((now - start) / done * (total - done))
            logger.info(f"{title}: {unit} {done} of {total}, {left} left")
            last_line_time = now
        yield item


def duration(seconds: float) -> str:
    """``0:05:12``"""
    return str(timedelta(seconds=round(seconds)))


def make_bar(**options: Any) -> tqdm:
    """A bar as wide as the terminal, or as the environment variable COLUMNS says."""
    size = os.terminal_size((0, 0))
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(sys.stderr.fileno())
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() or not size.columns:  # without a size tqdm would show nothing
        options.update(ncols=int(columns) if columns.isdigit() else 80, nrows=size.lines or 24)
    else:
        options["dynamic_ncols"] = True
    return tqdm(bar_format=_BAR_FORMAT, **options)
