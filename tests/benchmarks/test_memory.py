"""benchmarks.memory: a peak that is seen, and one process that loads and exports."""

import mmap
import time

import torch

from benchmarks.memory import anonymous_peak, load_and_export, row_of
from benchmarks.tiny_job import make_base

MB = 10**6


def test_anonymous_peak_sees_memory_that_was_freed():
    with (
        anonymous_peak() as peak,
        mmap.mmap(-1, 40 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
    ):  # the system's, not the allocator's
        for start in range(0, 40 * MB, mmap.PAGESIZE):
            memory[start] = 1
        time.sleep(0.1)
    assert 39 * MB < peak["growth"] < 60 * MB


def test_one_process_loads_and_exports(tmp_path):
    base, target = tmp_path / "base", tmp_path / "exported"
    make_base(base)
    measured = load_and_export(base, target, torch.float32)
    exported, original = (folder / "model.safetensors" for folder in (target, base))
    assert exported.read_bytes() == original.read_bytes()
    assert measured["shard, MB"] == measured["read, MB"] > 0.9e-6 * original.stat().st_size
    row = row_of("float32", [{**measured, "export, MB": 3}, {**measured, "export, MB": 2}], "0123456789abcdef")
    assert (row["ranks"], row["export, MB"], row["other ranks"], row["sha256"]) == (2, 3, 2, "0123456789ab")
