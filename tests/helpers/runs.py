"""Configs of a small model, and runs of the recipes on them: in this process, on forked ranks, or by the real `tune run`.

What the tests do inside of a run (stop it, spoil a loss) is done here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import math
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from helpers.evaluation import read_lines
from helpers.ranks import rank_server
from helpers.rows import write_lines

FULL, LORA = "finch_full_finetune", "finch_lora_finetune"
LORA_MODEL = {"_component_": "torchtune.models.llama2.lora_llama2", **llama_args(), "lora_rank": 4, "lora_alpha": 8}
LORA_MODEL |= {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}
COSINE = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 3}


@dataclass
class Run:
    """What a finished `tune run` left behind."""

    returncode: int
    output: str
    folder: Path

    def lines(self) -> list[dict]:
        return read_lines(self.folder / "metrics.jsonl")

    def metrics(self, validation: bool = False) -> list[dict]:
        return [line for line in self.lines() if ("validation_loss" in line) == validation]

    def column(self, name: str) -> list[float]:
        """A value of each step."""
        return [line[name] for line in self.lines() if "loss" in line]

    def columns(self, *names: str) -> dict[str, list[float]]:
        return {name: self.column(name) for name in names}

    def error(self) -> str:
        """The one line that reports a user's mistake."""
        lines = [line for line in self.output.splitlines() if line.startswith("finch: error: ")]
        assert len(lines) == 1, self.output[-3000:]
        return lines[0]


def write_rows(file: Path, number: int, seed: int = 0, without_targets: Sequence[int] = ()) -> None:
    """Question-answer rows; the questions of some are longer than ``max_seq_len``, which leaves no target token."""
    make_rows(file, number, random.Random(seed))
    rows = read_lines(file)
    for index in without_targets:
        rows[index]["question"] = "the old red fox sings near a stone " * 12
    write_lines(file, *rows)


def validated(config: dict) -> dict:
    """With 7 of its rows for validation."""
    return {**config, "dataset_validation": {**config["dataset"], "split": "train[:7]"}}


def mixed(config: dict, folder: Path, share: float = 0.2) -> dict:
    """With 17 general rows beside its own, which have a share of the samples."""
    write_rows(folder / "general.jsonl", 17)
    parts = {config["dataset"]["data_files"]: 1 - share, str(folder / "general.jsonl"): share}
    entries = [{**config["dataset"], "data_files": file, "weight": weight} for file, weight in parts.items()]
    return {**config, "dataset": entries}


def disk_logger(folder: Path, **arguments: str) -> dict[str, str]:
    component = "torchtune.training.metric_logging.DiskLogger"
    return {"_component_": component, "log_dir": str(folder), **arguments}


