"""`finch evaluate` from folders to result files: what is reused, continued, shared among processes, and written."""

import fcntl
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.evaluation import read_lines, write_data_root
from helpers.runs import ROOT, environment, finch
from safetensors.torch import load_file, save_file

from benchmarks.tiny_text import WORDS
from finch.evaluation import runner
from finch.evaluation.results import base_path, read_result, read_results, read_samples
from finch.evaluation.statistics import paired_delta

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    return write_data_root(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tuned_folder(base_folder, tmp_path_factory):
    """The base with noise on its weights."""
    folder = tmp_path_factory.mktemp("models") / "tuned"
    shutil.copytree(base_folder, folder)
    torch.manual_seed(0)
    weights = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}  # fmt: skip
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def evaluate(capsys, caplog, base_folder, data_root, tmp_path):
    """Runs the command; returns what it printed and logged."""

    def run(*arguments, suite="forgetting", tasks="hellaswag,winogrande"):
        caplog.clear()
        options = ["--base", str(base_folder), "--data-root", str(data_root), "--out", str(tmp_path / "out")]
        selected = ["--suite", suite, "--tasks", tasks] if suite else ["--tasks", tasks]
        code, out, err = finch(capsys, "evaluate", *options, *selected, *map(str, arguments))
        assert code == 0, err
        return out + err + caplog.text

    return run


def only(folder, pattern):
    [path] = folder.glob(pattern)
    return path


def test_results_say_what_was_measured(evaluate, base_folder, tuned_folder, tmp_path):
    printed = evaluate("--tuned", tuned_folder)
    base = read_result(only(tmp_path, "out/base-*/forgetting.json"))
    path = only(tmp_path, "out/tuned-*/forgetting.json")
    tuned = read_result(path)
    assert (base.is_base, base.base, base.model) == (True, None, str(base_folder))
    assert (tuned.is_base, tuned.model) == (False, str(tuned_folder))
    assert read_result(base_path(path, tuned)) == base
    assert base.weights != tuned.weights
    assert base.settings == tuned.settings
    assert (base.settings["dtype"], base.settings["limit"], base.settings["prompt"]) == ("fp32", None, "plain prompt")
    assert base.versions.keys() == {"finch", "lm_eval", "torch", "transformers"}
    for name in ("hellaswag", "winogrande"):
        task = tuned.tasks[name]
        assert "no chat template" in task.definition
        samples = read_samples(path.parent, task)
        assert task.n == len(samples) == 12
        assert task.score == pytest.approx(sum(sample["score"] for sample in samples) / 12)
        before = read_samples(base_path(path, tuned).parent, base.tasks[name])
        delta = paired_delta(before, samples)
        row = re.search(rf"^{name} .*\n +tuned .*$", printed, re.MULTILINE)[0]
        assert f"{100 * task.score:.1f}  {100 * delta.delta:+.1f}" in re.sub(" +", "  ", row)


def test_base_is_evaluated_once(evaluate, tuned_folder, tmp_path, monkeypatch):
    evaluate()
    path = only(tmp_path, "out/base-*/forgetting.json")
    before = path.stat().st_mtime_ns
    printed = evaluate()
    assert f"{path} is reused: hellaswag, winogrande" in printed
    assert path.stat().st_mtime_ns == before
    assert "is reused: hellaswag, winogrande" in evaluate("--tuned", tuned_folder)
    assert path.stat().st_mtime_ns == before


def test_edited_rows_are_evaluated_again(evaluate, data_root, tmp_path):
    copied = shutil.copytree(data_root, tmp_path / "data")
    evaluate("--data-root", copied)
    rows = copied / "hellaswag" / "validation.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    assert "is reused: winogrande\n" in evaluate("--data-root", copied)
    assert read_result(only(tmp_path, "out/base-*/forgetting.json")).tasks["hellaswag"].n == 11


def test_another_limit_is_another_result(evaluate, tmp_path):
    evaluate("--limit", 4)
    printed = evaluate("--limit", 6)
    assert "reused" not in printed
    assert {read_result(path).tasks["hellaswag"].n for path in tmp_path.glob("out/base-*/forgetting.json")} == {4, 6}
    assert "is reused" in evaluate("--limit", 4)


