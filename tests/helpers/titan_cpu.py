"""Runs TorchTitan 0.3 on a CPU: what it asks of a GPU is replaced here, only for tests.

python -m helpers.titan_cpu ARGUMENTS of torchtitan.train
python -m helpers.titan_cpu FOLDER 1 2   # the runs of FOLDER/1/jobs.json, one after the other on a rank that is forked here, then those of two ranks
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import traceback
import types
from pathlib import Path

import torch

from helpers.evaluation import read_lines
from helpers.rows import write_lines


def install() -> None:
    """Makes TorchTitan's modules work on a CPU; call it before the first of them is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    # torchtitan does without it, and its kernels for GPUs are refused by some versions of triton.
    sys.modules["torchao.prototype.moe_training"] = None
    import torchtitan.trainer
    from torchtitan.components import metrics
    from torchtitan.distributed import utils
    from torchtitan.models.llama3 import parallelize

    stats = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    no_memory = {"get_peak_stats": lambda: stats, "reset_peak_stats": lambda: None}
    metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(device_name="cpu", **no_memory)
    utils.set_pg_timeouts = lambda *_, **__: None
    clock = torchtitan.trainer.time
    torchtitan.trainer.time = types.SimpleNamespace(perf_counter=clock.perf_counter, sleep=lambda _: None)
    apply_fsdp = parallelize.apply_fsdp_to_decoder

    def apply_fsdp_with_gloo(model, *args, **kwargs):
        apply_fsdp(model, *args, **kwargs)
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)

    parallelize.apply_fsdp_to_decoder = apply_fsdp_with_gloo


def fork_ranks(jobs: Path, ranks: int) -> int:
    """Runs jobs on ranks that have imported everything, which takes longer than most runs; returns the exit code."""
    from helpers import rank_server

    for module in ("helpers.titan_configs", "finch.integrations.titan", "torchtitan.train"):
        importlib.import_module(module)
    job = {"ranks": ranks, "argv": ["helpers.titan_cpu", str(jobs)], "folder": str(jobs.parent), "timeout": 600}
    done = rank_server.run({**job, "output": str(jobs.parent / "output.txt"), "environment": dict(os.environ)})
    return int(any(done["codes"]))


def recipe_main() -> None:
    """What ``helpers.rank_server`` calls on each rank."""
    jobs = Path(sys.argv[1])
    for job in json.loads(jobs.read_text()):
        run_job(job, jobs.parent)


def copy_of_run(source: Path, folder: Path) -> None:
    """A run's folder as a kill leaves it a step after its last checkpoint but one. A collective."""
    if os.environ["RANK"] == "0":
        shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns("result.json", "weights.pt"))
        saved = {int(path.name.rpartition("-")[2]): path for path in (folder / "checkpoint").glob("step-*")}
        *_, kept, last = sorted(saved)
        shutil.rmtree(saved[last])
        metrics = folder / "metrics.jsonl"
        write_lines(metrics, *(line for line in read_lines(metrics) if line["step"] <= kept + 1))
    torch.distributed.barrier()


def run_job(job: dict, folder: Path) -> None:
    """Trains as a job says, and writes what rank 0 saw: losses that TorchTitan logged, learning rates that the optimizers used, weights.

    Args:
        job: ``name``, ``arguments`` of torchtitan.train, ``continues``: an earlier job's folder, of which it gets a copy, and
            ``nonfinite``: from a step to "loss" or "gradient", which is made NaN there.
    """
    from torchtitan.config import ConfigManager

    dump = folder / job.get("folder", job["name"])
    if "continues" in job:
        copy_of_run(folder / job["continues"], dump)
    config = ConfigManager().parse_args([*job["arguments"], "--dump_folder", str(dump)])
    trainer = config.build()
    logged, rates = [], []
    log = trainer.metrics_processor.log

    def recording_log(step, loss, *args, **kwargs):
        logged.append([step, loss])
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = recording_log
    for optimizer in trainer.optimizers:
        optimizer.register_step_post_hook(lambda used, *_: rates.append(float(used.param_groups[0]["lr"])))
    spoil(trainer, {int(step): what for step, what in job.get("nonfinite", {}).items()})
    error = None
    try:
        trainer.train()
    except FloatingPointError as raised:
        error = str(raised)
        traceback.print_exc()
    trainer.close()
    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in trainer.model_parts[0].state_dict().items()
    }
    if torch.distributed.get_rank() == 0:
        dump.mkdir(parents=True, exist_ok=True)
        rates = [rate for rate in rates if rate > 0]  # TorchTitan makes an optimizer's state by a step with rate 0
        (dump / "result.json").write_text(json.dumps({"logged": logged, "rates": rates, "error": error}))
        torch.save(weights, dump / "weights.pt")


def spoil(trainer, nonfinite: dict[int, str]) -> None:
    """Makes the loss, or one rank's gradient of one parameter, NaN at some steps."""
    step, loss_fn = trainer.forward_backward_step, trainer.loss_fn

    def loss(*args, **kwargs):
        value, metrics = loss_fn(*args, **kwargs)
        return value * float("nan") if nonfinite.get(trainer.step) == "loss" else value, metrics

    def forward_backward_step(**kwargs):
        value = step(**kwargs)
        if nonfinite.get(trainer.step) == "gradient" and torch.distributed.get_rank() == 0:
            gradient = next(trainer.model_parts[0].parameters()).grad
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = float("inf")
        return value

    if nonfinite:
        trainer.loss_fn, trainer.forward_backward_step = loss, forward_backward_step


if __name__ == "__main__":
    install()
    if Path(sys.argv[1]).is_dir():
        sys.exit(int(any(fork_ranks(Path(sys.argv[1], ranks, "jobs.json"), int(ranks)) for ranks in sys.argv[2:])))
    else:
        from torchtitan.train import main

        main()
