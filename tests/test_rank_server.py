"""The forked ranks of the tests: a job sees nothing of the jobs before it, and lost ranks end with their job."""

import os

import pytest
from helpers.ranks import RankServer, on_ranks, rank_server
from helpers.runs import assert_same_run, is_running, make_config, run_ranks

SHOW_STATE = """
    import logging, threading
    from finch.distributed import watchdog
    handlers = [len(logging.getLogger(name).handlers) for name in ("finch", None)]
    state = [handlers, threading.active_count(), watchdog._watchdog is None, torch.distributed.is_initialized()]
    state += [torch.initial_seed(), str(torch.get_default_dtype()), sorted(set(os.environ) - {"MASTER_PORT"})]
    tell([os.getpid(), state])
"""
CHANGE_STATE = """
    import logging
    from finch.distributed import watchdog
    logging.getLogger("finch").addHandler(logging.NullHandler())
    watchdog.start(1000.0)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT"] = "1"
    tell(None)
"""


def test_job_has_the_same_result_after_other_jobs(tmp_path, base_folder, rows_file):
    """In between: a mistake, another dtype and seed, and ranks that change what a process has only once."""

    def train(name, *overrides):
        config = make_config(base_folder, rows_file, tmp_path / name, batch_size=2, max_steps_per_epoch=4)
        return run_ranks(2, tmp_path / f"{name}.job", config, *overrides)

    first, state = train("first"), on_ranks(2, SHOW_STATE, tmp_path / "before")
    assert train("mistake", "model.num_layers=1").returncode == 1
    assert train("other", "dtype=bf16", "seed=5").returncode == 0
    on_ranks(2, CHANGE_STATE, tmp_path / "changed")
    again, state_again = train("again"), on_ranks(2, SHOW_STATE, tmp_path / "after")
    assert_same_run(again, first)
    assert [each[1] for each in state_again] == [each[1] for each in state]
    assert len({each[0] for each in [*state, *state_again]}) == 4  # each rank is a process of one job only


def test_ranks_that_die_or_hang_are_replaced(tmp_path):
    file = tmp_path / "job.py"
    text = "import os, signal, sys, time\nprint(os.getpid(), flush=True)\nif os.environ['RANK'] == '0':\n    "
    for line, code in (("os.kill(os.getpid(), signal.SIGKILL)", -9), ("sys.exit(3)", 3), ("1 / 0", 1)):
        file.write_text(f"{text}{line}\ntime.sleep(1000)")
        codes, output = rank_server().run(2, [str(file)], tmp_path)
        assert codes == [code, -15]
    file.write_text("import time\ntime.sleep(1000)")
    with pytest.raises(pytest.fail.Exception, match="not done after 1 s"):
        rank_server().run(2, [str(file)], tmp_path, timeout=1)
    assert on_ranks(2, "tell(os.environ['RANK'])", tmp_path / "next") == ["0", "1"]
    assert not any(is_running(int(line)) for line in output.splitlines() if line.isdigit())


@pytest.mark.slow
def test_server_ends_when_it_is_closed():
    server = RankServer()
    assert os.getpid() != server.process.pid
    server.close()
    assert server.process.returncode == 0