def test_run_has_its_results(evaluate, tuned_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tuned_folder, run / "epoch_0")
    (run / "config.yaml").write_text("seed: 0\n")
    evaluate("--tuned", run, "--limit", 4)
    result = read_results(run / "evaluation")["forgetting"]
    assert read_result(base_path(run / "evaluation" / "forgetting.json", result)).is_base
    assert "with limit=4 in place of 6 and will be replaced" in evaluate("--tuned", run, "--limit", 6)
    assert read_results(run / "evaluation")["forgetting"].tasks["hellaswag"].n == 6
    weights = load_file(run / "epoch_0" / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, run / "epoch_0" / "model.safetensors", {"format": "pt"})  # fmt: skip
    assert "is of other weights and will be replaced" in evaluate("--tuned", run, "--limit", 6)


def test_second_evaluation_waits_for_the_first(evaluate, tmp_path, monkeypatch):
    evaluate(tasks="winogrande")
    [folder] = (tmp_path / "out").iterdir()
    info = runner.logger.info
    with (folder / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def release(message):
            info(message)
            if "waits for it" in message:
                fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(runner.logger, "info", release)
        printed = evaluate(tasks="hellaswag")
    assert f"another finch evaluate writes into {folder}; this one waits for it" in printed
    assert read_result(folder / "forgetting.json").tasks.keys() == {"winogrande", "hellaswag"}


def test_adapter_equals_the_merged_model(evaluate, base_folder, tmp_path):
    torch.manual_seed(0)
    name = "model.layers.1.self_attn.q_proj"
    a, b = 0.3 * torch.randn(2, 32), 0.3 * torch.randn(32, 2)
    adapter, merged = tmp_path / "adapter", shutil.copytree(base_folder, tmp_path / "merged")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    parts = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(parts, adapter / "adapter_model.safetensors")
    weights = load_file(merged / "model.safetensors")
    weights[f"{name}.weight"] += 3 * (b @ a)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    evaluate("--tuned", adapter, merged, tasks="winogrande")
    values = {}
    for folder in ("base", "adapter", "merged"):
        samples = read_lines(only(tmp_path, f"out/{folder}-*/forgetting.winogrande.jsonl"))
        values[folder] = [value for sample in samples for value in sample["loglikelihoods"]]
    assert values["adapter"] == pytest.approx(values["merged"], abs=1e-4)
    assert values["adapter"] != pytest.approx(values["base"], abs=1e-2)


def test_language_waits_for_a_judge(evaluate, tuned_folder, data_root, tmp_path):
    rows = [{"instruction": f"the {word}", "input": "", "output": "a bird"} for word in WORDS]
    (data_root / "galician_alpaca").mkdir()
    (data_root / "galician_alpaca" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = evaluate("--tuned", tuned_folder, "--limit", 3, suite="language", tasks="galician_alpaca")
    folder = only(tmp_path, "out/tuned-*")
    task = read_result(folder / "language.json").tasks["galician_alpaca"]
    assert (task.score, task.n) == (None, 0)
    assert len(read_samples(folder, task)) == 3
    assert f"finch judge {folder}" in printed
    judged = (folder / "language.json").read_text().replace(task.definition, f"{task.definition}; judged: by a model")
    (folder / "language.json").write_text(judged)
    printed = evaluate("--tuned", tuned_folder, "--limit", 3, suite="language", tasks="galician_alpaca")
    assert f"{folder / 'language.json'} is reused: galician_alpaca" in printed  # the judge's work is kept


def test_broken_weights_leave_no_score(capsys, base_folder, data_root, tuned_folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tuned_folder, broken)
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"] *= float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    options = ["--base", base_folder, "--tuned", broken, "--data-root", data_root, "--out", tmp_path / "out"]
    code, out, err = finch(capsys, "evaluate", *map(str, options), "--tasks", "hellaswag")
    assert code == 1
    [line] = [line for line in err.splitlines() if line.startswith("finch: error: ")]
    assert f"--tuned={broken}: task hellaswag, document" in line
    assert "the log-likelihood of an answer is nan" in line
    assert not list(tmp_path.glob("out/broken-*/*.json"))
    assert not out


KILLED = """
import os, signal, sys
from finch.cli.main import main
from finch.evaluation import language_model

score, batches = language_model.LanguageModel._score, []

def killing(self, rows, requests):
    if len(batches) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    batches.append(rows)
    return score(self, rows, requests)

language_model.LanguageModel._score = killing
main(sys.argv[1:])
"""


def test_killed_evaluation_continues(evaluate, base_folder, data_root, tmp_path, monkeypatch):
    from finch.evaluation.language_model import LanguageModel

    arguments = ["evaluate", "--base", base_folder, "--data-root", data_root, "--suite", "forgetting"]
    arguments += ["--tasks", "hellaswag,winogrande", "--batch-size", "4"]
    command = [sys.executable, "-c", KILLED, *map(str, arguments), "--out", str(tmp_path / "out")]
    killed = subprocess.run(command, env=environment(ROOT), capture_output=True, text=True, check=False, timeout=120)
    assert killed.returncode == -9, killed.stderr
    assert not list(tmp_path.glob("out/*/*.json"))
    assert len(read_lines(only(tmp_path, "out/base-*/forgetting.hellaswag.answers.jsonl"))) == 1 + 5

    batches, score = [], LanguageModel._score
    monkeypatch.setattr(LanguageModel, "_score", lambda self, rows, requests: batches.append(rows) or score(self, rows, requests))  # fmt: skip
    assert "hellaswag continues after 5 batches" in evaluate("--batch-size", 4)
    num_continued = len(batches)
    batches.clear()
    evaluate("--batch-size", 4, "--out", tmp_path / "straight")
    assert num_continued == len(batches) - 5
    for name in ("forgetting.hellaswag.jsonl", "forgetting.winogrande.jsonl", "forgetting.json"):
        one, other = (only(tmp_path, f"{folder}/base-*/{name}").read_bytes() for folder in ("out", "straight"))
        assert one == other, name  # bit for bit
    assert not list(tmp_path.glob("out/*/*answers*"))


def test_two_processes_give_the_results_of_one(evaluate, base_folder, data_root, tmp_path):
    arguments = ["evaluate", "--base", base_folder, "--data-root", data_root, "--suite", "forgetting"]
    arguments += ["--tasks", "hellaswag,winogrande", "--limit", "7", "--out", tmp_path / "two", "--nproc_per_node", "2"]
    command = [sys.executable, "-m", "finch.cli", *map(str, arguments)]
    done = subprocess.run(command, env=environment(ROOT), capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    evaluate("--limit", 7)
    one = read_result(only(tmp_path, "out/base-*/forgetting.json"))
    path = only(tmp_path, "two/base-*/forgetting.json")
    two = read_result(path)
    assert {name: (task.score, task.n) for name, task in two.tasks.items()} == {name: (task.score, task.n) for name, task in one.tasks.items()}  # fmt: skip
    assert one.settings == two.settings
    for name, task in two.tasks.items():
        samples = read_samples(only(tmp_path, "out/base-*"), one.tasks[name])
        for sample, other in zip(samples, read_samples(path.parent, task), strict=True):
            values, others = sample.pop("loglikelihoods"), other.pop("loglikelihoods")
            assert sample == other
            assert values == pytest.approx(others, abs=1e-4)
    assert done.stdout.count("acc_norm") == 1  # one rank reports


def test_users_own_task_is_evaluated(evaluate, base_folder, tmp_path):
    rows = [
        {"text": f"the {word}", "options": ["fox", "bird"], "right": index % 2} for index, word in enumerate("abcdef")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "animals.yaml").write_text(
        "task: animals\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: '{{options}}'\ndoc_to_target: right\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    evaluate("--include-path", tmp_path, "--new-task", "animals", suite="", tasks="animals")
    result = read_result(only(tmp_path, "out/base-*/custom.json"))
    task = result.tasks["animals"]
    assert (task.role, task.metric, task.n) == ("new", "acc", 6)
    assert task.definition == "animals of lm-eval, acc; 0-shot; no chat template"
