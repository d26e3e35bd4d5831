"""How far an evaluation is: requests of all tasks, and the time left in a log."""

import logging

import pytest
from helpers.evaluation import instances

from finch.evaluation import progress as module
from finch.evaluation.progress import EvaluationProgress, count_requests


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_log_line_has_the_time_left_of_all_tasks(clock, caplog):
    caplog.set_level(logging.INFO)
    progress = EvaluationProgress([100, 300], is_shown=True)
    progress.start_task("base: hellaswag")
    progress.expect(100)
    clock[0] = 31.0
    progress.advance(50, is_cached=False)
    assert "base: hellaswag: 12% of all requests, 0:03:37 left" in caplog.text  # 350 of 50 in 31 s


def test_cached_answers_do_not_shorten_the_time_left(clock, caplog):
    caplog.set_level(logging.INFO)
    progress = EvaluationProgress([200], is_shown=True)
    progress.start_task("base: hellaswag")
    progress.expect(200)
    progress.advance(100, is_cached=True)
    clock[0] = 40.0
    progress.advance(20, is_cached=False)
    assert "60% of all requests, 0:02:40 left" in caplog.text


def test_tasks_correct_their_estimates(clock, caplog):
    caplog.set_level(logging.INFO)
    progress = EvaluationProgress([100, 100], is_shown=True)
    progress.start_task("base: sciknoweval")
    progress.expect(30)
    progress.expect(70)  # of another kind
    progress.advance(100, is_cached=False)
    progress.start_task("base: tofu")
    progress.expect(300)
    clock[0] = 50.0
    progress.advance(100, is_cached=False)
    assert "base: tofu: 50% of all requests, 0:00:50 left" in caplog.text


def test_generated_answers_count_as_several(clock):
    long = instances("generate_until", [("a", {"max_gen_toks": 100}), ("b", {"max_gen_toks": 100})])
    assert count_requests(long) == 2 + 2 * 20
    assert count_requests(instances("loglikelihood", [("a", "b")] * 3)) == 3
