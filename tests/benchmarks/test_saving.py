"""benchmarks.saving: the order of the modes, ratios within a round, and one small run through the recipe."""

from collections import Counter

import pytest
import torch

from benchmarks import tiny_job
from benchmarks.saving import ASYNC, MODES, NEVER, SYNC, AlternatingWriter, Measurement, measure, report
from finch.distributed.parallel import Parallel


def test_writer_alternates_modes_in_every_order(tmp_path):
    writer = AlternatingWriter(tmp_path, Parallel(torch.device("cpu")), every_n_steps=5)
    due = [writer.is_due(step) for step in range(1, 5 * 20)]
    modes = [mode for mode, _ in writer.stretches]
    rounds = [tuple(modes[start : start + 3]) for start in range(0, 18, 3)]
    assert all(set(each) == set(MODES) for each in rounds)
    assert len(set(rounds)) == 6
    for position in range(3):
        assert set(Counter(each[position] for each in rounds).values()) == {2}
    # Due at the start of each stretch with a save, and at no other step
    starts = {5 * (number + 1) for number, mode in enumerate(modes) if mode != NEVER}
    assert {step for step, is_due in enumerate(due, 1) if is_due and step <= 5 * len(modes)} == starts


def test_ratios_compare_stretches_of_the_same_round():
    measured = Measurement(
        {NEVER: [1.0, 2.0, 3.0], ASYNC: [2.0, 2.0, 4.0], SYNC: [4.0, 4.0, 4.0]}, {ASYNC: [0.3], SYNC: [0.2]}, 10**6
    )
    assert measured.ratios(ASYNC) == [0.5, 1.0, 0.75]
    lines = report(2, 20, measured)
    assert "2 processes, 3 rounds; without saving a median of 10.00 steps/s; state 1 MB" in lines[0]
    assert "in the background, against never: ratio 0.750 (rounds 0.50 to 1.00" in lines[1]
    assert "while training waits, against never: ratio 0.500" in lines[2]


@pytest.mark.slow
def test_measure_small_model_on_two_ranks(tmp_path):
    measured = measure(tmp_path, ranks=2, rounds=2, every=2, size=tiny_job.TINY)
    assert {mode: len(seconds) for mode, seconds in measured.seconds.items()} == dict.fromkeys(MODES, 2)
    assert {mode: len(seconds) for mode, seconds in measured.save_seconds.items()} == {ASYNC: 2, SYNC: 2}
    parameters = 64 * 32 * 2  # only the embedding and the head
    assert measured.state_bytes > 3 * 4 * parameters
