"""benchmarks.saving: ratios within a round, and one small run through the recipe."""

import pytest

from benchmarks import saving, tiny_job


def test_ratios_compare_blocks_of_the_same_round():
    seconds = {saving.NEVER: [1.0, 2.0, 3.0], saving.WAITING: [2.0, 2.0, 4.0]}
    row = saving.row_of(saving.WAITING, seconds, [0.3, 0.1, 0.2])
    assert row["steps/s"] == 10
    assert row["ratio, median (range)"] == "0.750 (0.500 to 1.000)"
    assert row["a save, s"] == "0.2"


@pytest.mark.slow
def test_measure_small_model_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SIZE", tiny_job.TINY)
    monkeypatch.setattr(saving, "GLOBAL_BATCH", 2)
    seconds, save_seconds, size = saving.measure(tmp_path / "run", ranks=2, rounds=2)
    assert [len(seconds[mode]) for mode in saving.MODES] == [2, 2, 2]
    assert [len(save_seconds[mode]) for mode in saving.MODES] == [0, 2, 2]
    parameters = 64 * 32 * 2  # only the embedding and the head
    assert size > 3 * 4 * parameters
