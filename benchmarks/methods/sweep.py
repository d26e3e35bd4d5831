"""Compares all methods: stories260k is trained on 360 of TOFU's rows, and scored on what it learned and what it forgot.

    python -m benchmarks.methods --data DATA [--out out/methods] [--workers 2] [--only finch sft talr]

The rows are TOFU's 3600 to 3999, a seeded tenth of them held out. A run is 5 epochs of 23 steps of 16 rows on one core, with
configs/stories260k/tofu_sft.yaml and ``method=NAME``; the epoch with the lowest loss on the held-out rows is the one scored.

A method's learning rate is the one of its grid with the lowest such loss for seed 0; seeds 1 and 2 are then run at that rate.
FINCH's cap is 2.5 times its rate. small_lr is SFT at the largest rate whose story loss rises by less than 2% over the pretrained
model's, or at the smallest if there is none. wise_ft is the mean of the pretrained weights and each SFT run's. lr_replay trains with
the learning rates of the FINCH run of the next seed.

OUT gets results.csv (one row a run; a run that has its row is not repeated), table.md, front.csv, front.png, and the runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from benchmarks.methods.report import write_report
from benchmarks.methods.results import DERIVED, METHODS, PRETRAINED, Results, Row, Run, stages
from finch.errors import UserError, report_user_errors
from finch.run_files import METRICS, read_metrics

EPOCHS = 5
BATCH_SIZE = 16


# A run, in a worker process


class Worker:
    """Trains and scores in this process, one run after another; imports and tokenizes once."""

    def __init__(self, data: Path, out: Path) -> None:
        from benchmarks.methods.scores import Evaluation

        self._data, self._out = data, out
        held_out = json.loads((out / "held_out.json").read_text(encoding="utf-8"))
        self._evaluation = Evaluation(data, set(held_out))

    def execute(self, run: Run) -> list[Row]:
        """The run's row; for SFT that of WiSE-FT as well."""
        base = self._data / "stories260k"
        if run.method == PRETRAINED:
            return [self._row(run, base, None, None, 0.0)]
        start_time = time.perf_counter()
        folder = self._train(run)
        seconds = time.perf_counter() - start_time
        losses = {
            line["epoch"]: line["validation_loss"]
            for line in read_metrics(folder / METRICS)
            if "validation_loss" in line
        }
        best = min(losses, key=lambda epoch: losses[epoch])
        tuned = folder / f"epoch_{best}"
        rows = [self._row(run, tuned, best, losses[best], seconds)]
        if run.method == "sft":
            from finch.weights.wise_ft import wise_ft

            [mean] = wise_ft(base, tuned, [0.5], folder / "wise_ft")
            rows.append(self._row(Run("wise_ft", run.learning_rate, run.seed), mean, best, None, 0.0))
        for path in {folder / "checkpoints", *folder.glob("epoch_*")} - {tuned}:
            shutil.rmtree(path, ignore_errors=True)
        return rows

    def _train(self, run: Run) -> Path:
        folder = run.folder(self._out)
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
        recipe = "finch_lora_finetune" if run.method == "lora" else "finch_full_finetune"
        arguments = ["--config", "stories260k/tofu_sft", *overrides(run, self._data, self._out)]
        print(f"\n{recipe} {' '.join(arguments)}", flush=True)
        try:
            with mock.patch.object(sys, "argv", [recipe, *arguments]):
                importlib.import_module(recipe).recipe_main()
        except SystemExit as error:
            if error.code:
                raise RuntimeError(f"the end of {self._out}/logs/{os.getpid()}.log says why") from error
        return folder

    def _row(self, run: Run, folder: Path, epoch: int | None, validation_loss: float | None, seconds: float) -> Row:
        scores = asdict(self._evaluation.score(folder))
        return Row(**asdict(run), epoch=epoch, validation_loss=validation_loss, seconds=round(seconds, 1), **scores)


