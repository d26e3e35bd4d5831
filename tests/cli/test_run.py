"""`finch run`: real processes on a tiny model, signals and exit codes, and mistakes that end before ranks are started."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.runs import Run, environment, finch, make_config, write_config
from torch.distributed import run as launcher

from finch.cli import run as run_module
from finch.distributed.processes import share_cores


@pytest.fixture
def config(base_folder, rows_file, tmp_path):
    return lambda **changes: write_config(tmp_path, make_config(base_folder, rows_file, tmp_path / "run", **changes))


def start(*arguments):
    command = [sys.executable, "-m", "finch.cli", "run", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment()}
    return subprocess.Popen(command, start_new_session=True, **options)


def finish(process, folder):
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Run(process.returncode, output, folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--epoch=3", "--epoch is no option of torchrun, did you mean epochs?"),
        ("--nproc_per_node two", "--nproc_per_node two: Unsupported nproc_per_node value: two; give numbers"),
        ("--nproc-per-node 2 epocs=3", "unknown key epocs=3, did you mean epochs?"),
        ("--nproc_per_node=2 optimizer.lr=0", "optimizer.lr=0 must be a number above 0"),
        ("--nproc_per_node 2 optimizer_in_bwd=True", "optimizer_in_bwd=True excludes clip_grad_norm=1.0"),
        ("--nproc_per_node 2 data_parallel_shard_dim=3", "but 2 ranks started"),
        ("--nnodes 2 --nproc_per_node 2 data_parallel_shard_dim=3", "but 4 ranks started"),
        ("--nproc_per_node 2 model.num_layers=1", "model does not fit checkpointer.checkpoint_dir"),
        ("--nproc_per_node 2 checkpointer.checkpoint_dir=/nowhere", "checkpointer.checkpoint_dir=/nowhere is not a folder"),
        ("--nproc_per_node 2 method=lora tensor_parallel_dim=2", "tensor_parallel_dim=2 does not cut LoRA layers"),
    ],
)  # fmt: skip
def test_mistake_is_one_line_before_ranks_start(capsys, monkeypatch, tmp_path, config, arguments, message):
    monkeypatch.setattr(run_module, "_launch", lambda *_: pytest.fail("ranks were started"))
    code, out, err = finch(capsys, "run", "--config", config(), *arguments.split())
    assert (code, out) == (2 if "torchrun" in message else 1, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_missing_model_of_a_named_config_prints_its_name_on_the_hub(capsys, monkeypatch):
    monkeypatch.setattr(run_module, "_launch", lambda *_: pytest.fail("ranks were started"))
    overrides = ("device=cpu", "model_dir=/nowhere/Qwen3-4B", "output_dir=/nowhere/run")
    code, _, err = finch(capsys, "run", "--nproc_per_node", "2", "--config", "qwen3/4B_finch", *overrides)
    assert code == 1
    assert (
        "checkpoint_dir=/nowhere/Qwen3-4B is not a folder; correct the path, or give a model of the hub: model_dir=Qwen/Qwen3-4B"
        in err
    )


def test_run_chooses_the_recipe_by_the_model(capsys, monkeypatch, config):
    started = []
    monkeypatch.setattr(run_module, "_launch", lambda recipe, *_: started.append(recipe) or 7)
    for overrides in ((), ("method=lora",)):
        code, _, err = finch(capsys, "run", "--nproc_per_node", "2", "--config", config(), *overrides)
        assert code == 7, err
    assert started == ["finch_full_finetune", "finch_lora_finetune"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGINT), (2, signal.SIGUSR1)])
def test_signal_saves_and_ends_with_the_recipes_exit_code(config, tmp_path, ranks, number):
    folder = tmp_path / "run"
    process = start("--config", config(epochs=1000), "--nproc_per_node", str(ranks), "~lr_scheduler")
    end = time.monotonic() + 600
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert process.poll() is None, finish(process, folder)
        assert time.monotonic() < end
        time.sleep(0.1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    run = finish(process, folder)
    assert run.returncode == (130 if number == signal.SIGINT else 0), run.output
    assert "Traceback" not in run.output
    assert list((folder / "checkpoints").glob("step_*/manifest.json"))
    assert (folder / "REQUEUE").exists() == (number != signal.SIGINT)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_ranks_of_a_run_under_nohup_do_not_hear_of_the_terminals_end(is_ignored, config, monkeypatch):
    """torchrun would handle the signal, for itself and, by a default action, the ranks."""
    handled = []
    monkeypatch.setattr(launcher, "run", lambda options: handled.append(options.signals_to_handle.split(",")))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit):
            run_module.main(None, ["--nproc_per_node", "2", config()])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ("SIGHUP" in handled[0], "SIGTERM" in handled[0], "SIGUSR1" in handled[0]) == (not is_ignored, True, True)


def test_a_config_may_have_any_name(tmp_path):
    file = tmp_path / "epochs=3.yaml"
    assert run_module.take_config([str(file)]) is None
    file.touch()
    assert run_module.take_config([str(file), "epochs=2"]) == str(file)


def test_openmp_settings_of_the_user_stay(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    settings: dict[str, str] = {}
    share_cores(settings, 4)
    assert settings == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        settings = {"OMP_NUM_THREADS": "3", name: "ACTIVE"}
        share_cores(settings, 4)
        assert settings == {"OMP_NUM_THREADS": "3", name: "ACTIVE"}
