"""CPU time and imported modules of each command until it has answered: its help, and mistakes in a path, a key or a value.

    python -m benchmarks.first_answer [MODEL_DIR ROWS]

With a model's folder and a file of rows also mistakes in keys and values next to them, and a whole `finch check`. Ends with 1 if a
mistake has imported one of the packages that take seconds.
"""

from __future__ import annotations

import resource
import subprocess
import sys

HEAVY = ("torch", "transformers", "datasets", "torchtune", "torchao", "pyarrow")
"""Packages that take from a third of a second to nine."""
PATHS = {
    "run auto model_dir=nothere data_files=rows.jsonl": "model_dir=nothere is not a folder",
    "run --nproc_per_node 2 qwen3/4B_finch model_dir=nothere": "checkpointer.checkpoint_dir=nothere is not a folder",
    "check auto model_dir=nothere data_files=rows.jsonl": "model_dir=nothere is not a folder",
    "sweep nothere": "nothere is neither a file nor a grid",
    "sweep sweeps/quickstart base=nothere rows=nothere tasks=nothere": "checkpointer.checkpoint_dir=nothere is not a folder",
    "chat nothere": "nothere/config.yaml does not exist",
    "average nothere": "nothere/config.yaml does not exist",
    "average --base nothere --tuned nothere": "--base=nothere is not a folder",
    "evaluate --base nothere --tuned nothere": "--base=nothere is not a folder",
    "evaluate --base nothere --tuned nothere --suite science": "--base=nothere is not a folder",
    "report nothere --out report": "nothere is no folder",
    "report --select-lr nothere": "nothere holds no runs",
}
"""What is typed, and how its answer begins."""
KEYS = {
    "run auto {} data_files=nothere.jsonl": "data_files=nothere.jsonl does not exist",
    "run auto {} {} epohcs=3": "unknown key epohcs=3, did you mean epochs?",
    "run auto {} {} optimizer.lrr=1": "unknown key optimizer.lrr, did you mean optimizer.lr?",
    "run auto {} {} method=finch lr_scheduler.etamax=1": "unknown key lr_scheduler.etamax, did you mean lr_scheduler.eta_max?",
    "run auto {} {} batch_size=x": "batch_size=x must be int >= 1",
    "run auto {} {} method=finhc": "method=finhc is not known, did you mean finch?",
    "check auto {} {} batch_size=x epohcs=3": "unknown key epohcs=3, did you mean epochs?",
}
"""As ``PATHS``, behind a model's folder and a file of rows, which are there."""
PROGRAM = f"""import atexit, sys
atexit.register(lambda: print("\\n", len(sys.modules), *(name for name in {HEAVY} if name in sys.modules)))
from finch.cli.main import main
main()"""


def main() -> None:
    given = [f"{key}={value}" for key, value in zip(("model_dir", "data_files"), sys.argv[1:], strict=False)]
    commands = ["--help", *PATHS, *(KEYS if given else ()), *(["check auto {} {}"] if given else ())]
    failed = False
    print(f"{'CPU s':>6} {'modules':>8}  command")
    for command in commands:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = command.format(*given).split()
        done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        number, *heavy = done.stdout.split("\n")[-2].split()
        failed |= bool(heavy) and command in {**PATHS, **KEYS}
        print(f"{seconds:6.2f} {number:>8}  finch {command.format('M', 'R')}", *(["imports", *heavy] if heavy else ()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
