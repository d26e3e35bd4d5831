"""docs/integrate.md: the diffs on the page are applied to copies of torchtune's recipes, and the copies are run."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from helpers.causal_lm import finch_rates
from helpers.models import save
from helpers.runs import LORA_MODEL, ROOT, Run, disk_logger, logged, make_config, run_here, run_ranks, write_rows
from helpers.tokenizers import write_qwen3_tokenizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchtune._cli import tune

from benchmarks.tiny_text import WORDS

PAGE = (ROOT / "docs" / "integrate.md").read_text()
# The page's headings with a diff below them, and the number of ranks to run it on. optimizer_in_bwd is a mode of the last recipe.
RANKS = {"full_finetune_distributed": 2, "lora_finetune_distributed": 2}
RANKS |= {"full_finetune_single_device": 1, "optimizer_in_bwd": 1}
EVERY_DIFF = pytest.mark.parametrize("name", RANKS)
NUM_STEPS = 10  # two epochs of 40 samples, 8 a step

# Not on the page and not counted: the distributed recipes call CUDA in these places, which the tests do not have.
MEMORY_STATS = (
    "            memory_stats = training.get_memory_stats(device=self._device)\n"
    "            training.log_memory_stats(memory_stats)\n",
    "            pass\n",
)
CLEANUP = ("        training.cleanup_before_training()\n", "")
GLOO = ('init_process_group("cuda:nccl,cpu:gloo")', 'init_process_group("gloo")')
FOR_THE_CPU = {
    "full_finetune_distributed": [MEMORY_STATS, CLEANUP],
    "lora_finetune_distributed": [MEMORY_STATS, CLEANUP, GLOO],
}


def section(heading: str) -> str:
    return PAGE.split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]


def block(language: str, heading: str) -> str:
    """The first block of a language under a heading of the page."""
    return section(heading).split(f"```{language}\n", 1)[1].split("```", 1)[0]


def hunks(diff: str) -> list[tuple[int, list[str]]]:
    """A unified diff's hunks: the number of each hunk's first line, from 1, and its lines."""
    parts = re.split(r"^@@ -(\d+),\d+ \+\d+,\d+ @@\n", diff, flags=re.MULTILINE)[1:]
    return [(int(start), lines.splitlines()) for start, lines in zip(parts[::2], parts[1::2], strict=True)]


def apply(diff: str, original: str) -> str:
    """Applies a diff; each hunk must match exactly once, and at its line."""
    text = original
    for start, lines in hunks(diff):
        before = "".join(line[1:] + "\n" for line in lines if line[:1] != "+")
        after = "".join(line[1:] + "\n" for line in lines if line[:1] != "-")
        assert original.count(before) == 1, before
        assert original[: original.index(before)].count("\n") + 1 == start
        text = text.replace(before, after)
    return text


def changed_lines(diff: str) -> int:
    """Lines added or removed; a removed line with an added one in its place counts once."""
    count = 0
    for _, lines in hunks(diff):
        for run in re.findall(r"-+\+*|\++", "".join(line[:1] or " " for line in lines)):
            count += max(run.count("-"), run.count("+"))
    return count


def tune_here(folder: Path, *arguments: str) -> None:
    """The `tune` command in this process, as if typed in ``folder``: quicker than a subprocess."""
    paths = [*sys.path, str(folder)]
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["tune", *arguments]),
        mock.patch.object(sys, "path", paths),
        contextlib.suppress(SystemExit),  # a failing recipe raises another exception
    ):
        tune.main()


def make_copy(name: str, folder: Path) -> None:
    """`tune cp`, the page's diff, and the changes that a CPU needs."""
    tune_here(folder, "cp", "full_finetune_single_device" if name == "optimizer_in_bwd" else name, "my.py")
    text = apply(block("diff", name), (folder / "my.py").read_text())
    for before, after in FOR_THE_CPU.get(name, []):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "my.py").write_text(text)


def run_copy(name: str, folder: Path, config: dict, *changes: str) -> Run:
    """`tune run my.py --config config.yaml`, on several ranks as through torchrun."""
    if RANKS[name] > 1:
        run = run_ranks(RANKS[name], folder, config, *changes, recipe=str(folder / "my.py"))
        assert run.returncode == 0, run.output[-3000:]
        return run
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    tune_here(folder, "run", "my.py", "--config", "config.yaml", *changes)
    return Run(0, "", Path(config["output_dir"]))


@pytest.fixture(scope="module")
def config_of(base_folder: Path, rows_file: Path) -> Callable[[str, Path], dict]:
    """One config for torchtune's recipe and ours: 8 samples a step, two epochs, the page's schedule on a small model's scale."""

    def make(name: str, run: Path) -> dict:
        in_backward = name == "optimizer_in_bwd"  # excludes accumulation and clipping
        schedule = yaml.safe_load(block("yaml", "A copy of a torchtune recipe"))["lr_scheduler"]
        config = make_config(base_folder, rows_file, run) | {
            "lr_scheduler": {**schedule, "eta_max": 5e-3},
            "metric_logger": disk_logger(run, filename="log.txt"),
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "batch_size": 8 if in_backward else 4 // RANKS[name],
            "gradient_accumulation_steps": 1 if in_backward else 2,
            "optimizer_in_bwd": in_backward,
            "clip_grad_norm": None if in_backward else 1.0,
            "epochs": 2,
            "shuffle": True,
            "drop_last": True,  # ours would keep the 41st sample
            **{"max_steps_per_epoch": None, "resume_from_checkpoint": False, "compile": False},
        }
        return config | ({"model": LORA_MODEL} if name == "lora_finetune_distributed" else {})

    return make


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, config_of: Callable[..., dict]) -> Callable[[str], Run]:
    """Runs a copy for two epochs, once for all tests."""

    @functools.cache
    def get(name: str) -> Run:
        folder = tmp_path_factory.mktemp(name)
        make_copy(name, folder)
        return run_copy(name, folder, config_of(name, folder / "run"))

    return get


