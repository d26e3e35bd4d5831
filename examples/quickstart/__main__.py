"""Builds the base model, fine-tunes it on the new world with SFT, FINCH, and FINCH with self_replay and an average, and shows what was learned
and what was forgotten.

python -m examples.quickstart [--out out/quickstart]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

from finch.base.errors import UserError, report_user_errors
from finch.base.extras import require_extras
from finch.base.log import quiet_dependencies
from finch.distributed.processes import limit_spinning

SFT, FINCH, REPLAY, AVERAGE = "SFT", "FINCH", "FINCH + self_replay", "and the average"
FOLDERS = {SFT: "sft", FINCH: "finch", REPLAY: "self_replay"}
MEASURED = "animal", "food"
"""The relations whose facts are old accuracy: self_replay asks for homes, and its probe for work."""


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/quickstart"), help="output folder")
    out = parser.parse_args().out.resolve()
    require_extras("the quickstart", "torchtune", "report")
    quiet_dependencies()
    limit_spinning(os.environ)  # before torch is imported

    from examples.quickstart.base import finch, prepare, run_side_by_side
    from examples.quickstart.evaluate import Scores, evaluate, tokenize
    from examples.quickstart.figure import draw
    from examples.quickstart.world import new_world, old_world
    from finch.base.run_files import AVERAGE as AVERAGE_FOLDER
    from finch.base.run_files import METRICS, read_metrics

    start_time = time.perf_counter()
    base = prepare(out)
    batches = {"old": tokenize(old_world().about(*MEASURED), base), "new": tokenize(new_world(), base)}
    base_scores = evaluate(base, batches)
    runs: dict[str, list[dict[str, Scores]]] = {}  # after each epoch
    speeds: dict[str, float] = {}  # median of target tokens per second
    print(f"{SFT}, {FINCH} and {REPLAY}: 200 facts of the new world", flush=True)
    data = out / "data"
    overrides = [f"base={base}", f"rows={data / 'new.jsonl'}"]
    run_side_by_side(
        ("quickstart/sft", out / FOLDERS[SFT], overrides),
        ("quickstart/finch", out / FOLDERS[FINCH], overrides),
        ("quickstart/self_replay", out / FOLDERS[REPLAY], [*overrides, f"data={data}"]),
    )
    if finch("average", str(out / FOLDERS[REPLAY])) != 0:
        raise UserError("finch average has failed; its last line says why")
    for name, folder in FOLDERS.items():
        run = out / folder
        steps = [line for line in read_metrics(run / METRICS) if "loss" in line]
        speeds[name] = statistics.median(line["tokens_per_second_per_gpu"] for line in steps)
        epochs = sorted({line["epoch"] for line in steps})
        runs[name] = [base_scores, *(evaluate(run / f"epoch_{epoch}", batches) for epoch in epochs)]
    averaged = evaluate(out / FOLDERS[REPLAY] / AVERAGE_FOLDER / "model", batches)
    num_facts = {world: len(batch["tokens"]) for world, batch in batches.items()}
    draw({name.lower().replace(" ", ""): run for name, run in runs.items()}, averaged, num_facts, out / "figure.png")

    print(f"\n{'':20}{'new accuracy':>14}{'old accuracy':>14}{'old loss':>10}{'tokens/s':>10}")
    last_scores = {name: run[-1] for name, run in runs.items()}
    for name, after in {"base model": base_scores, **last_scores, AVERAGE: averaged}.items():
        speed = f"{speeds[name]:>10,.0f}" if name in speeds else ""
        print(f"{name:20}{after['new'].accuracy:>14.1%}{after['old'].accuracy:>14.1%}{after['old'].loss:>10.3f}{speed}")
    print(f"\nfigure: {out / 'figure.png'}\nruns:   {', '.join(str(out / name) for name in FOLDERS.values())}")
    print(f"{time.perf_counter() - start_time:.0f} s in total")


if __name__ == "__main__":
    main()
