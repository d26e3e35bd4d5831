"""Configs of a small model, and runs of the recipes on them: in this process, on forked ranks, or by the real `tune run`.

What the tests do inside of a run (stop it, spoil a loss) is done here and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from benchmarks.tiny_job import ROOT as ROOT
from benchmarks.tiny_job import environment as environment
from benchmarks.tiny_job import llama_args as llama_args
from benchmarks.tiny_job import make_config as make_config
from benchmarks.tiny_text import make_rows
from finch.cli import main as cli
from helpers.ranks import rank_server

FULL, LORA = "finch_full_finetune", "finch_lora_finetune"
COSINE = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 3}


@dataclass
class Run:
    """What a finished `tune run` left behind."""

    returncode: int
    output: str
    folder: Path

    def metrics(self, validation: bool = False) -> list[dict]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if ("validation_loss" in line) == validation]

    def column(self, name: str) -> list[float]:
        return [line[name] for line in self.metrics()]

    def error(self) -> str:
        """The one line that reports a user's mistake."""
        lines = [line for line in self.output.splitlines() if line.startswith("finch: error: ")]
        assert len(lines) == 1, self.output[-3000:]
        return lines[0]


def write_rows(file: Path, number: int, seed: int = 0) -> None:
    make_rows(file, number, random.Random(seed))


def write_config(folder: Path, config: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


def tune_run(
    folder: Path,
    config: dict,
    *overrides: str,
    ranks: int | None = None,
    recipe: str = FULL,
    timeout: int = 600,
    before: Sequence[str] = (),
) -> Run:
    """Starts the real `tune run` in ``folder``, which takes seconds; with ``ranks`` through torchrun. ``before``: a command that starts it."""
    launcher = [] if ranks is None else ["--nproc_per_node", str(ranks)]
    command = [*before, sys.executable, "-m", "torchtune._cli.tune", "run", *launcher, recipe]
    command += ["--config", write_config(folder, config), *overrides]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False, env=environment()
    )
    return Run(done.returncode, done.stdout + done.stderr, Path(config["output_dir"]))


def run_ranks(ranks: int, folder: Path, config: dict, *overrides: str, recipe: str = FULL, timeout: float = 600) -> Run:
    """Runs a recipe on forked ranks in ``folder``, as torchrun would: quicker than `tune run`. ``recipe`` may also be a file."""
    argv = [recipe, "--config", write_config(folder, config), *overrides]
    codes, output = rank_server().run(ranks, argv, folder, timeout)
    return Run(int(any(codes)), output, Path(config["output_dir"]))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a small Hugging Face folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def relative_l2(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two models over the norm of the second."""
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return (difference / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


def run_here(folder: Path, config: dict, *overrides: str, recipe: str = FULL) -> Run:
    """Runs the recipe in this process, as `python -m finch_full_finetune` would: quicker than a separate process."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    logging.getLogger("finch").addHandler(handler)
    code = 0
    arguments = [recipe, "--config", write_config(folder, config), *overrides]
    with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stderr(output):
        try:
            importlib.import_module(recipe).recipe_main()
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            logging.getLogger("finch").removeHandler(handler)
    return Run(code, output.getvalue(), Path(config["output_dir"]))


MINIMAL = {
    "model": {"_component_": "torchtune.models.llama2.llama2_7b"},
    "tokenizer": {"_component_": "torchtune.models.llama2.llama2_tokenizer", "path": "x"},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "x"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
    "output_dir": "out",
}


class Broken(BaseException):
    """In place of a kill: nothing that a run does at a signal or an error is reached."""


def before_steps(monkeypatch: pytest.MonkeyPatch, action: Callable[[Any], None]) -> None:
    """Calls ``action(recipe)`` before each training step; ``recipe.state.step`` steps are done by then."""
    import finch_full_finetune

    train_step = finch_full_finetune.FinchFullFinetune.train_step

    def acted_on(recipe, batches):
        action(recipe)
        return train_step(recipe, batches)

    monkeypatch.setattr(finch_full_finetune.FinchFullFinetune, "train_step", acted_on)


def spoil(monkeypatch: pytest.MonkeyPatch, *, losses: Sequence[int] = (), gradients: Sequence[int] = ()) -> None:
    """Makes the losses of some steps NaN, and a gradient of others infinite, which leaves the loss finite. Steps count from 1."""
    from finch.training.optimizer import Update
    from finch.training.step_loss import StepLoss

    steps = [0]
    before_steps(monkeypatch, lambda recipe: steps.append(recipe.state.step + 1))
    losses_of, clip = StepLoss.__call__, Update.clip

    def spoiled_losses(*args):
        found = losses_of(*args)
        return [each * math.nan for each in found] if steps[-1] in losses else found

    def spoiled_gradients(update):
        if steps[-1] in gradients:
            next(update._model.parameters()).grad[0] = math.inf
        return clip(update)

    monkeypatch.setattr(StepLoss, "__call__", spoiled_losses)
    monkeypatch.setattr(Update, "clip", spoiled_gradients)


def fail_while_loading(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Raises where a run reads the pretrained weights, after all of its checks."""

    def fail(_):
        raise error

    monkeypatch.setattr("finch_full_finetune.FinchFullFinetune.load_base", fail)


def weights_now(recipe: Any) -> dict[str, torch.Tensor]:
    """A copy of a run's weights, for what ``before_steps`` calls."""
    return {name: weight.detach().clone() for name, weight in recipe.model.named_parameters()}


def run_broken(folder, config, monkeypatch, step, *overrides, recipe=FULL):
    """A run that ends before the step after ``step``, or with "export" after the next export; what it has saved by then is on the disk."""
    from finch_full_finetune import FinchFullFinetune

    def end(recipe):
        if recipe.state.step == step:
            recipe.checkpointer.writer.finish()
            raise Broken

    def export_and_end(recipe, name):
        export(recipe, name)
        raise Broken

    with monkeypatch.context() as patch:
        before_steps(patch, end)
        if step == "export":
            export = FinchFullFinetune.export
            patch.setattr(FinchFullFinetune, "export", export_and_end)
        with pytest.raises(Broken):
            run_here(folder, config, *overrides, recipe=recipe)


def assert_same_run(resumed, straight):
    assert resumed.returncode == 0, resumed.output[-3000:]
    for name in ("step", "loss", "ema_loss", "lr", "grad_norm", "num_target_tokens"):
        assert resumed.column(name) == straight.column(name), name
    assert resumed.metrics(validation=True) == straight.metrics(validation=True)
    folders = sorted(path.name for path in straight.folder.glob("epoch_*"))
    assert sorted(path.name for path in resumed.folder.glob("epoch_*")) == folders
    for name in folders:
        if (straight.folder / name / "model.safetensors").exists():
            one, other = weights(resumed.folder / name), weights(straight.folder / name)
            assert all(torch.equal(one[key], other[key]) for key in other), name


def assert_close_runs(run, expected, tolerance, columns=("loss", "ema_loss", "lr", "grad_norm", "num_target_tokens")):
    """Columns of the metrics, and the weights of the last epoch in relative L2."""
    assert run.returncode == 0, run.output[-3000:]
    for column in columns:
        assert run.column(column) == pytest.approx(expected.column(column), rel=tolerance, abs=1e-15), column
    last = sorted(path.name for path in expected.folder.glob("epoch_*[0-9]"))[-1]
    assert relative_l2(weights(run.folder / last), weights(expected.folder / last)) < tolerance


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def finch(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    code = 0
    try:
        cli.main(list(arguments))
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err