def test_loop_follows_the_equation():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.full((3,), 2.0))
    losses, rates = [], []

    class Recorded(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    def model(batch: torch.Tensor) -> torch.Tensor:
        loss = ((weight - batch) ** 2).mean()
        losses.append(loss.item())
        return loss

    names = {"model": model, "optimizer": Recorded([weight], lr=2e-5), "loader": torch.rand(6, 3).unbind()}
    exec(block("python", "Any PyTorch loop: three lines"), names)
    assert len(rates) == 6
    assert rates == pytest.approx(finch_rates(losses, 2e-5, 5e-5, init=None), rel=1e-12)


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples find in their working directory: MODEL, a Hugging Face folder, and rows.jsonl."""
    folder = tmp_path_factory.mktemp("examples")
    save("qwen3 tied", folder / "MODEL", vocab_size=320, max_position_embeddings=192)
    write_qwen3_tokenizer(folder / "MODEL", WORDS)
    write_rows(folder / "rows.jsonl", 32)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "number", "num_steps"),
    [
        ("transformers' Trainer", 0, 4),
        ("transformers' Trainer", 1, 12),
        ("TRL's SFTTrainer", 0, 8),
        ("Accelerate, and loops on several ranks", 0, 2),
        ("Lightning", 0, 2),
    ],
)
def test_example_runs_as_it_stands(heading, number, num_steps, example_folder, monkeypatch):
    monkeypatch.chdir(example_folder)
    names: dict[str, Any] = {}
    exec(block("python", "Model and rows of the examples"), names)
    exec(section(heading).split("```python\n")[number + 1].split("```", 1)[0], names)
    schedule = names["schedule"] if "schedule" in names else names["finch"].schedule
    assert schedule.state_dict()["num_steps"] == num_steps
    if hasattr(trainer := names.get("trainer"), "state") and (log := getattr(trainer.state, "log_history", None)):
        lines = [line for line in log if "loss" in line]
        assert lines[-1]["learning_rate"] == pytest.approx(2e-5 / lines[-1]["ema_loss"] ** 0.5, rel=1e-6)


@EVERY_DIFF
def test_diff_changes_at_most_six_lines_as_the_page_says(name):
    count = changed_lines(block("diff", name))
    assert count <= 6
    assert {5: "Five lines", 6: "Six lines"}[count] in section(name)


@pytest.mark.slow
@EVERY_DIFF
def test_copy_follows_the_equation(finished, name):
    run = finished(name)
    losses, rates = (logged(run.folder / "log.txt", column) for column in ("loss", "lr"))
    assert len(rates) == NUM_STEPS
    assert rates == pytest.approx(finch_rates(losses, 2e-3, 5e-3, init=None), rel=1e-6)
    assert max(rates) / min(rates) > 1.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full_finetune_single_device", "optimizer_in_bwd"])
def test_optimizer_steps_with_the_logged_rate(name, config_of, tmp_path):
    step_rates: dict[float, None] = {}
    hook = register_optimizer_step_pre_hook(lambda opt, *_: step_rates.setdefault(opt.param_groups[0]["lr"]))
    try:
        make_copy(name, tmp_path)
        run = run_copy(name, tmp_path, config_of(name, tmp_path / "run"))
    finally:
        hook.remove()
    assert len(step_rates) == NUM_STEPS
    assert list(step_rates) == logged(run.folder / "log.txt", "lr")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full_finetune_distributed", "full_finetune_single_device"])
def test_copy_has_the_rates_of_finch_full_finetune(finished, name, config_of, tmp_path):
    config = config_of(name, tmp_path / "run")
    ours = run_ranks(RANKS[name], tmp_path, config) if RANKS[name] > 1 else run_here(tmp_path, config)
    assert ours.returncode == 0, ours.output[-3000:]
    assert len(ours.column("lr")) == NUM_STEPS
    assert logged(finished(name).folder / "log.txt", "lr") == pytest.approx(ours.column("lr"), rel=1e-6)


@pytest.mark.slow
@EVERY_DIFF
def test_resumed_copy_continues_the_schedule(finished, name, config_of):
    run = finished(name)
    shutil.rmtree(run.folder / "epoch_1")  # as if it had been stopped in its second epoch
    changes = ["resume_from_checkpoint=True", "metric_logger.filename=resumed.txt"]
    if name != "lora_finetune_distributed":  # which starts from the base weights again
        changes.append("checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.safetensors]")
    run_copy(name, run.folder.parent, config_of(name, run.folder), *changes)
    rates = logged(run.folder / "resumed.txt", "lr")
    assert len(rates) == NUM_STEPS // 2
    assert rates == pytest.approx(logged(run.folder / "log.txt", "lr")[NUM_STEPS // 2 :], rel=1e-6)
