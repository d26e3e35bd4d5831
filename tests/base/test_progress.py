"""A log file gets lines and a terminal a bar; both count the run, not the epoch."""

import io
import logging
import os
import re

import pytest

from finch.base import progress
from finch.base.progress import RunProgress, track


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def open_terminal(monkeypatch):
    """stderr as a terminal of 40 columns; called in the test, since pytest replaces stderr after fixtures."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")
    return stream


def step(number, epoch=0, ema_loss=1.5):
    return {"step": number, "epoch": epoch, "loss": 1.25, "ema_loss": ema_loss, "lr": 2e-5}


def run_steps(shown, clock, seconds=10.0, done=0):
    """Two epochs of four steps."""
    shown.start(done)
    for epoch in (0, 1):
        shown.start_epoch(epoch)
        for number in range(max(4 * epoch, done) + 1, 4 * epoch + 5):
            clock.now += seconds
            shown.update(step(number, epoch), 5512.3)
        shown.end_epoch()
    shown.close()


def test_log_file_gets_a_line_each_half_minute_and_epoch(caplog, clock):
    run_steps(RunProgress(8, 2, is_shown=True), clock)
    assert [message.split(":")[0] for message in caplog.messages] == [
        "epoch 1/2, step 3 of 8",
        "epoch 1/2, step 4 of 8",
        "epoch 2/2, step 7 of 8",
        "epoch 2/2, step 8 of 8",
    ]
    assert caplog.messages[0].endswith(
        ": loss 1.2500, EMA 1.5000, learning rate 2.00e-05, 5,512 tokens/s, 0:00:50 left"
    )


def test_time_left_of_a_resumed_run_counts_its_own_steps(caplog, clock):
    run_steps(RunProgress(8, 2, is_shown=True), clock, seconds=40, done=2)
    assert [message.rpartition(", ")[2] for message in caplog.messages] == [
        *("0:03:20 left", "0:02:40 left", "0:02:00 left", "0:01:20 left", "0:00:40 left", "0:00:00 left")
    ]


def test_last_step_before_an_error_is_shown_without_an_ema_that_is_absent(caplog, clock):
    shown = RunProgress(8, 2, is_shown=True)
    shown.start(0)
    shown.update(step(1, ema_loss=None), 1.0)
    shown.close()
    assert "step 1 of 8: loss 1.2500, learning rate" in caplog.text


def test_another_rank_shows_nothing(caplog, clock, capsys):
    run_steps(RunProgress(8, 2, is_shown=False), clock)
    assert list(track([1, 2], title="rows", total=2, unit="batch", is_shown=False)) == [1, 2]
    assert caplog.messages == []
    assert capsys.readouterr().err == ""


def test_terminal_bar_counts_the_run_within_its_width(clock, monkeypatch):
    terminal = open_terminal(monkeypatch)
    run_steps(RunProgress(8, 2, is_shown=True), clock, done=2)
    frames = [frame for frame in re.split(r"[\r\n]", terminal.getvalue()) if frame.strip()]
    assert frames[0].startswith("epoch 1/2 2/8 ? left")
    assert max(map(len, frames)) <= 40
    assert "\x1b[3" not in terminal.getvalue()  # no colour


def test_log_lines_appear_above_the_bar(clock, monkeypatch):
    terminal = open_terminal(monkeypatch)
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(progress.logger, "handlers", [handler])
    monkeypatch.setattr(progress.logger, "propagate", False)
    shown = RunProgress(8, 2, is_shown=True)
    shown.start(0)
    shown.start_epoch(0)
    progress.logger.info("saved")
    shown.close()
    assert "\rsaved\n" in terminal.getvalue()
    assert progress.logger.handlers == [handler]


def test_terminal_without_a_size_gets_a_bar(clock, monkeypatch):
    terminal = open_terminal(monkeypatch)
    monkeypatch.delenv("COLUMNS")
    terminal.fileno = lambda: 2
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    run_steps(RunProgress(8, 2, is_shown=True), clock)
    assert "epoch 2/2 8/8 00:00 left, loss 1.2500, ema 1.5000, lr 2.00e-05, 5,512 tok/s" in terminal.getvalue()


@pytest.mark.parametrize(
    ("seconds", "shown"), [(3.0, []), (20.0, ["2 of 7, 0:01:40", "4 of 7, 0:01:00", "6 of 7, 0:00:20"])]
)
def test_track_in_a_log_file(seconds, shown, caplog, clock, capsys):
    for _ in track(range(7), title="validation", total=7, unit="batch"):
        clock.now += seconds
    assert caplog.messages == [f"validation: batch {text} left" for text in shown]
    assert "\r" not in capsys.readouterr().err


def test_track_in_a_terminal(monkeypatch):
    terminal = open_terminal(monkeypatch)
    assert list(track("abc", title="validation", total=3, unit="batch")) == ["a", "b", "c"]
    assert "validation 0/3" in terminal.getvalue()
