"""What of a cell's folder counts as done, and as this cell's."""

import contextlib
import json
import re
from types import SimpleNamespace

import pytest
from helpers.evaluation import write_data_root
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.config.methods import METHODS
from finch.config.parser import merge
from finch.evaluation.loading import hash_weights
from finch.evaluation.model_folders import ModelFolder
from finch.evaluation.tasks.registry import SUITES, TASKS
from finch.study.sweep import local
from finch.study.sweep.grid import EVALUATED, Evaluation, override_words
from finch.study.sweep.job import _hash_of, check_method, different_key, missing_results, row_hashes
from finch.study.sweep.local import LocalSweep


@pytest.mark.parametrize(
    ("values", "words", "trained"),
    [
        ({"method": "sft"}, ["kl_penalty=finch.regularization.KL", "self_replay={rows: 8}"], "kl+self_replay"),
        ({"method": "dft+kl"}, ["loss=torch.nn.CrossEntropyLoss"], "kl"),
        ({"method": "kl"}, ["kl_penalty.strength=0"], "sft"),
        ({"method": "finch", "lr_scheduler": None}, [], "sft"),
        ({"method": "finch", "lr_scheduler": None, "label": "constant"}, [], None),
        ({"method": "kl", "kl_penalty.strength": 0}, [], None),
        ({"method": "sft", "lr_scheduler": None}, ["lr_scheduler.decay=0.3"], None),
        ({"method": "self_replay", "lr_scheduler": None, "self_replay.rows": 8}, ["average=auto"], None),
        ({"method": None}, ["loss=finch.objectives.DFT"], None),
        *(({"method": name}, ["lr_scheduler.log=x"] * (name == "lr_replay"), None) for name in METHODS),
        *(({"method": name}, ["model.lora_rank=2"], None) for name in ("finch+lora", "lora")),
        *(({"method": name}, [], None) for name in ("dft+kl", "finch+wise_ft+self_replay", "wise_ft+asft")),
    ],
)
def test_cell_trains_the_method_that_it_says(values, words, trained):
    overrides = override_words({key: value for key, value in values.items() if key != "label"})
    cfg, _ = merge(MINIMAL, [*words, *overrides])
    grid, cell = SimpleNamespace(overrides=words), SimpleNamespace(values=values)
    text = f"but other keys of the grid make it {trained}; " if trained else ""
    with pytest.raises(UserError, match=re.escape(text)) if trained else contextlib.nullcontext():
        check_method(grid, cell, cfg)


def test_rows_are_the_content_of_local_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("row")
    files = [str(tmp_path / name) for name in ("a", "b")]
    dataset = [{"_component_": "x", "data_files": file} for file in files]
    cfg = OmegaConf.create({"dataset": dataset, "dataset_validation": {"_component_": "x", "data_files": files}})
    hashes = row_hashes(cfg)
    assert hashes == {key: [hashes["dataset"][0]] * 2 for key in ("dataset", "dataset_validation")}
    for elsewhere in ("absent.jsonl", "https://x.org/rows.jsonl", None):
        cfg = OmegaConf.create({"dataset": {"_component_": "x", "data_files": elsewhere}, "dataset_validation": None})
        assert row_hashes(cfg) == {}


def results(**changes):
    """Of the tasks as they are now."""
    return {name: {"definition": TASKS[name].definition(False), **changes} for name in SUITES["forgetting"]}


def test_results_of_other_rows_or_definitions_are_missing(tmp_path):
    evaluation = Evaluation(suites=(), tasks=("hellaswag",), data_root=str(tmp_path / "data"))
    write_data_root(tmp_path / "data")
    rows = TASKS["hellaswag"].hash_rows(tmp_path / "data")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "epoch_0").mkdir()
    settings = {"limit": None, "data": str(tmp_path / "data"), "prompt": "plain prompt"}

    def missing(**changes):
        tasks = {"hellaswag": {**results()["hellaswag"], "rows": rows, **changes}}
        (tmp_path / "evaluation" / "forgetting.json").write_text(json.dumps({"tasks": tasks, "settings": settings}))
        return missing_results(tmp_path, evaluation)

    assert missing() == []
    assert missing(rows="other") == ["forgetting"]
    assert missing(definition="acc_norm in another form") == ["forgetting"]
    (tmp_path / "data" / "hellaswag" / "validation.jsonl").unlink()  # what is gone cannot be evaluated again
    assert missing() == []


