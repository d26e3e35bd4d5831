"""benchmarks.memory: a peak that is seen, and one process that loads and exports."""

import mmap
import time

import torch

from benchmarks.memory import measure, rank
from benchmarks.memory.usage import AnonymousPeak
from finch.distributed.parallel import Parallel

MB = 10**6


def test_anonymous_peak_sees_memory_that_was_freed():
    with (
        AnonymousPeak() as peak,
        mmap.mmap(-1, 40 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
    ):  # the system's, not the allocator's
        for start in range(0, 40 * MB, mmap.PAGESIZE):
            memory[start] = 1
        time.sleep(0.1)
    assert 39 * MB < peak.peak - peak.start < 60 * MB


def test_one_process_loads_and_exports(tmp_path):
    num_bytes = measure.make_base(tmp_path / "base", num_layers=1, dim=256, vocab_size=64)
    target = tmp_path / "exported"
    measured = rank.load_and_export(tmp_path / "base", target, torch.float32, Parallel(torch.device("cpu")))
    assert measured["shard"] == measured["read"] == num_bytes
    exported, base = (folder / "model.safetensors" for folder in (target, tmp_path / "base"))
    assert exported.read_bytes() == base.read_bytes()
    row = measure.table_row(
        "float32", [{**measured, "export": 3 * MB}, {**measured, "export": 2 * MB}], "0123456789abcdef"
    )
    assert row.startswith("| float32 | 2 | ")
    assert "| 3 | 2 |" in row
    assert row.endswith("| 0123456789ab |")
