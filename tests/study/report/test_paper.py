"""The paper's numbers next to a run's: only where task, model and method are the same."""

import json

import pytest
from helpers.evaluated_runs import make_base, make_run

from finch.study.report.paper import accuracy_curves, learning_rate_curves, paper_model, paper_results
from finch.study.report.report import write_report
from finch.study.report.runs import read_runs

SIZES = {"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256}


@pytest.fixture
def run(tmp_path):
    """A FINCH run on the suite knowledge, of a base with the sizes of Qwen3-4B."""
    make_base(tmp_path / "base", n=20)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(SIZES))
    config = {"checkpointer": {"checkpoint_dir": str(tmp_path / "weights")}}
    return make_run(tmp_path / "run", "finch", 2e-5, n=20, config=config)


def test_paper_results():
    found = paper_results("knowledge", "qwen3_4b")
    assert (len(found), found["small_lr"]["task"]) == (11 + 5, 65.8)
    assert paper_results(None, "qwen3_4b") == {}


def test_appendix_b5_is_next_to_the_same_norms(run, tmp_path, undrawn):
    for model, first, last in (("qwen3_4b", (83.5, -9.6), (58.5, -4.6)), ("llama3_8b", (83.3, -9.0), (62.8, -0.4))):
        found = {key: tuple(row.values()) for key, row in paper_results("knowledge", model).items() if "clip" in key}
        assert list(found) == [f"clip_grad_norm {norm}" for norm in (1.0, 0.1, 0.01, 0.001, 0.0001)]
        assert (found["clip_grad_norm 1.0"], found["clip_grad_norm 0.0001"]) == (first, last)
    config = {"checkpointer": {"checkpoint_dir": str(tmp_path / "weights")}}
    sft = {"n": 20, "config": config}
    runs = [
        make_run(tmp_path / f"clip{norm}", "sft", 2e-5, cell={"clip_grad_norm": norm}, **sft) for norm in (1.0, 0.1)
    ]
    write_report(runs, tmp_path / "out")
    rows = [
        line
        for line in (tmp_path / "out" / "report.md").read_text().splitlines()
        if "clip_grad_norm 0.1 | paper |" in line
    ]
    assert len(rows) == 1
    assert "| 82.3 |" in rows[0]


def test_figure_1():
    finch = accuracy_curves("knowledge", "qwen3_4b", "new")[1]
    assert (finch.method, finch.steps[0], finch.steps[-1], finch.values[10]) == ("finch", 0, 1000, 99.17)
    [rates] = learning_rate_curves("knowledge", "qwen3_4b")
    assert rates.values[-1] == 5e-5
    assert learning_rate_curves("science", "qwen3_4b") == accuracy_curves("knowledge", "llama3_8b", "old") == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "qwen3_4b"),
        ({"hidden_size": 1024}, None),
        (LLAMA, "llama3_8b"),
        (LLAMA | {"rope_scaling": {}}, None),  # Llama 3.1
    ],
)
def test_model_is_known_by_its_sizes(run, changes, expected):
    (run.parent / "weights" / "config.json").write_text(json.dumps(SIZES | changes))
    assert paper_model(read_runs([run])[0]) == expected


def test_model_is_known_by_its_builder_without_weights(tmp_path):
    config = {"model": {"_component_": "finch.models.qwen3.lora_qwen3_4b"}}
    run = make_run(tmp_path / "run", "finch", 2e-5, base=None, config=config)
    assert paper_model(read_runs([run])[0]) == "qwen3_4b"


def test_paper_is_next_to_the_run(run, tmp_path):
    write_report([run], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "| paper |" in line]
    minus = "\N{MINUS SIGN}"
    numbers = ["83.3", f"{minus}0.6", f"{minus}0.8", "+1.4", "+0.5", f"{minus}2.6", "+3.3", "+9.1", "+0.1"]
    assert [row[0] for row in rows] == ["pretrained", "FINCH"]
    assert rows[1] == ["FINCH", "paper", *numbers]
    assert "The mean measured here is without winogrande, ifeval, at chance." in text
    for name in ("learning_rate", "probe_facts_accuracy"):
        assert "FINCH, paper" in (tmp_path / "out" / "figures" / f"{name}.svg").read_text()


def test_other_models_have_no_paper(report):
    text = (report / "report.md").read_text()
    assert "paper |" not in text
    assert "The paper's numbers" not in text
