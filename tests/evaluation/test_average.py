"""`finch average`: alpha is found on known fronts in six evaluations; points equal the run's own metrics and transformers on the written model."""

import json
import math
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from helpers.causal_lm import mean_loss
from helpers.runs import LORA, LORA_MODEL, finished, run_here, run_ranks
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torchtune.config import instantiate
from transformers import AutoModelForCausalLM

from finch.base.errors import UserError
from finch.cli.main import main
from finch.distributed.parallel import Parallel
from finch.evaluation import average as module
from finch.evaluation.average import MAX_EVALUATIONS, Averages, Front, average, choose, describe
from finch.evaluation.chat import Chat
from finch.evaluation.choice import Choice
from finch.evaluation.model_folders import find_base, find_tuned, has_average, training_questions
from finch.evaluation.wise_ft import wise_ft


def front(tmp_path, power=2.0, bend=2.0, calls=None):
    """Learned: 1 - (1 - alpha)^bend of 2 nats; forgotten: 0.5 alpha^power nats."""

    def evaluate(alpha):
        if calls is not None:
            calls.append(alpha)
        return 3.0 - 2.0 * (1 - (1 - alpha) ** bend), 0.5 * alpha**power

    return Front(tmp_path / "front.json", "key", evaluate, Parallel(torch.device("cpu")))


@pytest.mark.parametrize(
    ("choice", "alpha", "tolerance"),
    [
        (Choice(keep=0.95), 1 - 0.05**0.5, 0.05),
        (Choice(keep=0.0), 0.0, 0),
        (Choice(keep=1.0), 1.0, 0.1),
        (Choice(budget=0.1), 0.2**0.5, 0.03),
        (Choice(budget=0.001), 0.002**0.5, 0.05),
        (Choice(budget=9), 1.0, 0),
        (Choice(alpha=0.12345), 0.12345, 0),
        (Choice(), 0.5, 0.07),  # where 2 - 2 alpha = 2 alpha
    ],
)
def test_alpha_is_found_in_six_evaluations(choice, alpha, tolerance, tmp_path):
    calls = []
    known = front(tmp_path, calls=calls)
    point = choose(known, choice)
    assert point.alpha == pytest.approx(alpha, abs=tolerance)
    assert len(calls) <= MAX_EVALUATIONS
    if choice.keep is not None:
        assert known.learned_share(point) >= choice.keep
    if choice.budget is not None:
        assert point.forgotten <= choice.budget
    again = []
    assert choose(front(tmp_path, calls=again), choice) == point  # an interrupted search goes on from its file
    assert not again
    for damaged in (b"\x80\x04", b"{", b"[]"):
        (tmp_path / "front.json").write_bytes(damaged)
        assert choose(front(tmp_path), choice) == point
    # Another choice's search does not use up this one's evaluations.
    (tmp_path / "other").mkdir()
    choose(front(tmp_path / "other"), Choice())
    assert choose(front(tmp_path / "other"), choice).alpha == pytest.approx(alpha, abs=tolerance)


@pytest.mark.parametrize(("metric", "value"), [("kl/code", 0.5), ("accuracy", -0.5), ("accuracy/code", -0.5)])
def test_the_metric_may_be_of_a_group(metric, value):
    averages = object.__new__(Averages)
    averages.key = f"probe/own/{metric}"
    averages._measure = {"own": {metric: 0.5}}.__getitem__
    assert averages._task_value() == value


def test_what_the_numbers_say(tmp_path):
    fair = front(tmp_path / "fair")
    (tmp_path / "fair").mkdir()
    budget = Choice(budget=0.1)
    assert describe(fair, choose(fair, budget), budget)[0].startswith("alpha 0.4")
    (tmp_path / "high").mkdir()
    high = front(tmp_path / "high", power=0.9)
    assert "the rate was too high, and a lower one forgets less" in describe(high, choose(high, Choice()), Choice())[1]
    assert "alpha 1 is the tuned model itself" in describe(high, high.at(1), Choice(keep=1.0))[1]


