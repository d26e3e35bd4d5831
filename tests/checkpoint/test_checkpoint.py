"""Whole or absent, the last one kept, and only for the run it came from."""

import os
import random
import resource
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from finch import FinchLR
from finch.checkpoint.reader import (
    archive_newer,
    candidates,
    check_identity,
    checkpoints,
    latest_valid,
    load_tensors,
    read_state,
    restore_rng,
)
from finch.checkpoint.writer import CheckpointWriter
from finch.distributed.parallel import Parallel
from finch.errors import UserError

ALONE = Parallel(torch.device("cpu"))


def save_checkpoint(run, step, model, optimizer, state, **options):
    assert CheckpointWriter(run, ALONE, **options).save(step, model, [optimizer], state, wait=True)
    return run / "checkpoints" / f"step_{step}"


def trained(seed, steps, **kwargs):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **kwargs})
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_weights_and_moments_come_back_bit_for_bit(tmp_path):
    model, optimizer = trained(0, 3)
    save_checkpoint(tmp_path, 3, model, optimizer, {"step": 3})
    other, other_optimizer = trained(1, 0)
    load_tensors(checkpoints(tmp_path)[0], other, [other_optimizer], ALONE)
    assert read_state(checkpoints(tmp_path)[0]) == {"step": 3, "world_size": 1}
    for each in ((model, optimizer), (other, other_optimizer)):
        each[0](torch.ones(2, 3)).sum().backward()
        each[1].step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_rate_that_is_a_tensor_stays_the_schedules(tmp_path):
    """On CUDA the recipe makes it one; loading replaces the tensor, and FinchLR must write into the new one."""

    def with_schedule(seed, steps):
        model, optimizer = trained(seed, steps, lr=torch.tensor(1e-2), fused=True)
        return model, optimizer, FinchLR(optimizer, eta_base=1e-2, eta_max=1.0, init=2.0)

    model, optimizer, schedule = with_schedule(0, 2)
    schedule.step(torch.tensor(1.0))
    save_checkpoint(tmp_path, 2, model, optimizer, {"schedule": schedule.state_dict()})
    other, other_optimizer, other_schedule = with_schedule(1, 0)
    load_tensors(checkpoints(tmp_path)[0], other, [other_optimizer], ALONE)
    other_schedule.load_state_dict(read_state(checkpoints(tmp_path)[0])["schedule"])
    for each_model, each_optimizer, each_schedule in (
        (model, optimizer, schedule),
        (other, other_optimizer, other_schedule),
    ):
        each_model(torch.ones(2, 3)).sum().backward()
        each_schedule.step(torch.tensor(0.5))
        each_optimizer.step()
        assert isinstance(each_optimizer.param_groups[0]["lr"], torch.Tensor)
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("before", "after"), [("float", "tensor"), ("tensor", "float")])
def test_hyperparameters_are_the_configs_not_the_checkpoints(tmp_path, before, after):
    def optimizer_of(kind, seed, steps, weight_decay):
        rate = torch.tensor(1e-2) if kind == "tensor" else 1e-2
        return trained(seed, steps, lr=rate, weight_decay=weight_decay, fused=kind == "tensor")

    model, optimizer = optimizer_of(before, 0, 2, 0.1)
    save_checkpoint(tmp_path, 2, model, optimizer, {})
    other, other_optimizer = optimizer_of(after, 1, 0, 0.5)
    load_tensors(checkpoints(tmp_path)[0], other, [other_optimizer], ALONE)
    (group,) = other_optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor) == (after == "tensor")
    assert group["weight_decay"] == 0.5
    assert float(other_optimizer.state[next(other.parameters())]["step"]) == 2


def test_a_checkpoint_with_a_missing_file_is_named(tmp_path):
    model, optimizer = trained(0, 1)
    folder = save_checkpoint(tmp_path, 1, model, optimizer, {})
    for file in folder.glob("*.distcp"):
        file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_tensors(folder, model, [optimizer], ALONE)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(("keep_last", "left"), [(1, [10]), (2, [2, 10]), (9, [1, 2, 10])])