def overrides(run: Run, data: Path, out: Path) -> list[str]:
    """The run as ``key=value`` arguments of the recipe."""
    rows = [
        f"{key}.{name}={value}"
        for key, part in (("dataset", "train"), ("dataset_validation", "validation"))
        for name, value in (("data_files", out / f"{part}.jsonl"), ("split", "train"))
    ]
    replay = [f"lr_scheduler.log={run.replayed().folder(out)}"] if run.method == "lr_replay" else []
    cap = ["lr_scheduler.eta_max=auto"] if run.method == "finch" else []
    return [
        f"method={run.method}",
        f"optimizer.lr={run.learning_rate:g}",
        f"seed={run.seed}",
        f"data_root={data}",
        f"output_dir={run.folder(out)}",
        *rows,
        f"batch_size={BATCH_SIZE}",
        f"epochs={EPOCHS}",
        "device=cpu",
        "metric_logger=null",
        *replay,
        *cap,
    ]


_worker: Worker | None = None


def _init_worker(data: Path, out: Path) -> None:
    """Initializes a worker process: its output goes into a log file of its own."""
    global _worker
    log = os.open(out / "logs" / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _worker = Worker(data, out)


def _execute(run: Run) -> list[Row]:
    assert _worker is not None
    return _worker.execute(run)


# The sweep


def write_rows(data: Path, out: Path) -> None:
    """Writes train.jsonl, validation.jsonl and held_out.json, the indices of the held-out rows."""
    rows = (data / "tofu" / "full.jsonl").read_text(encoding="utf-8").splitlines()[3600:4000]
    held_out = set(random.Random(0).sample(range(len(rows)), len(rows) // 10))
    for part, is_validation in (("train", False), ("validation", True)):
        lines = [row for number, row in enumerate(rows) if (number in held_out) == is_validation]
        (out / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "held_out.json").write_text(json.dumps(sorted(held_out)), encoding="utf-8")


def check_settings(out: Path) -> None:
    """
    Raises:
        UserError: OUT holds results of runs with other settings.
    """
    settings = json.dumps({"epochs": EPOCHS, "batch_size": BATCH_SIZE, "rows": "3600-3999"})
    file = out / "settings.json"
    if file.exists() and file.read_text(encoding="utf-8") != settings:
        raise UserError(f"--out {out} holds results of runs with other settings; give another folder")
    file.write_text(settings, encoding="utf-8")


@report_user_errors
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="the folder that stories260k/tofu_sft takes as data_root, with stories and questions",
    )
    parser.add_argument("--out", type=Path, default=Path("out/methods"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, one core each")
    parser.add_argument(
        "--only", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help=", ".join(METHODS)
    )
    args = parser.parse_args(arguments)
    data, out = args.data.resolve(), args.out.resolve()
    methods = {*args.only, *(DERIVED[method] for method in args.only if method in DERIVED)}
    (out / "logs").mkdir(parents=True, exist_ok=True)
    check_settings(out)
    write_rows(data, out)
    results = Results(out / "results.csv")
    failures: list[str] = []
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"), _init_worker, (data, out)) as pool:
        for stage in stages(methods):
            failures += _run_all([run for run in stage(results) if run not in results.rows], results, pool)
    print(write_report(out, results))
    if failures:
        raise UserError(
            f"{len(failures)} runs failed, the first with: {failures[0]}; fix that and start the command again"
        )


def _run_all(runs: list[Run], results: Results, pool: ProcessPoolExecutor) -> list[str]:
    """Adds each row to ``results`` as soon as its run finishes; returns the error messages of failed runs."""
    start_time = time.perf_counter()
    futures = {pool.submit(_execute, run): run for run in runs}
    failures = []
    for number, future in enumerate(as_completed(futures), 1):
        try:
            rows = future.result()
        except Exception as error:
            failures.append(f"{futures[future]}: {error}")
            print(failures[-1], flush=True)
            continue
        results.add(rows)
        for row in rows:
            print(
                f"{number}/{len(runs)} {row.method} lr {row.learning_rate:g} seed {row.seed}: accuracy {row.accuracy:.3f}, story loss "
                f"{row.story_loss:.3f}, validation loss {row.validation_loss or float('nan'):.3f} ({time.perf_counter() - start_time:.0f} s)",
                flush=True,
            )
    return failures
