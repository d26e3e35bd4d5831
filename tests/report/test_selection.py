"""Which tasks and probes are compared, and which names of them are refused."""

import json

import pytest
from helpers.evaluated_runs import add_losses, make_run, make_sweep

from finch.errors import UserError
from finch.report.measures import compare
from finch.report.runs import read_runs
from finch.report.selection import select_measures


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with evaluated old tasks in points and in nats, and with probes."""
    folder = tmp_path_factory.mktemp("sweep")
    cells = make_sweep(folder, methods=("sft", "finch"), rates=(1e-4,), seeds=(0,), n=20)
    add_losses(folder, cells)
    for cell in cells:
        lines = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if "probe/stories/loss" in line:
                line["probe/stories/kl"] = line["probe/stories/loss"] - 1.4
        (cell / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_runs(cells)


def names(measures):
    return [one.name for one in measures]


def error_of(runs, **options):
    with pytest.raises(UserError) as caught:
        select_measures(runs, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_old_tasks_in_points_are_the_default(runs):
    selection = select_measures(runs, new_task="tofu")
    assert names(selection.old) == ["hellaswag", "winogrande", "mmlu", "ifeval"]
    assert names(selection.other_old) == ["own_answers", "own_answers_kl"]


def test_old_tasks_can_be_chosen(runs):
    selection = select_measures(runs, new_task="tofu", old_tasks=["own_answers_kl"])
    assert [(one.name, one.unit, one.role) for one in selection.old] == [("own_answers_kl", "nats", "old")]
    assert names(selection.other_old) == ["hellaswag", "winogrande", "mmlu", "ifeval", "own_answers"]
    chosen = select_measures(runs, new_task="tofu", old_tasks=["truthfulqa", "mmlu"])
    assert names(chosen.old) == ["truthfulqa", "mmlu"]
    assert names(chosen.reliability) == ["halueval", "confidence"]


def test_probes_can_be_chosen(runs):
    selection = select_measures(runs, new_task="facts.accuracy", old_tasks=["stories.kl", "stories"])
    assert (selection.new.key, selection.new.role, selection.new.unit) == ("probe/facts/accuracy", "new", "points")
    assert [(one.name, one.key) for one in selection.old] == [
        ("stories.kl", "probe/stories/kl"),
        ("stories", "probe/stories/loss"),
    ]
    assert names(select_measures(runs, new_task="tofu", old_tasks=["stories.loss", "stories"]).old) == ["stories"]


def test_chosen_probe_needs_no_evaluation(tmp_path):
    run = make_run(tmp_path / "one", "sft", 1e-4, base=None)
    comparison = compare(read_runs([run]), old_tasks=["facts.loss"])
    assert names(comparison.old) == ["facts.loss"]
    assert names(comparison.other_old) == ["stories"]
    assert comparison.is_complete(0)
    assert comparison.outcomes[0]["facts.loss"].delta.value < 0


def test_unknown_old_task_is_refused(runs):
    message = error_of(runs, new_task="tofu", old_tasks=["mmlu", "nothing"])
    assert "--old-tasks=mmlu,nothing: nothing is neither an evaluated task nor a probe; known are" in message
    assert all(name in message for name in ("own_answers_kl", "winogrande", "stories.kl"))
    assert "names no task" in error_of(runs, new_task="tofu", old_tasks=[])


def test_old_tasks_of_different_units_are_refused(runs):
    message = error_of(runs, new_task="tofu", old_tasks=["own_answers", "mmlu", "own_answers_kl"])
    assert "mmlu in points and own_answers, own_answers_kl in nats have no common mean" in message


def test_new_task_among_the_old_ones_is_refused(runs):
    assert "tofu is the new task" in error_of(runs, new_task="tofu", old_tasks=["tofu"])


def test_unknown_new_task_is_refused(runs):
    message = error_of(runs, new_task="nothing")
    assert "--new-task=nothing was not evaluated; evaluated are" in message
    assert "probes are facts, facts.accuracy" in message
