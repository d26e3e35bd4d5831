"""Ten methods on the quickstart's worlds, three rates and three seeds each: trained, evaluated and reported.

python -m examples.quickstart.sweep [--out out/quickstart] [--jobs 2]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from finch.base.errors import report_user_errors
from finch.base.extras import require_extras
from finch.base.log import quiet_dependencies
from finch.base.progress import duration
from finch.distributed.processes import limit_spinning

GRID = "sweeps/quickstart"


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.quickstart.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out/quickstart"), help="output folder, the quickstart's")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parsed, words = parser.parse_known_args()
    require_extras("the quickstart's sweep", "torchtune", "evaluate", "report")
    quiet_dependencies()
    limit_spinning(os.environ)  # before torch is imported

    from examples.quickstart.base import finch, prepare
    from examples.quickstart.evaluation_tasks import copy_base, write_tasks

    start_time = time.perf_counter()
    out: Path = parsed.out.resolve()
    base = copy_base(prepare(out), out / "base_for_evaluation")
    tasks = write_tasks(out / "tasks")
    sweep = out / "sweep"
    code = finch(
        "sweep", GRID, f"--out={sweep}", f"--jobs={parsed.jobs}", f"base={base}", f"rows={out / 'data' / 'new.jsonl'}",
        f"tasks={tasks}", f"evaluate.base={base}", f"evaluate.include_path={tasks}", *words,
    )  # fmt: skip
    code = finch("report", str(sweep), f"--out={out / 'report'}") or code
    print(f"{duration(time.perf_counter() - start_time)} in total")
    sys.exit(code)


if __name__ == "__main__":
    main()
