"""What is killed and replayed: a run, an average, an evaluation and a sweep. Each writes below one folder and is continued by its own command."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import yaml

from benchmarks import tiny_job, tiny_text
from benchmarks.survival.same_run import differences
from finch.base import run_files
from finch.base.errors import UserError
from finch.checkpoint.reader import latest_valid, list_checkpoints, read_state
from finch.cli.main import main as finch
from finch.distributed.parallel import Parallel
from finch.evaluation.results import read_results
from finch.study.sweep.grid import cells_of, read_cell, read_grid
from finch.weights.files import is_whole

RECIPE = tiny_job.ROOT / "recipes" / "finch_full_finetune.py"
FINCH = (sys.executable, "-m", "finch.cli")
EPOCHS, STEPS, ROWS = 2, 12, 46  # steps of 4 an epoch, the last one short
TASK = """\
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: '{{{{question}}}}'
doc_to_choice: ['{choices[0]}', '{choices[1]}']
doc_to_target: right
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


class Case:
    """A command that writes below ``job``, a path that stays the same, since results name paths.

    Attributes:
        promise: what the command prints once something is on the disk for good.
        reference: a copy of ``job`` after an undisturbed start.
    """

    name: ClassVar[str]
    promise: ClassVar[re.Pattern[bytes]]
    is_in_process: ClassVar[bool] = True

    def __init__(self, out: Path) -> None:
        self.out = out / self.name
        self.job, self.reference, self.run = self.out / "job", self.out / "reference", self.out / "job" / "run"
        self._start = self.out / "start"
        self.out.mkdir(parents=True)
        tiny_job.make_base(self.out / "base")
        tiny_text.make_rows(self.out / "rows.jsonl", ROWS, random.Random(1))
        checkpoint = {"every_n_steps": 8, "keep_last": 1, "async": False}
        dataset = tiny_job.instruct_dataset(self.out / "rows.jsonl")
        changes = {"epochs": EPOCHS, "checkpoint": checkpoint, "dataset_validation": dataset, **self.changes()}
        config = tiny_job.make_config(self.out / "base", self.out / "rows.jsonl", self.run, **changes)
        self.config = self.out / "config.yaml"
        self.config.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._start.mkdir()
        self.make_start()

    def changes(self) -> dict[str, Any]:
        return {}

    def make_start(self) -> None:
        """Fills ``job`` with what the command needs; copied to every start."""

    def reset(self) -> None:
        shutil.rmtree(self.job, ignore_errors=True)
        shutil.copytree(self._start, self.job, symlinks=True)

    def keep_reference(self) -> None:
        shutil.copytree(self.job, self.reference, symlinks=True)

    def command(self) -> list[str]:
        """Starts or continues it."""
        raise NotImplementedError

    def is_half_done(self) -> bool:
        """Whether a recorded start is to be killed now."""
        raise NotImplementedError

    def wrong(self, said: Sequence[str]) -> str | None:
        """What is wrong with ``job`` for the code that continues from it; None: nothing.

        Args:
            said: the promises that were printed.
        """
        raise NotImplementedError

    def said(self, output: bytes) -> list[str]:
        """The promises in what was printed."""
        return [match[match.lastindex or 0].decode() for match in self.promise.finditer(output)]

    def finish(self) -> str | None:
        """Continues to the end, in this process where that can be; the error."""
        if not self.is_in_process:
            done = subprocess.run(self.command(), env=environment(), capture_output=True, text=True, check=False)
            return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [""])[-1]
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            logging.disable()
            try:
                self.call()
            except (SystemExit, UserError) as error:
                if getattr(error, "code", 1):
                    return f"{type(error).__name__} {error}"
            finally:
                logging.disable(logging.NOTSET)
        return None

    def call(self) -> None:
        """The command in this process."""
        finch(self.command()[len(FINCH) :])

    def differences(self) -> list[str]:
        """From the reference; empty: none."""
        return differences(self.job, self.reference)

    def _train(self) -> None:
        subprocess.run(
            [sys.executable, str(RECIPE), "--config", str(self.config)],
            env=environment(),
            check=True,
            capture_output=True,
        )
        shutil.copytree(self.job, self._start, symlinks=True, dirs_exist_ok=True)

    def _write_task(self) -> list[str]:
        """An lm-eval task of 12 rows; the options with which it is evaluated, a row at a time."""
        rng = random.Random(2)
        rows = [{"question": " ".join(rng.choices(tiny_text.WORDS, k=4)), "right": rng.randrange(2)} for _ in range(12)]
        (self.out / "animals.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        (self.out / "tasks").mkdir()
        text = TASK.format(rows=self.out / "animals.jsonl", choices=tiny_text.WORDS[:2])
        (self.out / "tasks" / "animals.yaml").write_text(text, encoding="utf-8")
        return ["animals", str(self.out / "tasks")]


def environment() -> dict[str, str]:
    return tiny_job.environment(tiny_job.ROOT, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


class Run(Case):
    """Two epochs of 12 steps, a checkpoint every 8 steps and at each epoch's end, an export and a validation at each epoch's end."""

    name = "run"
    promise = re.compile(rb"saved the state of (step \d+)|saved \S*/(epoch_\d+) in")

    def command(self) -> list[str]:
        return [sys.executable, str(RECIPE), "--config", str(self.config), "resume_from_checkpoint=auto"]

    def call(self) -> None:
        with mock.patch.object(sys, "argv", self.command()[1:]):
            importlib.import_module("finch_full_finetune").recipe_main()

    def is_half_done(self) -> bool:
        file = self.run / run_files.METRICS
        return file.exists() and file.read_bytes().count(b"\n") >= STEPS + 2

    def wrong(self, said: Sequence[str]) -> str | None:
        used, damages = latest_valid(list_checkpoints(self.run), Parallel(torch.device("cpu")))
        step = 0 if used is None else int(read_state(used)["step"])
        promised = max((int(each.split()[1]) for each in said if each.startswith("step ")), default=0)
        if damages:
            return damages[0]
        if step < promised:
            return f"step {promised} was said to be saved, {step} would be resumed"
        for epoch in range(EPOCHS):
            folder = self.run / f"epoch_{epoch}"
            is_promised = folder.name in said and step >= (epoch + 1) * STEPS  # else it is written again
            if (is_promised or folder.exists()) and not is_whole(folder):
                return f"{folder.name} was said to be saved, or is there, and is not whole"
        return None


class TwoRanks(Run):
    """The same on two ranks, with saves in the background."""

    name = "two_ranks"
    is_in_process = False

    def changes(self) -> dict[str, Any]:
        return {"batch_size": 2, "checkpoint": {"every_n_steps": 8, "keep_last": 1}}

    def command(self) -> list[str]:
        return [*tiny_job.torchrun(2), *super().command()[1:]]


class Average(Case):
    """finch average of a run with a probe of old skills."""

    name = "average"
    promise = re.compile(rb"its model: \S*/(average/model)")

    def changes(self) -> dict[str, Any]:
        columns = {"input": "question", "output": "answer"}
        probe = {"data_files": str(self.out / "rows.jsonl"), "split": "train[:8]", "column_map": columns}
        return {"probes": {"old": probe}, "probes_every_n_steps": 8}

    def make_start(self) -> None:
        self._train()

    def command(self) -> list[str]:
        return [*FINCH, "average", str(self.run)]

    def is_half_done(self) -> bool:
        file = self.run / run_files.AVERAGE / "front.json"
        return file.exists() and len(json.loads(file.read_bytes())["points"]) >= 3

    def wrong(self, said: Sequence[str]) -> str | None:
        model, front = (self.run / run_files.AVERAGE / name for name in ("model", "front.json"))
        if (said or model.exists()) and not is_whole(model):
            return f"{model} was said to be written, or is there, and is not whole"
        if front.exists():
            json.loads(front.read_bytes())
        return None


class Evaluation(Case):
    """finch evaluate of a run and its pretrained model, a row at a time."""

    name = "evaluate"
    promise = re.compile(rb"^(\w+): \S+/custom.json$", re.MULTILINE)

    def make_start(self) -> None:
        self._train()
        name, folder = self._write_task()
        self._options = ["--tasks", name, "--include-path", folder, "--new-task", name, "--batch-size", "1"]

    def command(self) -> list[str]:
        models = ["--base", str(self.out / "base"), "--tuned", str(self.run), "--device", "cpu"]
        return [*FINCH, "evaluate", *models, *self._options, "--out", str(self.job / "evaluation")]

    def is_half_done(self) -> bool:
        answers = list(self.run.glob("evaluation/*.answers.jsonl"))
        return bool(answers) and answers[0].read_bytes().count(b"\n") > 5

    def wrong(self, said: Sequence[str]) -> str | None:
        folders = [self.run / run_files.EVALUATION, *self.job.glob("evaluation/base-*")]
        read = [read_results(folder) for folder in folders]
        whole = [
            folder
            for folder, results in zip(folders, read, strict=True)
            if "custom" in results and (folder / results["custom"].tasks["animals"].samples).stat().st_size
        ]
        return "results were said to be written, and are not there" if said and len(whole) < 2 else None


class Sweep(Case):
    """finch sweep: a run of SFT, its average with the pretrained model by WiSE-FT, and the evaluation of both."""

    name = "sweep"
    promise = re.compile(rb"^(\w+) +evaluated$", re.MULTILINE)
    is_in_process = False

    def make_start(self) -> None:
        name, folder = self._write_task()
        grid = {
            "config": str(self.config),
            "out": str(self.job),
            "grid": [{"method": ["sft"]}, {"method": ["wise_ft"], "alpha": [0.5]}],
            "overrides": {"epochs": 1},
            "evaluate": {"tasks": [name], "include_path": folder, "new_task": name},
        }
        (self.out / "grid.yaml").write_text(yaml.safe_dump(grid), encoding="utf-8")
        self._jobs: list[Any] = []

    def command(self) -> list[str]:
        return [*FINCH, "sweep", str(self.out / "grid.yaml")]

    def is_half_done(self) -> bool:
        return any(self.job.glob("wise_ft*/alpha_*"))

    def wrong(self, said: Sequence[str]) -> str | None:
        from finch.study.commands.sweep import compose
        from finch.study.sweep.job import missing_results

        if not self._jobs:
            grid = read_grid(str(self.out / "grid.yaml"), [], None)
            self._jobs = compose(grid, cells_of(grid))
        for job in self._jobs:
            folder = job.cell.folder
            if (folder / run_files.CELL).exists():
                read_cell(folder)
            is_trained, model = job.is_trained(), run_files.chosen_model(folder)
            if is_trained and (model is None or not is_whole(model)):
                return f"{job.cell.name} counts as trained, and its model is not whole"
            assert job.grid.evaluation is not None
            is_evaluated = is_trained and not missing_results(folder, job.grid.evaluation)
            if is_evaluated:
                read_results(folder / run_files.EVALUATION)
            if folder.name in said and not is_evaluated:
                return f"{job.cell.name} was said to be evaluated, and would be evaluated again"
        return None


CASES: tuple[type[Case], ...] = (Run, TwoRanks, Average, Evaluation, Sweep)
