"""The epoch that a sweep chooses by validation scores: by what, and that an interruption anywhere costs nothing.

Functions stand in the place of the processes of `finch run`, `finch evaluate` and `finch average`.
"""

import itertools
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.rows import write_lines
from helpers.runs import finch
from safetensors.torch import load_file, save_file

from benchmarks.tiny_text import WORDS
from finch.evaluation.results import SuiteResult, TaskResult, base_path, read_result, write_result
from finch.evaluation.tasks.registry import SUITES, TASKS
from finch.study.sweep import local
from finch.study.sweep.grid import cells_of, read_grid
from finch.study.sweep.job import FINCH, Job
from finch.study.sweep.local import LocalSweep

SCORES = {"epoch_0": 0.25, "epoch_1": 0.75, "epoch_2": 0.5}
CFG = SimpleNamespace(
    epochs=3, forgetting_budget=None, early_stopping=None, checkpointer=SimpleNamespace(checkpoint_dir="base")
)
SUITE = "knowledge_validation"


class Killed(BaseException):
    pass


class Programs:
    """What the commands of a sweep do; ``events`` are those that have ended."""

    def __init__(self):
        self.events, self.scores, self.returncode, self.pid = [], dict(SCORES), 0, None

    def __call__(self, command, **_):
        verb, *words = command[len(FINCH) :]
        options = dict(itertools.pairwise(words))
        if verb == "run":
            self.train(Path(next(word for word in words if word.startswith("output_dir="))[len("output_dir=") :]))
        elif verb == "average":
            folder = Path(options["--out"], "alpha_0.5")
            folder.mkdir(parents=True)
            (folder / "model").write_text((Path(options["--tuned"]) / "model").read_text())
        else:
            models = words[words.index("--tuned") + 1 : words.index("--out")]
            for model in map(Path, models):
                self.evaluate(model, options["--suite"].split(","), Path(options["--out"]))
        return self

    def poll(self):
        return 0

    def train(self, run):
        """Of three epochs the last has the lowest loss."""
        for name in SCORES:
            (run / name).mkdir(parents=True)
            (run / name / "model").write_text(name)
            (run / name / "config.json").write_text("{}")
        (run / "config.yaml").write_text("epochs: 3")
        (run / "checkpoints").mkdir()
        (run / "best").symlink_to("epoch_2")
        self.events.append("train")

    def evaluate(self, model, suites, out):
        is_epoch = model.name.startswith("epoch_")
        folder = model.parent / "evaluation" / model.name if is_epoch else model / "evaluation"
        weights = (model / "model" if is_epoch else model / "best" / "model").read_text()
        for suite in suites:
            path = folder / f"{suite}.json"
            if path.exists() and read_result(path).weights == weights:
                continue
            [task] = SUITES[suite]
            result = TaskResult(
                "new", "acc", TASKS[task].definition(False), self.scores[weights], 4, f"{suite}.{task}.jsonl"
            )
            base = os.path.relpath(out / "base" / path.name, folder)
            samples = [{"doc_id": 0, "doc_hash": "a", "score": self.scores[weights]}]
            result = SuiteResult(
                suite, str(model), weights, False, base, {"limit": None, "data": "hub"}, {}, {task: result}
            )
            write_result(folder, result, {task: samples})
            self.events.append(f"{model.name}: {suite} of {weights}")


@pytest.fixture
def programs(monkeypatch):
    programs = Programs()
    monkeypatch.setattr(local, "_POLL_S", 0)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(local, "subprocess", SimpleNamespace(Popen=programs, STDOUT=None, DEVNULL=None))
    return programs


def make_jobs(folder, **content):
    folder.mkdir(exist_ok=True)
    evaluate = {"suites": ["knowledge"], "select_by": SUITE}
    content = {"config": "qwen3/4B_sft", "out": str(folder / "out"), "evaluate": evaluate, **content}
    content.setdefault("grid", {"method": ["sft", "wise_ft"]})
    (folder / "grid.yaml").write_text(yaml.safe_dump(content))
    grid = read_grid(str(folder / "grid.yaml"))
    return [Job(grid, cell, "", CFG) for cell in cells_of(grid)]


