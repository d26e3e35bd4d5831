"""Runs of TorchTitan on a CPU that several tests read."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest
from helpers.runs import Run, run_here
from helpers.titan_runs import TitanRun, finished, job, rows_environment, run_jobs
from omegaconf import OmegaConf

VALIDATED = job("validated", "--training.steps", "4", config="validated")


@pytest.fixture(scope="session")
def titan_configs(shared_data: Path) -> ModuleType:
    """TorchTitan on the CPU in this process, and the config functions of ``helpers.titan_configs``."""
    from helpers import titan_cpu

    titan_cpu.install()
    os.environ.update(rows_environment(shared_data))
    from helpers import titan_configs

    return titan_configs


def jobs_of_one_rank() -> list[dict]:
    dataset, short = ("--lr_scheduler.init", "dataset"), ("--training.steps", "6")
    saved = ("--checkpoint.async_mode", "async", "--checkpoint.interval", "9")
    twice = ("--training.local_batch_size", "2", "--training.global_batch_size", "4")
    rare = ("--metrics.log_freq", "4", "--checkpoint.last_save_model_only")
    changed, replayed = ("--dataloader.split", "train[:16]"), (*twice, "--checkpoint.interval", "4")
    second, third = (("--training.steps", "1", "--checkpoint.folder", name) for name in ("second", "third"))
    return [
        job("straight", *dataset, *saved),
        job("accumulated", *twice, *dataset),
        job("resumed", *dataset, *saved, "--checkpoint.load_step", "9", continues="straight"),
        job("other_first", "--training.steps", "2", config="plain", folder="other"),
        job("other", "--checkpoint.exclude_from_loading", "lr_scheduler", *short),
        job("skipped", "--lr_scheduler.on_nonfinite", "skip", *short, nonfinite={3: "loss", 5: "gradient"}),
        job("raised", *short, nonfinite={3: "gradient"}),
        job("raised_late", *short, *rare, nonfinite={5: "loss"}),
        *(job(name, *dataset, "--training.steps", "4", config=name) for name in ("dft", "eaft", "talr")),
        VALIDATED,
        job("preserving", *replayed, "--training.steps", "8", config="preserving"),
        job(
            "preserved",
            *(*replayed, "--training.steps", "8", "--checkpoint.load_step", "4"),
            config="preserving",
            continues="preserving",
        ),
        job("stopping", config="stopping"),
        job("cached", *dataset, *second, continues="straight"),
        job("changed", *dataset, *changed, *third, folder="cached"),
    ]


def jobs_of_two_ranks(straight: Path) -> list[dict]:
    """One of them continues ``straight``, one rank's."""
    dataset, half = ("--lr_scheduler.init", "dataset"), ("--training.local_batch_size", "2")
    replicate = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
    saved = ("--checkpoint.async_mode", "async", "--checkpoint.interval", "9")
    tensor = ("--parallelism.tensor_parallel_degree", "2")
    skip = ("--lr_scheduler.on_nonfinite", "skip", "--training.steps", "4")
    return [
        job("fsdp", *dataset, *half, *saved),
        job("hsdp", *dataset, *half, *replicate),
        job("tensor", *dataset, *tensor),
        job("resumed", *dataset, *half, *saved, "--checkpoint.load_step", "9", continues="fsdp"),
        job("resharded", *dataset, *half, "--checkpoint.load_step", "9", continues=str(straight)),
        job("skipped", *half, *skip, nonfinite={3: "gradient"}),
        job("validated", *half, "--training.steps", "2", config="validated"),
        job("preserving", *half, "--training.steps", "8", config="preserving"),
        job("tensor_preserving", *tensor, "--training.steps", "8", config="preserving"),
        job("tensor_skipped", *tensor, *skip, nonfinite={3: "gradient"}),
    ]


@pytest.fixture(scope="session")
def titan_runs(once, shared_data: Path) -> dict[int, dict[str, TitanRun]]:
    """The runs of each number of processes."""

    def jobs(folder: Path) -> dict[int, list[dict]]:
        return {1: jobs_of_one_rank(), 2: jobs_of_two_ranks(folder / "1" / "straight")}

    folder = once("titan", lambda folder: run_jobs(jobs(folder), folder, shared_data))
    return {ranks: finished(each, folder / str(ranks)) for ranks, each in jobs(folder).items()}


@pytest.fixture(scope="session")
def one_rank(titan_runs: dict[int, dict[str, TitanRun]]) -> dict[str, TitanRun]:
    return titan_runs[1]


@pytest.fixture(scope="session")
def two_ranks(titan_runs: dict[int, dict[str, TitanRun]]) -> dict[str, TitanRun]:
    return titan_runs[2]


@pytest.fixture
def validated(tmp_path: Path, shared_data: Path) -> TitanRun:
    """One of ``one_rank`` alone, for the slow tests."""
    run_jobs({1: [VALIDATED]}, tmp_path, shared_data)
    return finished([VALIDATED], tmp_path / "1")["validated"]


@pytest.fixture(scope="session")
def recipe_runs(once, one_rank: dict[str, TitanRun]) -> dict[str, Run]:
    """finch's torchtune recipe on the configs that TorchTitan's runs have left, with cross-entropy and each objective that TorchTitan's loss can be."""
    names = ("straight", "dft", "eaft", "talr", "preserving")

    def train(folder: Path) -> None:
        for name in names:
            config = OmegaConf.to_container(OmegaConf.load(one_rank[name].folder / "config.yaml"))
            assert config["dataset"]["packed"] is False
            run = run_here(folder / name, {**config, "output_dir": str(folder / name)})
            assert run.returncode == 0, run.output[-3000:]

    folder = once("titan_recipe", train)
    return {name: Run(0, "", folder / name) for name in names}