def test_results_of_another_base_are_missing(tmp_path):
    def is_missing(base):
        return missing_results(tmp_path / "run", Evaluation(suites=("forgetting",)), base=str(tmp_path / base))

    content = {"tasks": results(), "settings": {"limit": None, "data": "hub"}}
    for name in ("one", "copy", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text("b" if name == "other" else "a")
    folder = tmp_path / "run" / "evaluation"
    folder.mkdir(parents=True)
    (folder / "forgetting.json").write_text(json.dumps({**content, "base": "../../base.json"}))
    assert is_missing("other") == []  # not known
    weights = hash_weights(ModelFolder("--base", tmp_path / "one"))
    (tmp_path / "base.json").write_text(json.dumps({"model": str(tmp_path / "one"), "weights": weights}))
    assert [is_missing(base) for base in ("one", "copy", "other", "absent")] == [[], [], ["forgetting"], []]
    (tmp_path / "one" / "model.safetensors").write_text("c")  # at its old place
    _hash_of.cache_clear()
    assert is_missing("one") == ["forgetting"]


def test_results_of_other_data_are_missing(tmp_path):
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "epoch_0").mkdir()
    tasks = results()
    for data, missing in (
        ("hub", ["forgetting"]),
        (str(tmp_path / "rows"), []),
        (str(tmp_path / "other"), ["forgetting"]),
    ):
        content = {"tasks": tasks, "settings": {"limit": None, "data": data}}
        (tmp_path / "evaluation" / "forgetting.json").write_text(json.dumps(content))
        assert (
            missing_results(tmp_path, Evaluation(suites=("forgetting",), data_root=str(tmp_path / "rows"))) == missing
        )


@pytest.mark.parametrize(("epochs", "difference"), [(2, None), (3, ("epochs", 2, 3)), (1, ("epochs", 2, 1))])
def test_a_run_of_other_epochs_is_another_one(epochs, difference, tmp_path):
    config = {"epochs": 2, "seed": 0, "output_dir": "a", "checkpointer": {"checkpoint_dir": "base"}}
    OmegaConf.save(config, tmp_path / "config.yaml")
    assert different_key(tmp_path, OmegaConf.create({**config, "epochs": epochs, "output_dir": "b"})) == difference


@pytest.mark.parametrize(("seed", "linked"), [(0, "a"), (1, "b"), (2, None), (None, "a")])
def test_small_lr_takes_the_run_of_its_own_seed(seed, linked, tmp_path, monkeypatch):
    """One whose seed is not there would be counted as another seed."""
    folders, found = {0: tmp_path / "a", 1: tmp_path / "b"}, []
    rate = SimpleNamespace(lr=1e-5, runs=tuple(folders.values()), forgetting=SimpleNamespace(mean=0.0))
    monkeypatch.setattr(local, "rates_of", lambda *_: [rate])
    states = {
        folder: SimpleNamespace(status=EVALUATED, job=SimpleNamespace(cell=SimpleNamespace(values={"seed": number})))
        for number, folder in folders.items()
    }
    cell = SimpleNamespace(dependencies=list(folders.values()), values={} if seed is None else {"seed": seed})
    job = SimpleNamespace(cell=cell, link_to=lambda run: found.append(run.name))
    sweep = SimpleNamespace(
        _states=states, _fail=lambda _, text: found.append(text), _set_trained=lambda _: found.append("trained")
    )
    LocalSweep._select(sweep, SimpleNamespace(job=job))
    expected = (
        ["sft has no evaluated run of seed 2 at the rate that was chosen, 1e-05"]
        if linked is None
        else [linked, "trained"]
    )
    assert found == expected