def test_the_last_ones_are_kept_and_a_torn_one_does_not_count(tmp_path, keep_last, left):
    model, optimizer = trained(0, 1)
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, model, optimizer, {"step": step}, keep_last=keep_last)
    assert names(tmp_path) == sorted(f"step_{step}" for step in left)
    (tmp_path / "checkpoints" / "step_11.partial").mkdir()
    (tmp_path / "checkpoints" / "step_12").mkdir()
    assert checkpoints(tmp_path)[0].name == "step_10"
    assert checkpoints(tmp_path / "nothing") == []


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path, monkeypatch):
    """At an epoch's end after a signal. A kill between the two renames leaves the first under its other name."""
    model, optimizer = trained(0, 1)
    folder = save_checkpoint(tmp_path, 5, model, optimizer, {"step": 5, "epoch": 0})

    class Killed(BaseException):
        pass

    def rename(path, target):
        if path.name.endswith(".partial"):
            raise Killed
        os.rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "rename", rename)
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, 5, model, optimizer, {"step": 5, "epoch": 1})
    assert [path.name for path in checkpoints(tmp_path)] == ["step_5.replaced"]
    assert read_state(latest_valid(checkpoints(tmp_path), ALONE)[0])["epoch"] == 0
    save_checkpoint(tmp_path, 5, model, optimizer, {"step": 5, "epoch": 1})
    assert names(tmp_path) == ["step_5"]
    assert read_state(folder)["epoch"] == 1


def test_what_came_after_the_step_gone_back_to_is_set_aside(tmp_path):
    model, optimizer = trained(0, 1)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, model, optimizer, {"step": step}, keep_last=3)
    archive_newer(tmp_path, tmp_path / "checkpoints" / "step_1")
    assert [path.name for path in checkpoints(tmp_path)] == ["step_1"]
    save_checkpoint(tmp_path, 2, model, optimizer, {"step": 2}, keep_last=3)
    assert names(tmp_path) == ["step_1", "step_2"]


def test_a_change_of_any_byte_is_found_before_anything_is_unpickled(tmp_path, monkeypatch):
    model, optimizer = trained(0, 1)
    folder = save_checkpoint(tmp_path, 1, model, optimizer, {"step": 1})
    monkeypatch.setattr("pickle.load", lambda *_: pytest.fail("unpickled"))
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("unpickled"))
    files = sorted(folder.iterdir())
    assert {file.name for file in files} == {".metadata", "__0_0.distcp", "manifest.json", "rng_0.json", "state.json"}
    random.seed(0)
    for file in files:
        whole = file.read_bytes()
        for place in {0, len(whole) - 1, *random.sample(range(len(whole)), 20)}:
            changed = bytearray(whole)
            changed[place] ^= 1 << random.randrange(8)
            file.write_bytes(changed)
            found, (told,) = latest_valid([folder], ALONE)
            assert found is None
            assert file.name in told
        file.write_bytes(whole[:-1])
        assert latest_valid([folder], ALONE)[0] is None
        file.unlink()
        assert latest_valid([folder], ALONE)[0] is None
        file.write_bytes(whole)
    assert latest_valid([folder], ALONE) == (folder, [])


def test_the_one_before_a_damaged_one_is_taken(tmp_path):
    model, optimizer = trained(0, 1)
    for step in (1, 2):
        folder = save_checkpoint(tmp_path, step, model, optimizer, {"step": step}, keep_last=2)
    (folder / "state.json").write_text("{}")
    found, (told,) = latest_valid(checkpoints(tmp_path), ALONE)
    assert found.name == "step_1"
    assert "step_2 is damaged (state.json has 2 bytes in place of" in told


def test_what_may_be_resumed_from(tmp_path):
    assert candidates(tmp_path, False) == candidates(tmp_path, "auto") == []
    with pytest.raises(UserError, match="holds no checkpoint"):
        candidates(tmp_path, True)
    with pytest.raises(UserError, match="is not a whole checkpoint"):
        candidates(tmp_path, str(tmp_path / "checkpoints" / "step_1"))
    folder = save_checkpoint(tmp_path, 1, *trained(0, 1), {})
    assert candidates(tmp_path, True) == candidates(tmp_path, "auto") == candidates(tmp_path, str(folder)) == [folder]


