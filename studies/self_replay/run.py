"""The study from nothing: rows, runs, averages, the comparison. The same command continues it wherever it was cut off.

python -m studies.self_replay.run --data-root DATA                                                     stories260k, DATA/stories260k
python -m studies.self_replay.run --data-root DATA --base SMOLLM2 --grid GRID_smollm2.yaml
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from finch.base.errors import UserError, report_user_errors
from finch.base.run_files import AVERAGE, CELL, METRICS, read_metrics
from finch.study.report.style import method_styles, name_places, new_figure, save
from finch.training.style import LESS_FORGOTTEN, MORE_LEARNED, Name
from studies.smollm2_tofu import data

HERE = Path(__file__).parent
ALPHA, NUM_LOSSES = 0.5, 101
SECONDARY = {
    "probe/stories/loss_change": "stories_rise",
    "probe/hellaswag/loss_change": "hellaswag_rise",
    "probe/paraphrases/accuracy": "paraphrases_accuracy",
    "probe/paraphrases/loss": "paraphrases_loss",
}
ARMS = {
    "sft": ("sft", "cosine SFT"),
    "constant": ("constant", "constant rate"),
    "finch": ("finch", "FINCH"),
    "kl_0.1": ("kl", "KL penalty"),
    "replay_0.3": ("self_replay", "self_replay, 0.3"),
    "replay_0.1": ("replay_0.1", "self_replay, 0.1"),
    "replay_file": ("replay_file", "self_replay of a file"),
}
"""Method and name in the figure of each arm."""
FAMILIES = {"replay": ("replay_0.3",), "others": ("sft", "finch", "constant", "kl_0.1")}


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder of local copies of the data sets")
    parser.add_argument("--base", type=Path, help="the pretrained folder; default: DATA/stories260k")
    parser.add_argument("--grid", default="GRID.yaml")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    options = parser.parse_args()
    rows, grid = Path("out/self_replay/data"), HERE / options.grid
    data.prepare(rows, options.data_root)
    out = Path(yaml.safe_load(grid.read_text())["out"])
    base = options.base or options.data_root / "stories260k"
    finch = [sys.executable, "-m", "finch.cli"]
    run([*finch, "sweep", str(grid), f"model_dir={base}", f"data={rows}", "--jobs", str(options.jobs)])
    cells = sorted(path.parent for path in out.glob(f"*/{CELL}"))
    todo = [cell for cell in cells if not (cell / AVERAGE / "model").is_dir()]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda cell: run([*finch, "average", str(cell), "--alpha", str(ALPHA)]), todo))
    analyse(cells, HERE / "results" / out.name)


def run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise UserError(f"{' '.join(command)} has failed; correct what it says, and start the same command again")


def analyse(cells: list[Path], out: Path) -> None:
    """Writes points.csv, a row per model, and comparison.json."""
    points = []
    for cell in cells:
        values = json.loads((cell / CELL).read_text())["values"]
        front = json.loads((cell / AVERAGE / "front.json").read_text())["points"]
        last = [line for line in read_metrics(cell / METRICS) if "probe/own/kl" in line][-1]
        arm = str(values.get("label") or values["method"])
        for alpha, loss, kl in front:
            if alpha > 0:
                found = {"arm": arm, "rate": values["optimizer.lr"], "seed": values["seed"], "alpha": alpha}
                found |= {"training_loss": loss, "own_kl": kl}
                if alpha == 1:
                    found |= {name: last[key] for key, name in SECONDARY.items() if key in last}
                points.append(found)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "points.csv").open("w", newline="") as file:
        columns = list(dict.fromkeys(name for point in points for name in point))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in each.items()} for each in points
        )
    draw(points, out)
    ratios = {}
    for seed in sorted({point["seed"] for point in points}):
        own = [point for point in points if point["seed"] == seed]
        fronts = [
            hull([(p["training_loss"], np.log(p["own_kl"])) for p in own if p["arm"] in arms])
            for arms in FAMILIES.values()
        ]
        losses = np.linspace(*bounds(fronts), NUM_LOSSES)
        replay, others = (np.interp(losses, *np.array(front).T) for front in fronts)
        ratios[seed] = float(np.exp((replay - others).mean()))
    mean = float(np.exp(np.mean(np.log(list(ratios.values())))))
    content = {"ratio": mean, "by_seed": ratios}
    (out / "comparison.json").write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(content))


def draw(points: list[dict[str, Any]], out: Path) -> None:
    """front.png: forgetting over learning, a line from a run to its average with the pretrained weights."""
    x_label = f"training loss, nats per token\n{MORE_LEARNED}"
    figure, axes = new_figure(3.8, x_label, f"KL on own answers, nats per token\n{LESS_FORGOTTEN}")
    styles = method_styles(method for method, _ in ARMS.values())
    places: dict[str, list[tuple[float, float]]] = {}
    for (arm, *_), run in groupby(points, key=lambda point: (point["arm"], point["rate"], point["seed"])):
        style, line = styles[ARMS[arm][0]], [(point["training_loss"], point["own_kl"]) for point in run]
        axes.plot(*zip(*line, strict=True), color=style.hex, marker=style.marker, markersize=5, linewidth=1)
        places.setdefault(arm, []).extend(line)
    axes.set_yscale("log")
    axes.xaxis.set_inverted(True)
    axes.yaxis.set_inverted(True)
    name_places(axes, [Name(ARMS[arm][1], styles[ARMS[arm][0]].hex, those) for arm, those in places.items()])
    save(figure, out, "front", "Forgetting over learning", "The end of each line with the larger loss is the average")


def bounds(fronts: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """The losses that all fronts cover."""
    return max(front[0][0] for front in fronts), min(front[-1][0] for front in fronts)


def hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull, from the smallest loss to the largest."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if found and x == found[-1][0]:  # above it
            continue
        while len(found) > 1 and (found[-1][0] - found[-2][0]) * (y - found[-2][1]) <= (x - found[-2][0]) * (
            found[-1][1] - found[-2][1]
        ):
            found.pop()
        found.append((x, y))
    return found


if __name__ == "__main__":
    main()