@pytest.fixture
def run(tiny, trained, rows_file, tmp_path):
    """A copy of a finished run with a validation set and a probe of own answers."""
    own = {"kind": "self", "data_files": str(rows_file), "rows": 5, "max_new_tokens": 6}
    config = tiny(is_validated=True, epochs=2, probes={"own": own})
    shutil.copytree(trained(config).folder, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_points_are_the_runs_own_and_those_of_transformers(run, base_folder, capsys):
    main(["average", str(run), "--alpha", "0.4"])
    text = capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = int((run / "best").readlink().name.removeprefix("epoch_"))
    evaluations = [line for line in lines if line["epoch"] == best and "loss" not in line]
    values = {key: value for line in evaluations for key, value in line.items()}
    points = {alpha: rest for alpha, *rest in json.loads((run / "average" / "front.json").read_text())["points"]}
    assert list(points) == [0, 0.4, 1]
    assert points[0][1] == 0
    assert points[1] == pytest.approx([values["validation_loss"], values["probe/own/kl"]], rel=1e-5)
    expected = wise_ft(base_folder, run / "best", [0.4], run.parent / "out")[0]
    files = [folder / "model.safetensors" for folder in (run / "average" / "model", expected)]
    assert files[0].read_bytes() == files[1].read_bytes()
    cfg = OmegaConf.load(run / "config.yaml")
    rows = list(instantiate(cfg.dataset_validation, instantiate(cfg.tokenizer)))
    rows = [{"input_ids": row["tokens"], "labels": row["labels"]} for row in rows]
    for alpha, folder in ((0, base_folder), (0.4, expected)):
        loss = mean_loss(AutoModelForCausalLM.from_pretrained(folder), rows)
        assert points[alpha][0] == pytest.approx(loss, rel=1e-5)
    assert text.startswith("alpha 0.4, as given: ")
    measured = json.loads((run / "average" / "measured.json").read_text())
    assert measured.keys() == values.keys() - {"step", "epoch", "probe_seconds", "probe/own/loss_change"}
    assert [measured["validation_loss"], measured["probe/own/kl"]] == pytest.approx(points[0.4], rel=1e-6)
    os.utime(run / "average" / "model" / "config.json", (1, 1))  # as a copy may leave it
    assert has_average(run)
    manifest = run / f"epoch_{best}" / "finch_manifest.json"
    manifest.write_text(manifest.read_text() + "\n")  # of a later model
    assert not has_average(run)
    card = (run / "average" / "README.md").read_text()
    assert text.splitlines()[0] in card
    assert len((run / "average" / "front.csv").read_text().splitlines()) == 4
    assert (run / "average" / "front.png").read_bytes().startswith(b"\x89PNG")


def test_other_weights_in_the_bases_place_are_named(run, base_folder, tmp_path, caplog):
    """Of the same sizes and names: without the digest, what was learned and forgotten would be counted from another model."""
    other = shutil.copytree(base_folder, tmp_path / "other")
    save_file(
        {name: weight * 1.5 for name, weight in load_file(other / "model.safetensors").items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    message = f"{other} has other weight files than the model that {run} was trained from"
    for start in (
        lambda: average(run, Choice(alpha=0.5), base=other),
        lambda: Chat(run, other, max_new_tokens=1, temperature=0.0),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            start()
    assert not (run / "average").exists()
    for base, said in ((base_folder, False), (other, True)):
        find_tuned(run, find_base(base))
        assert (message in caplog.text) == said


def test_moved_base_interrupted_search_and_metrics_that_do_not_fall(
    run, base_folder, rows_file, tmp_path, monkeypatch, caplog
):
    shutil.copytree(base_folder, tmp_path / "moved")
    text = (run / "config.yaml").read_text().replace(str(base_folder), str(tmp_path / "gone"))
    (run / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="gone"):
        average(run, Choice())
    relative = text.replace(str(rows_file), "rows.jsonl")
    (run / "config.yaml").write_text(relative)
    there = "dataset.data_files=rows.jsonl does not exist; correct the path; paths are relative to the folder where the run was started"
    with pytest.raises(UserError, match=there):
        average(run, Choice(), base=tmp_path / "moved")
    assert training_questions(run) is None
    assert "; paths are relative to the folder where the run was started" in caplog.text
    (run / "config.yaml").write_text(text)
    found, evaluate = [], module.Averages.evaluate

    def interrupted(self, alpha):
        found.append(alpha)
        if len(found) == 3:
            raise KeyboardInterrupt
        return evaluate(self, alpha)

    monkeypatch.setattr(module.Averages, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        average(run, Choice(keep=0.5), base=tmp_path / "moved")
    assert found == [0, 1, 0.5]
    average(run, Choice(keep=0.5), base=tmp_path / "moved")
    assert found[3] == 0.5
    assert len(found) <= MAX_EVALUATIONS + 1
    config = OmegaConf.load(run / "config.yaml")
    config.dataset_validation.split = "train[35:36]"
    config.dataset_validation.column_map = {"input": "answer", "output": "question"}
    OmegaConf.save(config, run / "config.yaml")
    lines = average(run, Choice(alpha=0.5), base=tmp_path / "moved")
    assert lines[-1] == f"its model: {run / 'average' / 'model'}"


def test_adapters_average_as_their_merged_model(tiny, tmp_path, monkeypatch):
    """The KL divergence on finch's prompts, without a probe; alpha 0.5 of W + B A is W + 0.5 B A."""
    changes = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-2}, "epochs": 2}
    monkeypatch.setattr("finch.probes.kinds.skill_rows", lambda number: [{"prompt": "the old red fox"}] * 3)
    run = finished(tmp_path, tiny(is_validated=True, model=LORA_MODEL, **changes), recipe=LORA).folder
    lines = average(run, Choice(alpha=0.5))
    assert lines[0].startswith("alpha 0.5, as given")
    points = json.loads((run / "average" / "front.json").read_text())["points"]
    assert [point[0] for point in points] == [0, 0.5, 1]
    assert 0 == points[0][2] < points[1][2] < points[2][2]
    assert points[2][1] < points[0][1]
    model = load_file(run / "average" / "model" / "model.safetensors")
    for folder in run.glob("epoch_[01]"):  # only adapters are left, as of save_adapter_weights_only=True
        shutil.rmtree(folder)
    (run / "best").unlink()
    average(run, Choice(alpha=0.5))
    assert not (run / "average" / "merged").exists()
    again = load_file(run / "average" / "model" / "model.safetensors")
    for name, tensor in model.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6)


def test_an_average_that_was_killed_is_made_by_the_next_start(tiny, rows_file, tmp_path, monkeypatch):
    """The run had ended, and left no state to go on from; a signal while it averages leaves the mark to start it again."""
    own = {"kind": "self", "data_files": str(rows_file), "rows": 5, "max_new_tokens": 6}
    config = tiny(is_validated=True, epochs=1, average="auto", probes={"own": own}, save_best_only=True)

    def killed(*_):
        with pytest.raises(SystemExit, match=r"^0$"):
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
        assert (tmp_path / "run" / "REQUEUE").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", sys.exit)
        patch.setattr("finch.evaluation.average.average_in", killed)
        assert run_here(tmp_path, config).returncode == 130
    assert not (tmp_path / "run" / "average").exists()
    again = run_here(tmp_path, config, "resume_from_checkpoint=auto")
    assert "1 epochs have ended; it has left no weights" in again.output
    assert "average: alpha " in again.output
    assert (again.folder / "average" / "model" / "model.safetensors").is_file()
    assert "average: alpha " not in run_here(tmp_path, config, "resume_from_checkpoint=auto").output


def test_auto_averages_at_the_end_on_the_runs_ranks(tiny, rows_file, tmp_path):
    own = {"kind": "self", "data_files": str(rows_file), "rows": 5, "max_new_tokens": 6}
    config = tiny(is_validated=True, epochs=2, average="auto", probes={"own": own})
    run = run_ranks(2, tmp_path, config)
    assert run.returncode == 0, run.output[-3000:]
    assert "average: alpha 0." in run.output
    assert f"--tuned {run.folder}/average\n" in run.output
    by_itself = tmp_path / "copy"
    shutil.copytree(run.folder, by_itself, symlinks=True, ignore=shutil.ignore_patterns("average"))
    average(by_itself, Choice())
    fronts = [(each / "average" / "front.json").read_text() for each in (run.folder, by_itself)]
    one, other = (json.loads(text)["points"] for text in fronts)
    assert one == [pytest.approx(point, rel=1e-5, abs=1e-6) for point in other]


@pytest.mark.parametrize(
    ("change", "choice", "message"),
    [
        ({}, Choice(alpha=1.5), r"--alpha=1.5 must be in \[0, 1\]"),
        ({}, Choice(keep=math.nan), r"--keep=nan must be in \[0, 1\]"),
        ({}, Choice(budget=0.0), "--budget=0 must be above 0, in nats per token"),
        ({"dataset": {"_component_": "os.system"}}, Choice(), "dataset._component_=os.system is not among the comp"),
        ({"collate_fn": "builtins.print"}, Choice(), "collate_fn=builtins.print is not among the components"),
        ({"hooks": {"mine": {"_component_": "os.system"}}}, Choice(alpha=0.0), None),  # is not used, and not imported
    ],
)
def test_mistakes_and_foreign_configs(change, choice, message, run):
    OmegaConf.save({**OmegaConf.load(run / "config.yaml"), **change}, run / "config.yaml")
    if message is None:
        average(run, choice)
        return
    with pytest.raises(UserError, match=message):
        average(run, choice)
    assert not (run / "average").exists()


def test_folders_without_a_model(tmp_path):
    with pytest.raises(UserError, match=r"config.yaml does not exist; give the folder of a run"):
        average(tmp_path, Choice())
    with pytest.raises(UserError, match="has no model: give the folder of a run that has ended an epoch"):
        module.tuned_folder(tmp_path)