def test_random_states_come_back(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1), torch.randn(1)

    draw()
    folder = save_checkpoint(tmp_path, 1, *trained(0, 1), {"seed": 0, "step": 1})
    expected = draw()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    restore_rng(folder, read_state(folder), ALONE)
    assert draw() == expected
    restore_rng(folder, {**read_state(folder), "world_size": 2}, ALONE)
    moved = draw()
    restore_rng(folder, {**read_state(folder), "world_size": 2}, ALONE)
    assert draw() == moved != expected


def test_async_save_keeps_the_weights_of_its_step(tmp_path, monkeypatch, caplog):
    model, optimizer = trained(0, 2)
    released, write = threading.Event(), dcp.save
    monkeypatch.setattr(dcp, "save", lambda *args, **kwargs: (released.wait(60), write(*args, **kwargs)))
    caplog.set_level("INFO")
    saver = CheckpointWriter(tmp_path, ALONE, asynchronous=True)
    assert saver.save(2, model, [optimizer], {"step": 2})
    expected = [weight.detach().clone() for weight in model.parameters()]
    moments = [{key: value.clone() for key, value in each.items()} for each in optimizer.state.values()]
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    saver.poll()
    assert checkpoints(tmp_path) == []
    assert caplog.records == []
    released.set()
    assert saver.finish()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    other, other_optimizer = trained(1, 0)
    load_tensors(checkpoints(tmp_path)[0], other, [other_optimizer], ALONE)
    assert all(torch.equal(a, b) for a, b in zip(expected, other.parameters(), strict=True))
    for one, two in zip(moments, other_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [1000, 3000, 20000])
def test_full_disk_keeps_last_checkpoint_and_next_save_retries(tmp_path, asynchronous, limit, caplog):
    """The limit of a file's size stands for the disk's: the first write beyond it fails."""
    torch.manual_seed(0)
    model = nn.Linear(60, 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = CheckpointWriter(tmp_path, ALONE, asynchronous=asynchronous)
    assert saver.save(1, model, [optimizer], {"step": 1}, wait=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        fits = saver.save(2, model, [optimizer], {"step": 2}) and saver.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not fits
    assert "the state of step 2 could not be saved (" in caplog.messages[-1]
    assert "step_1 stays" in caplog.messages[-1]
    assert names(tmp_path) == ["step_1"]
    assert latest_valid(checkpoints(tmp_path), ALONE)[1] == []
    assert saver.save(3, model, [optimizer], {"step": 3}, wait=True)
    assert names(tmp_path) == ["step_3"]


def test_another_runs_checkpoint_is_refused(tmp_path):
    check_identity({"format": 1, "identity": {"seed": 1, "shuffle": True}}, {"seed": 1}, tmp_path)
    with pytest.raises(UserError, match="belongs to a run with seed=1, this config says 2"):
        check_identity({"format": 1, "identity": {"seed": 1}}, {"seed": 2}, tmp_path)
    with pytest.raises(UserError, match="was written by another version of finch"):
        check_identity({"identity": {"seed": 1}}, {"seed": 1}, tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_saving_before_the_first_update_changes_nothing(kind, tmp_path):
    """torch makes the optimizer's state by a step of its own."""
    model, straight = nn.Linear(3, 2), nn.Linear(3, 2)
    straight.load_state_dict(model.state_dict())
    options = {"lr": 0.1} if kind is torch.optim.AdamW else {"lr": 0.1, "momentum": 0.9}
    optimizers = [kind(each.parameters(), **options) for each in (model, straight)]
    CheckpointWriter(tmp_path, ALONE).save(0, model, [optimizers[0]], {"step": 0}, wait=True)
    other = nn.Linear(3, 2)
    other_optimizer = kind(other.parameters(), **options)
    load_tensors(checkpoints(tmp_path)[0], other, [other_optimizer], ALONE)
    for _ in range(3):
        for each, optimizer in zip((model, straight, other), (*optimizers, other_optimizer), strict=True):
            each(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for each in (model, other):
        assert torch.equal(each.weight, straight.weight)
