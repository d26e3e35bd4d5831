"""What is compared, and runs that cannot be."""

import json
import random

import pytest
import yaml
from helpers.evaluated_runs import make_base, make_config, make_run, write_suites

from finch.errors import UserError
from finch.report.measures import compare
from finch.report.runs import read_runs


@pytest.fixture
def two_runs(tmp_path):
    """A function that makes the second of two evaluated runs and compares them."""
    make_base(tmp_path / "base", n=20)
    make_run(tmp_path / "one", "sft", 1e-5, n=20)

    def compare_with(*, new_task=None, **options):
        make_run(tmp_path / "two", "finch", 1e-5, n=20, **options)
        return compare(read_runs([tmp_path / "one", tmp_path / "two"]), new_task=new_task)

    return compare_with


def error_of(call):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_roles_and_order(two_runs):
    comparison = two_runs()
    assert comparison.new.name == "tofu"
    assert [one.name for one in comparison.old] == ["hellaswag", "winogrande", "mmlu", "ifeval"]
    assert [one.name for one in comparison.reliability] == ["truthfulqa", "halueval", "confidence"]
    assert comparison.is_complete(0)
    assert comparison.is_complete(1)


def test_different_new_tasks_are_refused(two_runs, tmp_path):
    make_base(tmp_path / "other", task="sciknoweval", n=20)
    message = error_of(lambda: two_runs(base="../../other", task="sciknoweval"))
    assert "tofu" in message
    assert "sciknoweval" in message
    assert "different new tasks" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": "../../other"}, "different pretrained weights (0123456789ab and ffffffffffff)"),
        ({"settings": {"limit": 10}}, "limit=10"),
        ({"definition": "chat template"}, "another definition"),
    ],
)
def test_other_evaluations_are_refused(two_runs, tmp_path, options, words):
    make_base(tmp_path / "other", n=20, weights="f" * 64)
    assert words in error_of(lambda: two_runs(**options))


def test_different_documents_are_refused(two_runs, tmp_path):
    two_runs()
    file = tmp_path / "two" / "evaluation" / "forgetting.mmlu.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-1]))
    runs = read_runs([tmp_path / "one", tmp_path / "two"])
    message = error_of(lambda: compare(runs))
    assert "two, mmlu" in message
    assert "different documents" in message


def test_different_models_are_refused(two_runs, tmp_path):
    two_runs()
    config = make_config("sft", 1e-5) | {"model": {"_component_": "finch.models.qwen3.qwen3_4b"}}
    (tmp_path / "two" / "config.yaml").write_text(yaml.safe_dump(config))
    assert "one model at a time" in error_of(lambda: compare(read_runs([tmp_path / "one", tmp_path / "two"])))


def test_moved_base_is_found_by_its_option(two_runs, tmp_path):
    expected = two_runs().outcomes
    (tmp_path / "base").rename(tmp_path / "moved")
    runs = read_runs([tmp_path / "one", tmp_path / "two"])
    assert "give their folder by --base" in error_of(lambda: compare(runs))
    assert compare(runs, base=tmp_path / "moved").outcomes == expected
    (tmp_path / "parent").mkdir()
    (tmp_path / "moved").rename(tmp_path / "parent" / "base")
    assert compare(runs, base=tmp_path / "parent").outcomes == expected


def test_new_task_can_be_an_old_one(two_runs):
    comparison = two_runs(new_task="mmlu")
    assert comparison.new.name == "mmlu"
    assert "tofu" not in [one.name for one in comparison.measures]


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


def test_probes_are_those_of_the_best_epoch(tmp_path):
    run = make_run(tmp_path / "one", "sft", 1e-4, base=None)
    (run / "best").unlink()
    (run / "best").symlink_to("epoch_0")
    assert compare(read_runs([run])).outcomes[0]["facts"].step == 16


def test_different_task_probes_are_refused(tmp_path):
    runs = [make_run(tmp_path / name, "sft", 1e-5, base=None) for name in ("one", "two")]
    config = make_config("sft", 1e-5)
    config["probes"] = {"other": {"task": True}}
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert "one task at a time" in error_of(lambda: compare(read_runs(runs)))


def test_language_without_a_base_is_only_a_score(tmp_path):
    run = make_run(tmp_path / "one", "sft", 1e-5, base=None)
    options = {"new": 0.7, "shift": 0.0, "rng": random.Random(0), "suites": ["knowledge"], "n": 20}
    write_suites(run / "evaluation", base=None, weights="a" * 64, **options)
    outcome = compare(read_runs([run])).outcomes[0]["tofu"]
    assert outcome.score.value is not None
    assert outcome.delta is None
