"""Phases of a check that hang or are quick, and a rank with a defect; they run in processes of their own."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from finch.base.errors import report_user_errors
from finch.plan.gpu_check.phases import Phase, run_phases
from finch.plan.gpu_check.processes import Ranks
from finch.plan.gpu_check.report import Check


def quick(check: Check) -> None:
    check.equal("one", 1, 1)


def fail(check: Check) -> None:
    with check.case("two"):
        raise RuntimeError("broken")


def end(check: Check) -> None:
    check.equal("one", 1, 1)
    sys.exit("no more")


def hang(check: Check) -> None:
    """As do its two ranks."""
    check.equal("before", 1, 1)
    Ranks("rank", f"{__name__}:wait_for_lock", {}, check.folder, ranks=2)
    wait_for_lock()


def hang_in_ranks(check: Check) -> None:
    ranks = Ranks("rank", f"{__name__}:wait_for_lock", {}, check.folder, ranks=2)
    logs = [check.folder / f"rank_rank_{rank}.log" for rank in range(2)]
    while not all("waits" in log.read_text() for log in logs):
        time.sleep(0.05)
    check.equal("ranks end", ranks.wait(time.time()), True)
    check.equal("after", 1, 1)


def wait_for_lock() -> None:
    lock = threading.Lock()
    with lock:
        print("waits", flush=True)
        lock.acquire()


def phase(name: str, deadline_s: float = 100.0) -> Phase:
    return Phase(name, f"{__name__}:{name}", deadline_s, deadline_s)


@report_user_errors
def main(out: str) -> None:
    run_phases(Path(out) / "page", device="cuda", ranks=1, quick=True, phases=[phase("quick"), phase("hang")])


def end_at_once(**_: Any) -> None:
    sys.exit("no more")


def hang_at_once(**_: Any) -> None:
    wait_for_lock()


def steps_with_a_temporary(**arguments: Any) -> None:
    """Ranks that fill a tensor of the complete weights' size when they update."""
    import torch

    from finch.plan.gpu_check import shipped
    from finch.training.optimizer import Update

    clip = Update.clip

    def clip_with_a_copy(self: Any) -> Any:
        torch.zeros(sum(weight.nbytes for weight in self._model.parameters()), dtype=torch.uint8)
        return clip(self)

    Update.clip = clip_with_a_copy
    shipped._STEPS = 1
    shipped.steps_on_rank(**arguments)


def steps_without_reduce(**arguments: Any) -> None:
    """A rank that keeps its own sums: losses, counts and gradient scale are its own."""
    from finch.distributed.parallel import Parallel
    from finch.plan.gpu_check.meshes import steps_on_rank

    Parallel.all_reduce_sum_ = lambda self, values: values
    steps_on_rank(**arguments)
