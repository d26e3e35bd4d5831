"""Which tasks and probes are compared, and which names of them are refused."""

import re

import pytest
from helpers.evaluated_runs import add_losses, make_run, make_sweep, write_suite

from finch.base.errors import UserError
from finch.study.report.front import choose_by, group_settings, trade_off
from finch.study.report.measures import compare
from finch.study.report.report import write_report
from finch.study.report.runs import read_runs
from finch.study.report.selection import select_measures


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with evaluated old tasks in points and in nats, and with probes."""
    folder = tmp_path_factory.mktemp("sweep")
    cells = make_sweep(folder, methods=("sft", "finch"), rates=(1e-4,), seeds=(0,), n=20)
    add_losses(folder, cells)
    for cell in cells:
        metrics = cell / "metrics.jsonl"
        metrics.write_text(
            metrics.read_text().replace('"probe/stories/loss":', '"probe/stories/kl": 0.1, "probe/stories/loss":')
        )
    return read_runs(cells)


def names(measures):
    return [one.name for one in measures]


def test_old_tasks_in_points_are_the_default(runs):
    selection = select_measures(runs, new_task="tofu")
    assert names(selection.old) == ["hellaswag", "winogrande", "mmlu", "ifeval"]
    assert names(selection.other_old) == ["own_answers", "own_answers_kl"]
    assert names(selection.reliability) == ["truthfulqa", "halueval", "confidence"]


def test_tasks_can_be_chosen(runs):
    selection = select_measures(runs, new_task="tofu", old_tasks=["own_answers_kl"])
    assert [(one.name, one.unit, one.role) for one in selection.old] == [("own_answers_kl", "nats", "old")]
    assert names(selection.other_old) == ["hellaswag", "winogrande", "mmlu", "ifeval", "own_answers"]
    chosen = select_measures(runs, new_task="tofu", old_tasks=["truthfulqa", "mmlu"])
    assert (names(chosen.old), names(chosen.reliability)) == (["truthfulqa", "mmlu"], ["halueval", "confidence"])
    chosen = select_measures(runs, new_task="mmlu")
    assert (chosen.new.name, "tofu" in names(chosen.measures)) == ("mmlu", False)


def test_probes_can_be_chosen(runs):
    """Without its metric a probe is its divergence."""
    selection = select_measures(runs, new_task="facts.accuracy", old_tasks=["stories.loss", "stories"])
    assert (selection.new.key, selection.new.role, selection.new.unit) == ("probe/facts/accuracy", "new", "points")
    assert [(one.name, one.key) for one in selection.old] == [
        ("stories.loss", "probe/stories/loss"),
        ("stories", "probe/stories/kl"),
    ]
    assert names(select_measures(runs, new_task="tofu", old_tasks=["stories.kl", "stories"]).old) == ["stories"]


def test_chosen_probe_needs_no_evaluation(tmp_path):
    run = make_run(tmp_path / "one", "sft", 1e-4, base=None)
    comparison = compare(read_runs([run]), old_tasks=["facts.loss"])
    assert names(comparison.old) == ["facts.loss"]
    assert names(comparison.other_old) == ["stories"]
    assert comparison.is_complete(0)
    assert comparison.outcomes[0]["facts.loss"].delta.value < 0


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        ("tofu", ["mmlu", "nothing"], "--old-tasks=mmlu,nothing: nothing is neither an evaluated task nor a probe;"),
        ("tofu", ["mmlu", "nothing"], "stories.kl"),  # among the known ones
        ("tofu", [], "names no task"),
        ("tofu", ["own_answers", "mmlu"], "mmlu in points and own_answers in nats have no common mean"),
        ("tofu", ["tofu"], "tofu is the new task"),
        ("nothing", None, "--new-task=nothing was not evaluated; evaluated are"),
        ("nothing", None, "probes are facts, facts.accuracy"),
    ],
)
def test_bad_names_are_refused(runs, new, old, words):
    with pytest.raises(UserError) as caught:
        select_measures(runs, new_task=new, old_tasks=old)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_best_setting_is_chosen_by_validation_where_all_settings_have_it(tmp_path, undrawn):
    """Validation prefers the smaller rate, the reported score the larger one."""
    cells = make_sweep(tmp_path, methods=("sft",), rates=(3e-5, 1e-4), seeds=(0, 1), n=20)

    def chosen():
        comparison = compare(read_runs(cells))
        assert comparison.new.name == "tofu"  # the validation suite is no second new task
        points = trade_off(comparison, group_settings(comparison))
        scores, what = choose_by(comparison, points)
        assert [*scores] == [point.setting for point in points.points]
        return [*scores.values()], what

    reported = chosen()
    assert (reported[0][0] < reported[0][1], reported[1]) == (True, "reported score on tofu")
    for number, (cell, score) in enumerate(zip(cells, (1.0, 0.5, 0.25, 0.5), strict=True)):
        (cell / "cell.json").unlink()
        samples = [{"doc_id": 0, "doc_hash": "a", "score": score}]
        tasks = {"tofu_validation": ("new", "acc", samples, {})}
        write_suite(cell / "evaluation", "knowledge_validation", base=None, weights=str(cell), tasks=tasks)
        if number == 1:  # the second setting has no scores yet
            assert chosen() == reported
    assert chosen() == ([0.75, 0.375], "score on the validation rows of tofu")
    write_report(cells, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    found = re.search(
        r"Its setting with the best score on the validation rows of tofu, and [^:]*:\s+- SFT, lr 3e-5: ", text
    )
    assert found is not None
