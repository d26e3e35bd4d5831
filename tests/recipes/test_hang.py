"""Hang detection: every rank prints its stacks, and none keeps waiting."""

import pytest
from helpers.runs import tune_run


@pytest.mark.slow
def test_hanging_collective_prints_every_ranks_stacks(tmp_path, tiny):
    config = tiny(batch_size=2, check_dataset=False)
    config["lr_scheduler"]["init"] = 4.0
    config["dataset"] |= {"_component_": "helpers.acting_rows.dataset", "hangs_at": 6}
    run = tune_run(tmp_path, config, "distributed_timeout=8", ranks=2)
    assert run.returncode != 0
    for rank in (0, 1):
        assert f"finch: rank {rank} has made no progress for 7 s; its stacks:" in run.output
    assert "in wait_for_a_dead_disk" in run.output
    assert "finch: error: rank 0 has waited for another rank longer than distributed_timeout" in run.output
    assert "Signal 9" not in run.output  # the stuck rank has exited by itself at SIGTERM
