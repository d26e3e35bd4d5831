"""Runs of TorchTitan on a CPU that several tests read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from helpers.runs import Run, run_here
from helpers.titan_runs import TitanRun, finished, job, rows_environment, run_jobs
from omegaconf import OmegaConf


@pytest.fixture(scope="session")
def titan_configs(shared_data: Path) -> ModuleType:
    """TorchTitan on the CPU in this process, and the config functions of ``helpers.titan_configs``."""
    from helpers import titan_cpu

    titan_cpu.install()
    os.environ.update(rows_environment(shared_data))
    from helpers import titan_configs

    return titan_configs


@pytest.fixture(scope="session")
def one_rank(once, shared_data: Path) -> dict[str, TitanRun]:
    """Runs on one process."""
    dataset, short = ("--lr_scheduler.init", "dataset"), ("--training.steps", "6")
    saved = ("--checkpoint.async_mode", "async", "--checkpoint.interval", "9")
    twice = ("--training.local_batch_size", "4", "--training.global_batch_size", "8")
    rare = ("--metrics.log_freq", "4", "--checkpoint.last_save_model_only")
    changed, four = ("--dataloader.split", "train[:32]"), ("--checkpoint.interval", "4")
    jobs = [
        job("straight", *dataset),
        job("accumulated", *twice, *dataset),
        job("resumed_first", *dataset, *saved, "--training.steps", "10", folder="resumed"),
        job("resumed", *dataset, *saved, "--checkpoint.load_step", "9"),
        job("other_first", "--training.steps", "2", config="plain", folder="other"),
        job("other", "--checkpoint.exclude_from_loading", "lr_scheduler", *short),
        job("skipped", "--lr_scheduler.on_nonfinite", "skip", *short, nonfinite={3: "loss", 5: "gradient"}),
        job("raised", *short, nonfinite={3: "gradient"}),
        job("raised_late", *short, *rare, nonfinite={5: "loss"}),
        *(job(name, *dataset, "--training.steps", "4", config=name) for name in ("dft", "eaft", "talr")),
        job("validated", "--training.steps", "4", config="validated"),
        job("preserving", *twice, "--training.steps", "8", config="preserving"),
        job("preserved_first", *twice, *four, "--training.steps", "5", config="preserving", folder="preserved"),
        job("preserved", *twice, *four, "--training.steps", "8", "--checkpoint.load_step", "4", config="preserving"),
        job("stopping", config="stopping"),
        job("cached_first", *dataset, "--training.steps", "1", folder="cached"),
        job("cached", *dataset, "--training.steps", "1", "--checkpoint.folder", "second", folder="cached"),
        job("changed", *dataset, *changed, "--training.steps", "1", "--checkpoint.folder", "third", folder="cached"),
    ]
    return finished(jobs, once("titan_1", lambda folder: run_jobs(1, jobs, folder, shared_data)))


@pytest.fixture(scope="session")
def two_ranks(once, shared_data: Path, one_rank: dict[str, TitanRun]) -> dict[str, TitanRun]:
    """Runs on two processes, one of which continues one of ``one_rank``."""
    dataset, half = ("--lr_scheduler.init", "dataset"), ("--training.local_batch_size", "4")
    replicate = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
    saved = ("--checkpoint.async_mode", "async", "--checkpoint.interval", "9")
    skip = ("--lr_scheduler.on_nonfinite", "skip", "--training.steps", "4")
    jobs = [
        job("fsdp", *dataset, *half),
        job("hsdp", *dataset, *half, *replicate),
        job("tensor", *dataset, "--parallelism.tensor_parallel_degree", "2"),
        job("resumed_first", *dataset, *half, *saved, "--training.steps", "10", folder="resumed"),
        job("resumed", *dataset, *half, *saved, "--checkpoint.load_step", "9"),
        job("resharded", *dataset, *half, "--checkpoint.load_step", "9"),
        job("skipped", *half, *skip, nonfinite={3: "gradient"}),
        job("validated", *half, "--training.steps", "2", config="validated"),
        job("preserving", *half, "--training.steps", "8", config="preserving"),
        job(
            "tensor_preserving",
            "--parallelism.tensor_parallel_degree",
            "2",
            "--training.steps",
            "8",
            config="preserving",
        ),
        job("tensor_skipped", "--parallelism.tensor_parallel_degree", "2", *skip, nonfinite={3: "gradient"}),
    ]

    def run(folder: Path) -> None:
        shutil.copytree(one_rank["resumed"].folder, folder / "resharded")
        shutil.rmtree(folder / "resharded/checkpoint/step-12")
        run_jobs(2, jobs, folder, shared_data)

    return finished(jobs, once("titan_2", run))


@pytest.fixture(scope="session")
def recipe_runs(tmp_path_factory, one_rank: dict[str, TitanRun]) -> dict[str, Run]:
    """finch's torchtune recipe on the configs that TorchTitan's runs have left, with cross-entropy and each objective that TorchTitan's loss can be."""
    folder, runs = tmp_path_factory.mktemp("recipe"), {}
    for name in ("straight", "dft", "eaft", "talr", "preserving"):
        config = OmegaConf.to_container(OmegaConf.load(one_rank[name].folder / "config.yaml"))
        assert config["dataset"]["packed"] is False
        runs[name] = run_here(folder / name, {**config, "output_dir": str(folder / name)})
        assert runs[name].returncode == 0, runs[name].output[-3000:]
    return runs
