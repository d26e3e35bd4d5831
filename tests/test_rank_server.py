"""The forked ranks of the tests: a job sees nothing of the jobs before it, and lost ranks end with their job."""

import hashlib
import os

import pytest
from helpers.ranks import RankServer, on_ranks, rank_server
from helpers.runs import is_running, make_config, run_ranks

SHOW_STATE = """
    import logging, random, threading
    import finch.distributed.watchdog as watchdog
    handlers = [len(logging.getLogger(name).handlers) for name in ("finch", None)]
    tell([os.getpid(), [threading.active_count(), handlers, watchdog._watchdog is None, torch.initial_seed(),
        torch.distributed.is_initialized(), torch.get_default_dtype() == torch.float32, sorted(set(os.environ) - {"MASTER_PORT"})]])
"""
SPOIL = "logging" + ".getLogger('finch').addHandler(logging.NullHandler()); random.seed(3); torch.manual_seed(3)"


def digest(run):
    weights = (run.folder / "epoch_0" / "model.safetensors").read_bytes()
    columns = [run.column(name) for name in ("loss", "ema_loss", "lr", "grad_norm", "num_target_tokens")]
    return hashlib.sha256(weights).hexdigest(), columns


def test_job_has_the_same_result_after_other_jobs(tmp_path, base_folder, rows_file):
    """In between: another dtype, a watchdog that is still on after an error, random states, a handler of the log."""

    def train(name, *overrides):
        config = make_config(base_folder, rows_file, tmp_path / name, batch_size=2, max_steps_per_epoch=4)
        return run_ranks(2, tmp_path / f"{name}.job", config, *overrides)

    first, state = train("first"), on_ranks(2, SHOW_STATE, tmp_path / "before")
    assert first.returncode == 0, first.output
    assert train("mistake", "model.num_layers=1").returncode == 1
    assert train("other", "dtype=bf16", "seed=5").returncode == 0
    on_ranks(
        2, f"import logging, random\n    {SPOIL}\n    os.environ['LEFT'] = '1'\n    tell(None)", tmp_path / "spoil"
    )
    again, state_again = train("again"), on_ranks(2, SHOW_STATE, tmp_path / "after")
    assert digest(again) == digest(first)
    assert [each[1] for each in state_again] == [each[1] for each in state]
    assert len({each[0] for each in [*state, *state_again]}) == 4  # each rank is a process of one job only


def test_ranks_that_die_or_hang_are_replaced(tmp_path):
    file = tmp_path / "job.py"
    file.write_text("import os, signal, sys, time\nprint(os.getpid(), flush=True)\nif os.environ['RANK'] == '0':\n    ")
    text = file.read_text()
    for line, code in (("os.kill(os.getpid(), signal.SIGKILL)", -9), ("sys.exit(3)", 3), ("1 / 0", 1)):
        file.write_text(f"{text}{line}\ntime.sleep(1000)")
        codes, output = rank_server().run(2, [str(file)], tmp_path)
        assert codes == [code, -15]
    file.write_text(f"{text}time.sleep(1000)")
    with pytest.raises(pytest.fail.Exception, match="not done after 1 s"):
        rank_server().run(2, [str(file)], tmp_path, timeout=1)
    assert on_ranks(2, "tell(os.environ['RANK'])", tmp_path / "next") == ["0", "1"]
    pids = [int(line) for line in output.split("Traceback")[0].split()]
    assert not any(is_running(pid) for pid in pids)


def test_server_ends_when_it_is_closed():
    server = RankServer()
    assert os.getpid() != server.process.pid
    server.close()
    assert server.process.returncode == 0