def sweep(folder, num_parallel=1, **content):
    jobs = make_jobs(folder, **content)
    (folder / "out").mkdir(exist_ok=True)
    return LocalSweep(jobs, num_parallel=num_parallel).run()


def write_tofu(folder, number=120):
    """Rows of the tiny tokenizer's words; a tenth are validation rows."""
    rng = random.Random(0)
    rows = [
        {key: " ".join(rng.choices(WORDS, k=4)) for key in ("question", "answer", "paraphrased_question")}
        for _ in range(number)
    ]
    wrong = [[" ".join(rng.choices(WORDS, k=3)) for _ in "12345"] for _ in rows]
    perturbed = [
        {**row, "paraphrased_answer": row["answer"], "perturbed_answer": answers}
        for row, answers in zip(rows, wrong, strict=True)
    ]
    (folder / "tofu").mkdir(parents=True)
    write_lines(folder / "tofu" / "full.jsonl", *rows)
    write_lines(folder / "tofu" / "forget10_perturbed.jsonl", *perturbed)
    return str(folder)


EVENTS = [
    *("train", *(f"{epoch}: {SUITE} of {epoch}" for epoch in SCORES)),
    *("sft: knowledge of epoch_1", "wise_ft: knowledge of epoch_1", f"wise_ft: {SUITE} of epoch_1"),
]


def check(folder, programs):
    run = folder / "out" / "sft"
    assert sorted(programs.events) == sorted(EVENTS)  # nothing was made twice
    assert (run / "best").readlink() == Path("epoch_1")
    assert {path.name for path in run.iterdir()} == {"best", "epoch_1", "config.yaml", "cell.json", "evaluation"}
    assert json.loads((run / "cell.json").read_text())["status"] == "evaluated"
    path = run / "evaluation" / f"{SUITE}.json"
    assert base_path(path, read_result(path)) == folder / "out" / "base" / path.name
    assert read_result(path).weights == (folder / "out" / "wise_ft" / "best" / "model").read_text() == "epoch_1"


def test_sweep_continues_after_a_kill_at_any_change_of_a_file(programs, tmp_path, monkeypatch):
    """A kill before each file that is replaced or touched, and before and within each folder that is removed."""
    left, replace, utime, rmtree = 0, os.replace, os.utime, shutil.rmtree

    def count():
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    def remove(folder, **options):
        count()
        for path in sorted(Path(folder).glob("*"))[:1]:
            path.unlink()
        count()
        rmtree(folder, **options)

    def counted(function):
        return lambda *words, **options: (count(), function(*words, **options))[1]

    for number in range(1, 100):
        left, folder = number, tmp_path / str(number)
        programs.events.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted(replace))
            patch.setattr(os, "utime", counted(utime))
            patch.setattr(shutil, "rmtree", remove)
            try:
                sweep(folder, keep="best")
            except Killed:
                left = None
        assert sweep(folder, keep="best") == {}  # after no kill it finds everything done
        check(folder, programs)
        if left is not None:
            break
    assert 20 < number < 99


def test_first_of_equal_epochs_is_chosen_and_all_are_kept(programs, tmp_path):
    programs.scores |= {"epoch_2": 0.75, "epoch_0": 0.5}
    sweep(tmp_path)
    run = tmp_path / "out" / "sft"
    assert (run / "best").readlink() == Path("epoch_1")
    assert {path.name for path in run.glob("epoch_*")} == set(SCORES)


def test_earlier_sweep_without_select_by_is_scored_and_what_used_the_other_epoch_made_again(programs, tmp_path):
    sweep(tmp_path, evaluate={"suites": ["knowledge"]})
    assert "sft: knowledge of epoch_2" in programs.events
    programs.events.clear()
    sweep(tmp_path)
    assert sorted(programs.events) == sorted(set(EVENTS) - {"train"})


