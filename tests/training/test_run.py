"""A run's folder: its lock, the room on its disk, the best epoch."""

import errno
import math
import multiprocessing
import os
import signal
import time
from collections import namedtuple
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.models import load, save
from helpers.runs import MINIMAL, llama_args
from omegaconf import OmegaConf
from torchtune.models.llama2 import lora_llama2

from finch.base.errors import UserError
from finch.config.schema import FullFinetuneKeys
from finch.config.validation import check
from finch.training import run as run_module
from finch.training.run import RunLock, describe_best, update_best

FORK = multiprocessing.get_context("fork")


def lock_and_fork(folder, pids):
    """Acquires the lock, forks a worker and puts its process ID into the queue ``pids``."""
    lock = RunLock(folder)
    lock.acquire()
    worker = FORK.Process(target=time.sleep, args=(1000,))
    worker.start()
    pids.put(worker.pid)
    time.sleep(1000)


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch):
    monkeypatch.setattr(run_module, "ACQUIRE_TIMEOUT_S", 0.2)


def test_second_run_names_the_holder_until_it_is_killed(tmp_path):
    """A data-loader worker that the killed holder has forked, and that is still alive, does not keep the lock."""
    pids = FORK.Queue()
    holder = FORK.Process(target=lock_and_fork, args=(tmp_path, pids))
    holder.start()
    worker = pids.get(timeout=300)
    try:
        for start in (RunLock(tmp_path).check, RunLock(tmp_path).acquire, RunLock(tmp_path).acquire):
            with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on \S+ since 2.*; wait for it"):
                start()
        holder.kill()
        holder.join()
        lock = RunLock(tmp_path)
        lock.check()
        lock.acquire()
        lock.release()
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)


def test_release_frees_a_lock_acquired_twice_and_forked(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.acquire()
    child = FORK.Process(target=time.sleep, args=(1000,))
    child.start()
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
        RunLock(tmp_path).check()
    lock.release()
    RunLock(tmp_path).check()
    child.kill()
    child.join()


def test_check_creates_nothing(tmp_path):
    RunLock(tmp_path).check()
    RunLock(tmp_path / "absent").check()
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOTSUP, "not supported")))
    lock = RunLock(tmp_path)
    for start in (lock.acquire, lock.check):
        with pytest.warns(UserWarning, match="is on a file system without locks: a second run could write into it"):
            start()
    lock.release()


Usage = namedtuple("Usage", "free")


def weight_bytes(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["llama", "qwen3 tied"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_exported_bytes_equal_the_folder_s(name, dtype, tmp_path):
    save(name, tmp_path / "base")
    base, decoder = load(name, tmp_path / "base")
    base.write(decoder.state_dict().items(), tmp_path / "epoch_0", is_writer=True, dtype=dtype)
    written, computed = weight_bytes(tmp_path / "epoch_0"), run_module.exported_bytes(decoder, dtype)
    assert computed < written < computed + 8192  # the header


def test_exported_bytes_of_lora():
    with torch.device("meta"):
        decoder = lora_llama2(["q_proj"], **llama_args(num_layers=1), lora_rank=2, lora_alpha=2)
    assert run_module.exported_bytes(decoder, None, adapter_only=True) == 4 * 2 * (32 + 32)
    complete = sum(weight.numel() for weight in decoder.parameters())
    assert run_module.exported_bytes(decoder, torch.bfloat16) == 2 * complete


def test_check_disk_room(monkeypatch, caplog):
    decoder = torch.nn.Linear(10, 10, bias=False)  # 400 bytes

    caplog.set_level("INFO", "finch")

    def is_warned(free, epochs=1, is_last_only=False, is_best_only=False, **options):
        caplog.clear()
        monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(free))
        keys = {"output_dir": "/nowhere/run", "epochs": epochs, "save_last_epoch_only": is_last_only}
        keys |= {"save_best_only": is_best_only}
        cfg = check(OmegaConf.create({**MINIMAL, **keys}), FullFinetuneKeys)
        run_module.check_disk_room(cfg, decoder, **options)
        [record] = caplog.records
        return record.levelname == "WARNING"

    assert is_warned(400)
    for needed, options in (
        (2800, {}),  # 400 of weights; two states, each of 400 of weights and 800 of AdamW's moments
        (2799, {"freed_bytes": 1}),
        (4000, {"epochs": 4}),
        (2800, {"epochs": 4, "first_epoch": 3}),
        (2800, {"epochs": 4, "is_last_only": True}),
        (3200, {"epochs": 4, "is_best_only": True}),  # a better one next to the one that it replaces
    ):
        assert [is_warned(free, **options) for free in (needed - 1, needed)] == [True, False]
    with pytest.raises(UserError, match="/nowhere/run has 399 bytes of free disk, the weights of one epoch need 400;"):
        is_warned(399)


def test_link_removes_what_no_link_leads_to(tmp_path):
    """Of finch's own folders, a model's and its adapter's together."""
    names = [
        "epoch_0",
        "epoch_0_adapter",
        "epoch_0_average",
        "epoch_1",
        "epoch_2",
        "best_step_9",
        "within_budget_step_3",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "within_budget").symlink_to("epoch_0_adapter")
    run = SimpleNamespace(path=tmp_path, is_writer=True, _cfg=SimpleNamespace(save_best_only=True))
    run_module.Run.link(run, "best", "epoch_2")
    left = {"epoch_0", "epoch_0_adapter", "epoch_0_average", "epoch_2", "within_budget_step_3", "best", "within_budget"}
    assert {path.name for path in tmp_path.iterdir()} == left
    run_module.Run.link(run, "within_budget", "epoch_2")
    assert {path.name for path in tmp_path.iterdir()} == left - {"within_budget_step_3"}


@pytest.mark.parametrize(
    ("best", "key", "value", "is_chosen"),
    [
        (None, "validation_loss", 2.0, True),
        ({"epoch": "epoch_0", "validation_loss": 2.5}, "validation_loss", 2.0, True),
        ({"epoch": "epoch_0", "validation_loss": 2.0}, "validation_loss", 2.0, False),
        ({"epoch": "epoch_0", "probe/a/accuracy": 0.5}, "probe/a/accuracy", 0.75, True),
        ({"epoch": "epoch_0", "probe/a/accuracy": 0.5}, "probe/a/accuracy", 0.25, False),
        ({"epoch": "epoch_0", "probe/a/accuracy/code": 0.5}, "probe/a/accuracy/code", 0.75, True),
        ({"epoch": "epoch_0", "validation_loss": 2.0}, "probe/a/loss", 9.0, True),  # chosen by another metric before
        (None, "validation_loss", math.nan, False),
        (None, None, 2.0, False),
    ],
)
def test_better_compares_one_metric(best, key, value, is_chosen):
    found = update_best(best, key, "epoch_1", {"x": -9.0, str(key): value})
    assert found == ({"epoch": "epoch_1", key: value} if is_chosen else best)


def test_describe_best_has_its_unit():
    """test_summary has that of a validation loss."""
    assert describe_best({"epoch": "epoch_0", "probe/a/accuracy": 0.5}) == "probe/a/accuracy 0.5000"
    assert describe_best({"epoch": "epoch_0", "probe/a/accuracy/b": 0.5}) == "probe/a/accuracy/b 0.5000"
