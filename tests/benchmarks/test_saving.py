"""benchmarks.saving: ratios within a round, and one small run through the recipe."""

import pytest

from benchmarks import tiny_job
from benchmarks.saving import ASYNC, MODES, NEVER, SYNC, Measurement, measure, report


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
    measured = measure(tmp_path / "run", ranks=2, rounds=2, every=2, size=tiny_job.TINY)
    assert {mode: len(seconds) for mode, seconds in measured.seconds.items()} == dict.fromkeys(MODES, 2)
    assert len(measured.save_seconds[SYNC]) == 2
    assert measured.save_seconds[ASYNC]  # the last one may not have ended
    parameters = 64 * 32 * 2  # only the embedding and the head
    assert measured.state_bytes > 3 * 4 * parameters
