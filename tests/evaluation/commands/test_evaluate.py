"""`finch evaluate` with mistakes: one line each, before any weights are loaded."""

import importlib.metadata
import shutil

import pytest
from helpers.evaluation import write_data_root
from helpers.runs import finch

from finch.evaluation import loading, runner, skills
from finch.evaluation.harness import check_own_names
from finch.evaluation.tasks.registry import TASKS


@pytest.fixture
def refused(capsys, base_folder, tmp_path, monkeypatch):
    """The one line that the command ends with."""
    data_root = write_data_root(tmp_path / "data")
    for module in (runner, skills):
        monkeypatch.setattr(module, "load_model", lambda *_: pytest.fail("weights were loaded"))

    def run(*arguments, base=base_folder, data=("--data-root", data_root), suite=("--suite", "forgetting")):
        options = ("--base", base, "--out", tmp_path / "out", *suite, *data, *arguments)
        code, out, err = finch(capsys, "evaluate", *map(str, options))
        assert (code, out) == (1, "")
        [line] = err.strip().splitlines()
        return line.removeprefix("finch: error: ")

    return run


def test_unknown_names_are_corrected(refused):
    assert refused("--suite", "forgeting") == "--suite forgeting is unknown, did you mean forgetting?"
    assert "--tasks helaswag is not in --suite forgetting, did you mean hellaswag?" in refused("--tasks", "helaswag")
    assert refused("--tasks", "tofu").startswith("--tasks tofu is not in --suite forgetting: it has hellaswag, ")
    assert refused(suite=()).startswith(
        "--tuned is missing; give the model to compare with --base, or --suite forgetting"
    )
    assert "--new-task tofu is not one of the lm-eval tasks of --tasks" in refused("--new-task", "tofu")


def test_missing_folders_are_named(refused):
    assert "--base=/nowhere is not a folder" in refused(base="/nowhere")
    assert "--base=. has no config.json" in refused(base="")
    assert "--include-path=/nowhere is not a folder" in refused("--include-path", "/nowhere")
    assert "--data-root=/nowhere is not a folder" in refused("--data-root", "/nowhere")


def test_own_task_of_a_name_that_finch_has_is_refused(refused, tmp_path):
    """It would be reported, and kept, as finch's."""
    for name in ("hellaswag", "mmlu_anatomy"):
        (tmp_path / "own.yaml").write_text(f"task: {name}\ndataset_path: json\n")
        line = refused("--include-path", tmp_path, "--tasks", "mmlu,hellaswag")
        assert line == f"{tmp_path}: {name} is the name of a task of finch; give yours another one"
    (tmp_path / "own.yaml").write_text("task: mmlu_anatomy\ntag: winogrande\ndataset_path: json\n")
    check_own_names(tmp_path, [TASKS["winogrande"]])  # neither for a tag nor for a task that is not asked for


def test_out_that_cannot_be_written_is_named(refused, tmp_path):
    out = tmp_path / "rows.jsonl/out"
    out.parent.touch()
    line = refused("--tasks", "winogrande", "--out", out)
    assert f"--out={out} cannot be written (Not a directory); give another folder" in line


def test_hub_that_is_forbidden_is_named(refused):
    assert refused("--tasks", "hellaswag", data=()).startswith("--data-root is missing and HF_HUB_OFFLINE=1 forbids")


def test_punkt_is_checked_for_ifeval(refused, tmp_path, monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    (tmp_path / "data" / "ifeval").mkdir()
    (tmp_path / "data" / "ifeval" / "prompts.jsonl").write_text("{}\n")
    fix = "ifeval: NLTK's punkt_tab is missing; fetch it: python -c \"import nltk; nltk.download('punkt_tab')\""
    assert refused("--tasks", "ifeval").startswith(fix)


def test_another_vocabulary_is_refused(refused, base_folder, tmp_path, monkeypatch):
    tuned = shutil.copytree(base_folder, tmp_path / "tuned")
    monkeypatch.setattr(loading, "hash_vocabulary", lambda tokenizer: tokenizer.name_or_path)
    assert "tuned has another vocabulary than --base=" in refused("--tuned", tuned, "--tasks", "hellaswag")
    monkeypatch.undo()
    tokenizer = loading.load_tokenizer(base_folder, "--base")
    before = loading.hash_vocabulary(tokenizer)
    tokenizer.add_tokens(["<new>"])
    assert loading.hash_vocabulary(tokenizer) != before


def test_tokenizer_that_cannot_be_loaded_is_named(refused, base_folder, tmp_path):
    tuned = shutil.copytree(base_folder, tmp_path / "tuned")
    for path in tuned.glob("tokenizer*"):
        path.unlink()
    assert "tuned has no tokenizer that transformers can load" in refused("--tuned", tuned, "--tasks", "hellaswag")


@pytest.mark.parametrize("version", ["0.4.12", "0.5.0"])
def test_other_harnesses_are_refused(refused, monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    needs = "finch evaluate needs lm-eval<0.5,>=0.4.13: pip install"
    assert refused().startswith(f"lm-eval {version} is installed; {needs}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit=0 must be at least"),
        (["--limit", "1", "--nproc_per_node", "2"], "--limit=1 must be at least"),
        (["--batch-size", "many"], "--batch-size=many must be a number of rows or auto"),
        (["--nproc_per_node", "0"], "--nproc_per_node=0 must be at least 1"),
    ],
)
def test_numbers_are_checked(refused, arguments, message):
    assert message in refused(*arguments)
