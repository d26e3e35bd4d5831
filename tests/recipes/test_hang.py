"""Hang detection: every rank prints its stacks, and none keeps waiting."""

import pytest
from helpers.runs import make_config, tune_run

STUCK_ROWS = """
import os, time
from torchtune.datasets import instruct_dataset

class Stuck:
    def __init__(self, inner): self.inner, self.reads = inner, 0
    def __len__(self): return len(self.inner)
    def __getitem__(self, index):
        self.reads += 1
        if os.environ["RANK"] == "1" and self.reads == 6:
            wait_for_a_dead_disk()
        return self.inner[index]

def wait_for_a_dead_disk(): time.sleep(1000)
def dataset(tokenizer, **kwargs): return Stuck(instruct_dataset(tokenizer, **kwargs))
"""


@pytest.mark.slow
def test_hanging_collective_prints_every_ranks_stacks(tmp_path, base_folder, rows_file):
    (tmp_path / "stuck_rows.py").write_text(STUCK_ROWS)
    config = make_config(base_folder, rows_file, tmp_path / "run", batch_size=2, check_dataset=False)
    config["lr_scheduler"]["init"] = 4.0
    config["dataset"]["_component_"] = "stuck_rows.dataset"
    run = tune_run(tmp_path, config, "distributed_timeout=8", ranks=2)
    assert run.returncode != 0
    assert "finch: rank 0 has made no progress for 7 s; its stacks:" in run.output
    assert "finch: rank 1 has made no progress for 7 s; its stacks:" in run.output
    assert "in wait_for_a_dead_disk" in run.output
    assert "finch: error: rank 0 has waited for another rank longer than distributed_timeout" in run.output
    assert "Signal 9" not in run.output  # the stuck rank has exited by itself at SIGTERM
