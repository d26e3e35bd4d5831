"""The study from nothing: rows, runs, scores. The same command continues it wherever it was cut off.

python -m studies.long_runs.run --data-root DATA                                    stories260k, of DATA/stories260k
python -m studies.long_runs.run --data-root DATA --base SMOLLM2 --grids smollm2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from finch.base.errors import UserError, report_user_errors
from finch.base.run_files import CELL, METRICS, read_metrics
from studies.smollm2_tofu import data

HERE = Path(__file__).parent
GRIDS = ("300", "steps", "rounding", "1125", DECAY := "decay")
SMOLLM2 = "smollm2"


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder of local copies of the data sets")
    parser.add_argument("--base", type=Path, help="the pretrained folder; default: DATA/stories260k")
    parser.add_argument(
        "--grids", default=",".join(GRIDS), help=f"with commas; default: {','.join(GRIDS)}; or {SMOLLM2}"
    )
    parser.add_argument("--out", type=Path, default=Path("out/long_runs"), help="default: out/long_runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    rows, base = out / "data", (options.base or options.data_root / "stories260k").resolve()
    data.prepare(rows, options.data_root)
    for name in options.grids.split(","):
        if name == DECAY:
            write_decayed(out / "1125", rows / DECAY)
        words = [str(HERE / f"GRID_{name}.yaml"), f"model_dir={base}", f"data={rows}", f"--out={out / name}"]
        command = [sys.executable, "-m", "finch.cli", "sweep", *words, f"--jobs={options.jobs}"]
        if subprocess.run(command, cwd=HERE.parents[1], check=False).returncode:
            raise UserError(f"{name}: not every cell has ended; correct what it says, and start the same command again")
        if name == SMOLLM2:
            from studies.smollm2_tofu.score import Scorer, score_sweep

            score_sweep(out / name, Scorer(base, rows))


def write_decayed(sweep: Path, out: Path) -> None:
    """Logs for lr_replay: each FINCH's rates, and their mean at each step, with a straight line to 0 over the last third."""
    for cell in sweep.glob(f"*/{CELL}"):
        values = json.loads(cell.read_text())["values"]
        if values["method"] != "finch":
            continue
        rates = [line["lr"] for line in read_metrics(cell.with_name(METRICS)) if "lr" in line]
        for name, level in (("finch", rates), ("mean", [fmean(rates)] * len(rates))):
            lines = [{"step": i + 1, "lr": rate * min(1, 3 * (1 - i / len(level)))} for i, rate in enumerate(level)]
            data.write(out / f"{name}_{values['optimizer.lr']}_{values['seed']}.jsonl", lines)


if __name__ == "__main__":
    main()
