"""Trains two steps and compares the second one's memory with the estimate, on one process or several:

python -m benchmarks.estimate smollm2/135M_finch model_dir=DIR ...
torchrun --nproc_per_node 2 -m benchmarks.estimate stories260k/tofu_finch data_root=DATA
"""

from __future__ import annotations

import importlib
import sys
import tempfile

from benchmarks.estimate.measure import measured_step
from finch.cli.early_checks import read_job
from finch.distributed.parallel import launched_rank, launched_ranks
from finch.errors import report_user_errors
from finch.estimate.fake_step import LORA_RECIPE, estimate_step
from finch.training.run import run_recipe


@report_user_errors
def main() -> None:
    config, *overrides = sys.argv[1:]
    ranks, rank = launched_ranks(), launched_rank()
    steps = [
        "max_steps_per_epoch=2",
        "epochs=1",
        "lr_scheduler=null",
        f"output_dir={tempfile.gettempdir()}/finch_estimate",
    ]
    recipe, cfg = read_job(config, [*steps, "overwrite=True", *overrides])
    name = "FinchLoRAFinetune" if recipe == LORA_RECIPE else "FinchFullFinetune"
    with measured_step() as measured:
        run_recipe(getattr(importlib.import_module(recipe), name), cfg)
    if rank:
        return
    (real,) = measured
    step = estimate_step(recipe, cfg, ranks=ranks, rows=real.rows)
    before = sum(step.between_steps.values())
    print(f"{config} {' '.join(overrides)}, {ranks} rank(s), {real.rows}")
    for title, estimated, value in (("before the step", before, real.before), ("peak", step.peak, real.peak)):
        print(
            f"{title:<16} measured {value / 1e6:10.2f} MB   estimated {estimated / 1e6:10.2f} MB   ratio {estimated / value:.4f}"
        )


if __name__ == "__main__":
    main()