def write_config(folder: Path, config: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


def tune_run(folder: Path, config: dict, *overrides: str, ranks: int | None = None, before: Sequence[str] = ()) -> Run:
    """Starts the real `tune run` in ``folder``, which takes seconds; with ``ranks`` through torchrun. ``before``: a command that starts it."""
    launcher = [] if ranks is None else ["--nproc_per_node", str(ranks)]
    command = [*before, sys.executable, "-m", "torchtune._cli.tune", "run", *launcher, FULL]
    command += ["--config", write_config(folder, config), *overrides]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, check=False, env=environment(ROOT / "tests")
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
    """Runs the recipe in this process, as `python -m finch_full_finetune` would: quicker than a separate process. Draws no loss.png."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    logging.getLogger("finch").addHandler(handler)
    code = 0
    arguments = [recipe, "--config", write_config(folder, config), *overrides]
    patches = mock.patch.object(sys, "argv", arguments), mock.patch("finch.training.summary.update_loss_figure")
    with patches[0], patches[1], contextlib.redirect_stderr(output):
        try:
            importlib.import_module(recipe).recipe_main()
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            logging.getLogger("finch").removeHandler(handler)
    return Run(code, output.getvalue(), Path(config["output_dir"]))


def finished(folder: Path, config: dict, *overrides: str, recipe: str = FULL, ranks: int | None = None) -> Run:
    """A run in ``folder / "run"`` that succeeds: in this process, or on forked ranks."""
    config = {**config, "output_dir": str(folder / "run")}
    start = run_here if ranks is None else functools.partial(run_ranks, ranks)
    run = start(folder, config, *overrides, recipe=recipe)
    assert run.returncode == 0, run.output[-3000:]
    return run


def stock_recipes() -> Path:
    """The folder of torchtune's."""
    import torchtune

    return Path(torchtune.__file__).parent.parent / "recipes"


def logged(file: Path, column: str) -> list[float]:
    """A column of torchtune's DiskLogger, which writes every digit."""
    lines = [line for line in file.read_text().splitlines() if " loss:" in line]
    return [float(line.split(f" {column}:")[1].split()[0]) for line in lines]


def stock_losses(folder: Path, config: dict, *overrides: str) -> list[float]:
    """The losses of torchtune's own recipe."""
    config = {**config, "output_dir": str(folder / "stock"), "metric_logger": disk_logger(folder, filename="stock.txt")}
    recipe = str(stock_recipes() / "full_finetune_single_device.py")
    done = run_ranks(1, folder / "torchtune", config, *overrides, recipe=recipe)
    assert done.returncode == 0, done.output[-3000:]
    return logged(folder / "stock.txt", "loss")


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


def script_validation(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Makes the validation losses those of a script, by step, in runs of this process. The pretrained model's is 9."""
    from finch.training.hooks import Validation

    steps, measure = [0], Validation._measure

    def measured(hook, state):
        steps.append(state.step)
        return measure(hook, state)

    monkeypatch.setattr(Validation, "_measure", measured)
    monkeypatch.setattr("finch.training.hooks.dataset_loss", lambda *_: {0: 9.0, **losses}[steps[-1]])


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


def assert_same_weights(one: Path, other: Path) -> None:
    """Two Hugging Face folders, bit for bit."""
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_same_run(resumed, straight):
    assert resumed.returncode == 0, resumed.output[-3000:]
    names = ("step", "loss", "ema_loss", "lr", "grad_norm", "num_target_tokens", "eta_sqrt_loss_sum")
    assert resumed.columns(*names) == straight.columns(*names)
    assert resumed.metrics(validation=True) == straight.metrics(validation=True)
    folders = sorted(path.name for path in straight.folder.glob("epoch_*"))
    assert sorted(path.name for path in resumed.folder.glob("epoch_*")) == folders
    for name in folders:
        if (straight.folder / name / "model.safetensors").exists():
            assert_same_weights(resumed.folder / name, straight.folder / name)


def assert_close_runs(run, expected, tolerance, columns=("loss", "ema_loss", "lr", "grad_norm", "num_target_tokens")):
    """Columns of the metrics, and the weights of the last epoch in relative L2."""
    assert run.returncode == 0, run.output[-3000:]
    for column in columns:
        assert run.column(column) == pytest.approx(expected.column(column), rel=tolerance, abs=1e-15), column
    last = sorted(path.name for path in expected.folder.glob("epoch_*[0-9]"))[-1]
    assert relative_l2(weights(run.folder / last), weights(expected.folder / last)) < tolerance


def wait_until(condition: Callable[[], Any], describe: Callable[[], Any] = str, pause: float = 0.05) -> None:
    """Asks again and again, and fails after 10 minutes."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, describe()
        time.sleep(pause)


@contextlib.contextmanager
def disk_of_files_below(num_bytes: int) -> Iterator[None]:
    """A limit on the size of this process's files in place of a full disk: the first write beyond it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def finch(capsys, *arguments, main=cli.main):
    """(exit code, stdout, stderr) of a command, or of another program's ``main``."""
    code = 0
    try:
        main(list(arguments))
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err
