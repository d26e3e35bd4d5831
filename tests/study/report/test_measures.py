"""What is compared, and runs that cannot be."""

import json
import random

import pytest
from helpers.evaluated_runs import make_base, make_run, write_suites

from finch.base.errors import UserError
from finch.study.report.measures import compare
from finch.study.report.runs import read_runs


def make_pair(folder, **options):
    make_base(folder / "base", n=20)
    return [make_run(folder / "one", "sft", 1e-5, n=20), make_run(folder / "two", "finch", 1e-5, n=20, **options)]


def error_of(runs):
    with pytest.raises(UserError) as caught:
        compare(read_runs(runs))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": "../../other"}, "different pretrained weights (0123456789ab and ffffffffffff)"),
        ({"base": "../../science", "task": "sciknoweval"}, "different new tasks"),
        ({"settings": {"limit": 10}}, "limit=10"),
        ({"definition": "chat template"}, "another definition"),
    ],
)
def test_other_evaluations_are_refused(tmp_path, options, words):
    make_base(tmp_path / "other", n=20, weights="f" * 64)
    make_base(tmp_path / "science", n=20, task="sciknoweval")
    assert words in error_of(make_pair(tmp_path, **options))


def test_different_documents_are_refused(tmp_path):
    runs = make_pair(tmp_path)
    file = tmp_path / "two" / "evaluation" / "forgetting.mmlu.jsonl"
    file.write_text(file.read_text().rpartition("{")[0])
    message = error_of(runs)
    assert "two, mmlu" in message
    assert "different documents" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"_component_": "finch.models.qwen3.qwen3_4b"}}, "one model at a time"),
        ({"probes": {"other": {"task": True}}}, "one task at a time"),
    ],
)
def test_other_configs_are_refused(tmp_path, changes, words):
    configs = {"one": {}, "two": changes}
    runs = [make_run(tmp_path / name, "sft", 1e-5, base=None, config=config) for name, config in configs.items()]
    assert words in error_of(runs)


def test_moved_base_is_found_by_its_option(tmp_path):
    runs = make_pair(tmp_path)
    expected = compare(read_runs(runs)).outcomes
    (tmp_path / "parent").mkdir()
    (tmp_path / "base").rename(tmp_path / "parent" / "base")
    assert "give their folder by --base" in error_of(runs)
    for base in (tmp_path / "parent" / "base", tmp_path / "parent"):
        assert compare(read_runs(runs), base=base).outcomes == expected


def test_probes_take_the_place_of_evaluations(tmp_path):
    make_run(tmp_path / "one", "sft", 1e-4, base=None)
    comparison = compare(read_runs([tmp_path / "one"]))
    assert (comparison.new.name, comparison.new.metric) == ("facts", "accuracy")
    assert [(one.name, one.metric) for one in comparison.old] == [("stories", "loss")]
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "probe/facts/accuracy" in line][-1]
    outcome = comparison.outcomes[0]["stories"]
    assert outcome.score.value == last["probe/stories/loss"]
    assert outcome.delta.value == pytest.approx(last["probe/stories/loss_change"])
    assert outcome.step == 40
    # A resumed run whose probe has other rows measures these at step 0 again.
    file = tmp_path / "one" / "metrics.jsonl"
    file.write_text(file.read_text().replace(json.dumps(last), json.dumps(last | {"probe/stories/loss_change": 0.5})))
    outcome = compare(read_runs([tmp_path / "one"])).outcomes[0]["stories"]
    assert (outcome.delta.value, outcome.base.value) == (pytest.approx(0.5), pytest.approx(outcome.score.value - 0.5))


def test_validation_loss_takes_the_place_of_the_new_task(tmp_path):
    """Where nothing else measures it, and all runs share the rows."""

    def measure_of(probes, *rows):
        runs = []
        for number, source in enumerate(rows):
            config = {"probes": probes, "dataset_validation": source}
            runs.append(make_run(tmp_path / f"{len(probes)} {rows} {number}", "sft", 1e-4, base=None, config=config))
            for loss, step, epoch in ((3.0, 0, 0), (1.0, 20, 0), (0.5, 40, 1)):
                with (runs[-1] / "metrics.jsonl").open("a") as file:
                    print(json.dumps({"step": step, "epoch": epoch, "validation_loss": loss}), file=file)
        comparison = compare(read_runs(runs))
        name = None if comparison.new is None else comparison.new.name
        return name, comparison.outcomes[0].get("validation rows"), comparison.is_complete(0)

    name, outcome, is_complete = measure_of({}, "a", "a")
    assert (name, outcome.score.value, outcome.delta.value, is_complete) == ("validation rows", 0.5, -2.5, True)
    assert measure_of({}, "a", "b") == (None, None, False)
    assert measure_of({"facts": {"task": True}}, "a", "a") == ("facts", None, True)


def test_probes_are_those_of_the_best_epoch(tmp_path):
    run = make_run(tmp_path / "one", "sft", 1e-4, base=None)
    (run / "best").unlink()
    (run / "best").symlink_to("epoch_0")
    assert compare(read_runs([run])).outcomes[0]["facts"].step == 16


def test_probes_are_those_of_the_step_that_was_kept(tmp_path):
    run = make_run(tmp_path / "one", "sft", 1e-4, base=None)
    (run / "best_step_27").mkdir()
    (run / "best").unlink()
    (run / "best").symlink_to("best_step_27")
    assert compare(read_runs([run])).outcomes[0]["facts"].step == 24


def test_language_without_a_base_is_only_a_score(tmp_path):
    run = make_run(tmp_path / "one", "sft", 1e-5, base=None)
    options = {"new": 0.7, "shift": 0.0, "rng": random.Random(0), "suites": ["knowledge"], "n": 20}
    write_suites(run / "evaluation", base=None, weights="a" * 64, **options)
    outcome = compare(read_runs([run])).outcomes[0]["tofu"]
    assert outcome.score.value is not None
    assert outcome.delta is None