def test_epochs_that_are_gone_cannot_be_chosen_from(programs, tmp_path):
    """Those that a sweep without select_by has removed; one with it had scored them."""
    for name, suites in (("by_loss", {"evaluate": {"suites": ["knowledge"]}}), ("by_suite", {})):
        sweep(tmp_path / name, keep="best", grid={"method": ["sft"]}, **suites)
        [job] = make_jobs(tmp_path / name, keep="best", grid={"method": ["sft"]})
        write_lines(job.cell.folder / "metrics.jsonl", *({"step": epoch + 1, "epoch": epoch} for epoch in range(3)))
        assert job.has_lost_epochs() == (name == "by_loss")


def test_cells_with_all_epochs_are_at_most_as_many_as_run_at_a_time(programs, tmp_path):
    sweep(tmp_path, grid={"seed": [0, 1, 2]}, keep="best", num_parallel=2)
    scored = [event for event in programs.events if event == "train" or event.startswith("epoch_2")]
    full = [
        scored[: n + 1].count("train") - sum("epoch_2" in one for one in scored[: n + 1]) for n in range(len(scored))
    ]
    assert (max(full), full[-1], scored.count("train")) == (2, 0, 3)


def test_failed_evaluation_leaves_a_cell_trained_whose_last_epoch_is_gone(programs, tmp_path, monkeypatch):
    evaluate = programs.evaluate

    def fail(model, suites, out):
        if not model.name.startswith("epoch_"):
            return
        evaluate(model, suites, out)

    monkeypatch.setattr(programs, "evaluate", fail)
    failed = sweep(tmp_path, keep="best", grid={"method": ["sft"]})
    assert failed["sft"].startswith("evaluation: it has written no result")
    monkeypatch.setattr(programs, "evaluate", evaluate)
    assert sweep(tmp_path, keep="best", grid={"method": ["sft"]}) == {}
    assert programs.events.count("train") == 1


def test_real_results_of_the_chosen_epoch_are_the_runs(base_folder, tmp_path, capsys, caplog):
    """The commands of a job in this process: what an epoch has scored is not scored again as the run.s."""
    evaluate = {
        "tasks": ["tofu"],
        "select_by": SUITE,
        "base": str(base_folder),
        "data_root": write_tofu(tmp_path / "data"),
    }
    [job] = make_jobs(tmp_path, evaluate=evaluate, grid={"method": ["sft"]})
    run = job.cell.folder
    for name in ("epoch_0", "epoch_1"):
        shutil.copytree(base_folder, run / name)
    (run / "config.yaml").write_text("epochs: 2")
    (run / "best").symlink_to("epoch_0")
    weights = load_file(run / "epoch_1" / "model.safetensors")
    save_file(
        {key: -tensor for key, tensor in weights.items()}, run / "epoch_1" / "model.safetensors", {"format": "pt"}
    )

    of_epochs, of_run = job.evaluate_commands()
    assert finch(capsys, *of_epochs[len(FINCH) :])[0] == 0
    scores = {name: read_result(run / "evaluation" / name / f"{SUITE}.json") for name in ("epoch_0", "epoch_1")}
    values = {name: result.tasks["tofu_validation"].score for name, result in scores.items()}
    job.select_epoch()
    best = max(values, key=values.get)
    assert len(set(values.values())) == 2, values
    assert (run / "best").readlink() == Path(best)
    assert job.evaluate_commands() == [of_run]
    assert finch(capsys, *of_run[len(FINCH) :])[0] == 0
    assert f"{run}/evaluation/{SUITE}.json is reused: tofu_validation" in caplog.text
    own = read_result(run / "evaluation" / f"{SUITE}.json")
    assert (own.weights, own.tasks["tofu_validation"].score) == (scores[best].weights, values[best])
    assert job.evaluate_commands() == []
