"""`finch evaluate` from folders to result files: what is reused, continued, shared among processes, and written."""

import fcntl
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import lm_eval
import pytest
import torch
from helpers.evaluation import read_lines, write_data_root
from helpers.rows import write_lines
from helpers.runs import ROOT, environment, finch
from safetensors.torch import load_file, save_file

from benchmarks.tiny_text import WORDS
from finch.evaluation import harness, runner
from finch.evaluation.judge import _JUDGED
from finch.evaluation.language_model import LanguageModel
from finch.evaluation.results import base_path, read_result, read_results, read_samples, write_result
from finch.evaluation.statistics import paired_delta
from finch.evaluation.tasks.registry import TASKS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    return write_data_root(tmp_path_factory.mktemp("data"))


def change(folder, function):
    """Replaces each tensor of a model by what the function makes of its name and the tensor."""
    weights = load_file(folder / "model.safetensors")
    changed = {name: function(name, tensor) for name, tensor in weights.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def tuned_folder(base_folder, tmp_path_factory):
    """The base with noise on its weights."""
    folder = tmp_path_factory.mktemp("models") / "tuned"
    shutil.copytree(base_folder, folder)
    torch.manual_seed(0)
    change(folder, lambda name, tensor: tensor + 0.1 * torch.randn_like(tensor))
    return folder


@pytest.fixture
def evaluate(capsys, caplog, base_folder, data_root, tmp_path):
    """Runs the command; returns what it printed and logged."""

    def run(*arguments, suite="forgetting", tasks="hellaswag,winogrande", expected_code=0):
        caplog.clear()
        options = ["--base", base_folder, "--data-root", data_root, "--out", tmp_path / "out", "--tasks", tasks]
        options += ["--suite", suite] if suite else []
        code, out, err = finch(capsys, "evaluate", *map(str, [*options, *arguments]))
        assert code == expected_code, err
        return out + err + caplog.text

    return run


def only(folder, pattern):
    [path] = folder.glob(pattern)
    return path


def test_results_say_what_was_measured(evaluate, base_folder, tuned_folder, tmp_path):
    evaluate()
    base_file = only(tmp_path, "out/base-*/forgetting.json")
    base, written = read_result(base_file), base_file.stat().st_mtime_ns
    printed = evaluate("--tuned", tuned_folder)
    assert "Caution: fewer than 100 documents, so rough intervals: hellaswag (12), winogrande (12)." in printed
    assert f"{base_file} is reused: hellaswag, winogrande" in printed
    assert base_file.stat().st_mtime_ns == written
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
        numbers = f"{100 * task.score:.1f}  {100 * delta.mean:+.1f}  "
        assert numbers + f"[{100 * delta.low:+.1f},  {100 * delta.high:+.1f}]  12" in re.sub(" +", "  ", row)


def test_edited_rows_are_evaluated_again(evaluate, data_root, tmp_path):
    copied = shutil.copytree(data_root, tmp_path / "data")
    evaluate("--data-root", copied)
    rows = copied / "hellaswag" / "validation.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    os.utime(rows, (0, 0))  # as `cp -p` and `rsync -a` leave it
    assert "is reused: winogrande\n" in evaluate("--data-root", copied)
    assert read_result(only(tmp_path, "out/base-*/forgetting.json")).tasks["hellaswag"].n == 11


def test_a_part_has_documents_for_each_rank(evaluate, monkeypatch):
    monkeypatch.setattr(harness, "launched_ranks", lambda: 13)
    printed = evaluate(expected_code=1)
    assert "hellaswag: 12 documents of hellaswag are fewer than --nproc_per_node=13; start fewer ranks" in printed


@pytest.mark.parametrize("uses_chat_template", [True, False])
def test_a_chat_has_no_token_that_its_template_does_not_write(monkeypatch, uses_chat_template):
    """Training has none either; plain text has the tokenizer's own."""
    seen = []
    monkeypatch.setattr(lm_eval, "evaluate", lambda lm, **_: seen.append(lm.add_bos_token))
    task = replace(TASKS["hellaswag"], uses_chat_template=uses_chat_template)
    manager = SimpleNamespace(load=lambda _: {"tasks": {}})
    tokenizer = SimpleNamespace(chat_template="a template")
    harness.Harness(manager, [task], tokenizer, None).evaluate(SimpleNamespace(), task)
    assert seen == [False if uses_chat_template else None]


def test_another_limit_is_another_result(evaluate, tmp_path):
    evaluate("--limit", 4)
    assert "reused" not in evaluate("--limit", 6)
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
    change(run / "epoch_0", lambda name, tensor: 2 * tensor)
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


def test_language_waits_for_a_judge(evaluate, tuned_folder, data_root, tmp_path):
    rows = [{"instruction": f"the {word}", "input": "", "output": "a bird"} for word in WORDS]
    (data_root / "galician_alpaca").mkdir()
    write_lines(data_root / "galician_alpaca" / "rows.jsonl", *rows)
    options = {"suite": "language", "tasks": "galician_alpaca"}
    printed = evaluate("--tuned", tuned_folder, "--limit", 3, **options)
    folder = only(tmp_path, "out/tuned-*")
    task = read_result(folder / "language.json").tasks["galician_alpaca"]
    assert (task.score, task.n) == (None, 0)
    assert len(read_samples(folder, task)) == 3
    assert f"finch evaluate --judge URL --model NAME {folder}" in printed
    judged = (folder / "language.json").read_text().replace(task.definition, f"{task.definition}; judged: by a model")
    (folder / "language.json").write_text(judged)
    printed = evaluate("--tuned", tuned_folder, "--limit", 3, **options)
    assert f"{folder / 'language.json'} is reused: galician_alpaca" in printed  # the judge's work is kept


def test_broken_weights_leave_no_score(evaluate, tuned_folder, tmp_path):
    broken = shutil.copytree(tuned_folder, tmp_path / "broken")
    change(broken, lambda name, tensor: tensor * math.nan if name == "lm_head.weight" else tensor)
    [line] = re.findall(r"^finch: error: (.*)", evaluate("--tuned", broken, expected_code=1), re.MULTILINE)
    assert f"--tuned={broken}: task hellaswag, document" in line
    assert "the log-likelihood of an answer is nan" in line
    assert not list(tmp_path.glob("out/broken-*/*.json"))


def test_killed_evaluation_continues(evaluate, tmp_path, monkeypatch):
    """What is on the disk after five batches is what a kill leaves behind."""
    batches, score = [], LanguageModel._score

    def copying(model, rows, requests):
        if len(batches) == 5:
            shutil.copytree(tmp_path / "out", tmp_path / "killed")
        batches.append(rows)
        return score(model, rows, requests)

    monkeypatch.setattr(LanguageModel, "_score", copying)
    evaluate("--batch-size", 4)
    num_batches = len(batches)
    assert not list(tmp_path.glob("killed/*/*.json"))
    answers = only(tmp_path, "killed/base-*/forgetting.hellaswag.answers.jsonl")
    assert len(read_lines(answers)) == 1 + 5
    answers.write_text(answers.read_text() + '{"batch": "cut')
    printed = evaluate("--batch-size", 4, "--out", tmp_path / "killed")
    assert "hellaswag continues after 5 batches" in printed
    assert len(batches) == num_batches + num_batches - 5
    for name in ("forgetting.hellaswag.jsonl", "forgetting.winogrande.jsonl", "forgetting.json"):
        one, other = (only(tmp_path, f"{folder}/base-*/{name}").read_bytes() for folder in ("out", "killed"))
        assert one == other, name  # bit for bit
    assert not list(tmp_path.glob("*/*/*answers*"))


@pytest.mark.slow
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
    assert one.settings == two.settings
    for name, task in two.tasks.items():
        assert task == one.tasks[name]
        samples = read_samples(only(tmp_path, "out/base-*"), task)
        for sample, other in zip(samples, read_samples(path.parent, task), strict=True):
            values, others = sample.pop("loglikelihoods"), other.pop("loglikelihoods")
            assert sample == other
            assert values == pytest.approx(others, abs=1e-4)
    assert done.stdout.count("acc_norm") == 1  # one rank reports


def test_users_own_task_is_evaluated(evaluate, tmp_path):
    options = {"options": ["fox", "bird"]}
    write_lines(tmp_path / "rows.jsonl", *({"text": f"the {i}", "right": i % 2, **options} for i in range(6)))
    (tmp_path / "animals.yaml").write_text(
        "task: animals\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: '{{options}}'\ndoc_to_target: right\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    own = ("--include-path", tmp_path)
    evaluate(*own, suite="", tasks="animals")
    printed = evaluate(*own, "--new-task", "animals", suite="", tasks="animals")
    assert "is reused: animals" in printed  # in its new role
    result = read_result(only(tmp_path, "out/base-*/custom.json"))
    task = result.tasks["animals"]
    assert (task.role, task.metric, task.n) == ("new", "acc", 6)
    assert re.fullmatch(r"animals of lm-eval \([0-9a-f]{12}\), acc; 0-shot; no chat template", task.definition)


def test_models_get_the_same_examples(evaluate, base_folder, tmp_path):
    """Drawn for a task anew, as lm-eval's command draws them: two models of the same weights differ by nothing."""
    rows = [{"text": f"the {word}", "right": number % 2} for number, word in enumerate(WORDS[:12])]
    write_lines(tmp_path / "test.jsonl", *rows[:4])
    write_lines(tmp_path / "train.jsonl", *rows[4:])
    (tmp_path / "animals.yaml").write_text(
        "task: animals\ndataset_path: json\noutput_type: multiple_choice\n"
        "test_split: test\ntraining_split: train\nfewshot_split: train\nnum_fewshot: 2\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/test.jsonl, train: {tmp_path}/train.jsonl}}}}\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: [fox, bird]\ndoc_to_target: right\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    copy, own = shutil.copytree(base_folder, tmp_path / "copy"), ("--include-path", tmp_path)
    assert "+0.0   no document differs" in evaluate(*own, "--tuned", copy, suite="", tasks="animals")
    results = [only(tmp_path, f"out/{name}-*/custom.json") for name in ("base", "copy")]
    one, other = (read_samples(path.parent, read_result(path).tasks["animals"]) for path in results)
    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    options = {
        "tasks": ["animals"],
        "task_manager": manager,
        "device": "cpu",
        "bootstrap_iters": 0,
        "log_samples": True,
    }
    found = lm_eval.simple_evaluate("hf", f"pretrained={base_folder},dtype=float32", **options)["samples"]["animals"]
    for sample, same, reference in zip(one, other, sorted(found, key=lambda each: each["doc_id"]), strict=True):
        assert sample["responses"] == same["responses"]
        assert sample["responses"] == pytest.approx([each[0] for each in reference["filtered_resps"]], abs=1e-3)
    definition = read_result(results[0]).tasks["animals"].definition
    write_lines(tmp_path / "train.jsonl", *rows[5:])  # other examples are another task
    evaluate(*own, suite="", tasks="animals")
    assert read_result(results[0]).tasks["animals"].definition != definition


def test_a_judged_score_does_not_outlive_its_base(evaluate, base_folder, tuned_folder, tmp_path):
    evaluate("--tuned", tuned_folder)
    path = only(tmp_path, "out/tuned-*/forgetting.json")
    result = read_result(path)
    task = result.tasks["hellaswag"]
    judged = replace(task, definition=f"{task.definition}{_JUDGED}a judge's", others={"unparsed": 0.0})
    write_result(path.parent, replace(result, tasks={**result.tasks, "hellaswag": judged}), {})
    evaluate("--tuned", tuned_folder)
    assert read_result(path).tasks["hellaswag"] == judged
    other = shutil.copytree(base_folder, tmp_path / "other")
    change(other, lambda name, tensor: tensor * 1.01)
    evaluate("--base", other, "--tuned", tuned_folder)
    renewed = read_result(path)
    assert renewed.tasks["hellaswag"] == replace(task, score=None, n=0, others={})
    assert {sample["score"] for sample in read_samples(path.parent, renewed.tasks["hellaswag"])} == {None}
    assert renewed.tasks["winogrande"] == result.tasks["winogrande"]
