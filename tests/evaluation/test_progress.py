import pytest

from finch.base import progress as base
from finch.evaluation.progress import EvaluationProgress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(base.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("totals", "tasks", "free", "advanced", "seconds", "line"),
    [
        ([100, 300], [[100]], 0, 50, 31.0, "12% of all requests, 0:03:37 left"),  # 350 of 50 in 31 s
        ([200], [[200]], 100, 20, 40.0, "60% of all requests, 0:02:40 left"),  # cached answers do not shorten it
        ([100, 100], [[30, 70], [300]], 0, 200, 50.0, "50% of all requests, 0:00:50 left"),  # a corrected estimate
    ],
)
def test_line_has_the_time_left_of_all_tasks(clock, caplog, totals, tasks, free, advanced, seconds, line):
    progress = EvaluationProgress(totals, is_shown=True)
    for numbers in tasks:
        progress.start_task("base: tofu")
        for number in numbers:
            progress.expect(number)
    progress.advance(free, is_free=True)
    clock[0] = seconds
    progress.advance(advanced, is_free=False)
    assert f"base: tofu: {line}" in caplog.text
