"""The time of passes without a gradient, divided by that of a training epoch over the same rows:

python -m benchmarks.initial_pass smollm2/135M_finch model_dir=DIR dataset.split=train[:64] ...
torchrun --nproc_per_node 2 -m benchmarks.initial_pass stories260k/tofu_finch data_root=DATA batch_size=8

Epoch and passes alternate in one process. The initial pass is that of ``init: dataset``. Every pass runs over all training rows.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable

from finch_full_finetune import FinchFullFinetune

from benchmarks.processes import alternate, machine, print_times
from finch.base.errors import exit_without_teardown, report_user_errors
from finch.cli.early_checks import read_job
from finch.distributed.parallel import launched_rank
from finch.probes.evaluation import EvalSettings, evaluate
from finch.probes.kinds import ProbeRows
from finch.training.reference import compute_reference_losses, dataset_loss


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_intermixed_args()
    output = f"output_dir={tempfile.gettempdir()}/finch_initial_pass"
    fixed = ["lr_scheduler=null", "dataset_validation=null", "log_every_n_steps=1000", output, "overwrite=True"]
    _, cfg = read_job(args.config, [*fixed, *args.overrides], is_here=False)
    recipe = FinchFullFinetune(cfg)
    recipe.setup(cfg)
    recipe.begin()
    timed = _passes(recipe)
    for run in timed.values():
        run()  # the first pass has paid for allocations and kernels
    times = alternate(timed, args.rounds)
    if launched_rank() == 0:
        data = recipe.data
        lengths = [len(data.samples[index]["labels"]) for index in data.samples.rows]
        print(
            f"{args.config} {' '.join(args.overrides)}: {len(lengths)} rows, {sum(lengths):,} tokens, {data.order.global_batch} rows "
            f"per step; {args.rounds} rounds; {machine()}"
        )
        print_times(times)
    recipe.close()


def _passes(recipe: FinchFullFinetune) -> dict[str, Callable[[], object]]:
    """What is timed, by its name."""
    data, model, parallel = recipe.data, recipe.model, recipe.parallel
    collate = data.collator(data.samples)
    settings = EvalSettings(parallel, lambda _: collate, recipe.cfg.batch_size)
    samples = [data.samples[index] for index in data.samples.rows]
    probe = ProbeRows("question_answer", [{key: list(row[key]) for key in ("tokens", "labels")} for row in samples])

    def epoch() -> None:
        batches, consumed = data.batches(0, 0), 0
        while consumed < data.order.num_samples:
            recipe.train_step(list(itertools.islice(batches, data.order.micro_batches_in_step(consumed))))
            consumed += data.order.global_batch

    return {
        "training epoch": epoch,
        "initial pass": lambda: compute_reference_losses(model, data.eval_loader(data.samples, "")),
        "validation": lambda: dataset_loss(model, data.eval_loader(data.samples, "")),
        "probe": lambda: evaluate(model, "rows", probe, settings),
    }


if __name__ == "__main__":
    main()
    exit_without_teardown()
