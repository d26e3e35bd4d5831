"""Builds the base model, teaches it the new world with SFT and with FINCH, and shows what was learned and what was forgotten.

python -m finch.quickstart [--out out/quickstart]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from pathlib import Path

from finch.errors import UserError, report_user_errors

RUNS = {"SFT": "quickstart/sft", "FINCH": "quickstart/finch"}


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m finch.quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/quickstart"), help="where everything is written")
    out = parser.parse_args().out.resolve()
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the figure needs matplotlib, which is not installed: pip install 'finch-finetune[report]'")

    from finch.quickstart.base import prepare
    from finch.quickstart.evaluate import knowledge, tokenized
    from finch.quickstart.figure import Curves, draw
    from finch.quickstart.launch import tune_run
    from finch.quickstart.world import new_world, old_world

    began = time.perf_counter()
    base = prepare(out)
    batches = {"old": tokenized(old_world(), base), "new": tokenized(new_world(), base)}
    before = knowledge(base, batches)
    runs, rates = {}, {}
    for name, config in RUNS.items():
        print(f"{name}: 200 facts of the new world", flush=True)
        run = out / name.lower()
        tune_run(config, run, f"base={base}", f"rows={out / 'data' / 'new.jsonl'}")
        steps, rates[name] = _metrics(run)
        known = {0: before}
        for epoch, last_step in _ends(run):
            known[last_step] = knowledge(run / f"epoch_{epoch}", batches)
        runs[name] = Curves(steps, known)
    draw(runs, out / "figure.png")
    _print_table(before, runs, rates)
    print(f"\nfigure: {out / 'figure.png'}\nruns:   {', '.join(str(out / name.lower()) for name in RUNS)}")
    print(f"{time.perf_counter() - began:.0f} s in all")


def _metrics(run: Path) -> tuple[list[float], float]:
    """The learning rate of each step, and the median of target tokens a second."""
    from finch.run_files import METRICS, read_metrics

    lines = [line for line in read_metrics(run / METRICS) if "loss" in line]
    return [line["lr"] for line in lines], statistics.median(line["tokens_per_second_per_gpu"] for line in lines)


def _ends(run: Path) -> list[tuple[int, int]]:
    """(epoch, its last step) of each epoch."""
    from finch.run_files import METRICS, read_metrics

    last = {line["epoch"]: line["step"] for line in read_metrics(run / METRICS)}
    return sorted(last.items())


def _print_table(before: dict, runs: dict, rates: dict[str, float]) -> None:
    print(f"\n{'':12}{'new accuracy':>14}{'old accuracy':>14}{'old loss':>10}{'tokens/s':>10}")
    print(f"{'base model':12}{before['new'].accuracy:>14.1%}{before['old'].accuracy:>14.1%}{before['old'].loss:>10.3f}")
    for name, run in runs.items():
        after = run.known[max(run.known)]
        line = f"{name:12}{after['new'].accuracy:>14.1%}{after['old'].accuracy:>14.1%}{after['old'].loss:>10.3f}"
        print(f"{line}{rates[name]:>10,.0f}")


if __name__ == "__main__":
    main()
