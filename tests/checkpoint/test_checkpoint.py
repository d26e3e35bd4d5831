"""Checkpoints are complete or absent, the last ones are kept, and only their own run resumes from them."""

import copy
import os
import random
import shutil
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.runs import disk_of_files_below
from torch import nn

from finch import FinchLR
from finch.base.errors import UserError
from finch.checkpoint.reader import (
    archive_newer,
    check_identity,
    find_resume_candidates,
    latest_valid,
    list_checkpoints,
    load_rng_state,
    load_tensors,
    read_state,
    remove_surplus,
)
from finch.checkpoint.writer import CheckpointWriter
from finch.distributed.parallel import Parallel

ONE_PROCESS = Parallel(torch.device("cpu"))


def save_checkpoint(run, step, model, optimizer, state, **options):
    assert CheckpointWriter(run, ONE_PROCESS, **options).save(step, model, [optimizer], state, wait=True)
    return run / "checkpoints" / f"step_{step}"


def save_steps(run, *steps, **options):
    model, optimizer = train(0, 1)
    return [save_checkpoint(run, step, model, optimizer, {"step": step}, **options) for step in steps]


def update(model, optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(seed, steps, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})
    for _ in range(steps):
        update(model, optimizer)
    return model, optimizer


def assert_equal_weights(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_weights_moments_and_schedule_are_restored_bit_for_bit(tmp_path, kind):
    """On CUDA the recipe makes the rate a tensor; loading replaces the tensor, and FinchLR must write into the new one."""

    def with_schedule(seed, steps):
        model, optimizer = train(seed, steps, lr=kind(1e-2), fused=kind is torch.tensor)
        return model, optimizer, FinchLR(optimizer, eta_base=1e-2, eta_max=1.0, init=2.0)

    model, optimizer, schedule = with_schedule(0, 2)
    schedule.step(torch.tensor(1.0))
    folder = save_checkpoint(tmp_path, 2, model, optimizer, {"schedule": schedule.state_dict()})
    assert read_state(folder) == {"schedule": schedule.state_dict(), "world_size": 1}
    other, other_optimizer, other_schedule = with_schedule(1, 0)
    load_tensors(folder, other, [other_optimizer], ONE_PROCESS)
    other_schedule.load_state_dict(read_state(folder)["schedule"])
    for each_schedule, *each in ((schedule, model, optimizer), (other_schedule, other, other_optimizer)):
        each_schedule.step(torch.tensor(0.5))
        update(*each)
        assert isinstance(each[1].param_groups[0]["lr"], torch.Tensor) == (kind is torch.tensor)
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert_equal_weights(model, other)


@pytest.mark.parametrize(("before", "after"), [(float, torch.tensor), (torch.tensor, float)])
def test_hyperparameters_are_the_configs_not_the_checkpoints(tmp_path, before, after):
    def with_lr_type(kind, seed, steps, weight_decay):
        return train(seed, steps, lr=kind(1e-2), weight_decay=weight_decay, fused=kind is torch.tensor)

    folder = save_checkpoint(tmp_path, 2, *with_lr_type(before, 0, 2, 0.1), {})
    other, other_optimizer = with_lr_type(after, 1, 0, 0.5)
    load_tensors(folder, other, [other_optimizer], ONE_PROCESS)
    (group,) = other_optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor) == (after is torch.tensor)
    assert group["weight_decay"] == 0.5
    assert float(other_optimizer.state[next(other.parameters())]["step"]) == 2


def test_load_tensors_names_a_checkpoint_without_shards(tmp_path):
    (folder,) = save_steps(tmp_path, 1)
    (folder / "__0_0.distcp").unlink()
    model, optimizer = train(0, 1)
    with pytest.raises(UserError, match="step_1 cannot be loaded into this config's model and optimizer"):
        load_tensors(folder, model, [optimizer], ONE_PROCESS)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [10]), (2, [2, 10]), (9, [1, 2, 10])])
def test_last_checkpoints_are_kept_and_incomplete_ignored(tmp_path, keep_last, kept):
    save_steps(tmp_path, 1, 2, 10, keep_last=keep_last)
    assert names(tmp_path) == sorted(f"step_{step}" for step in kept)
    (tmp_path / "checkpoints" / "step_11.partial").mkdir()
    (tmp_path / "checkpoints" / "step_12").mkdir()
    assert list_checkpoints(tmp_path)[0].name == "step_10"
    assert list_checkpoints(tmp_path / "absent") == []


def test_a_resume_removes_what_a_killed_save_has_left_too_many(tmp_path):
    _, two, three, four = save_steps(tmp_path, 1, 2, 3, 4, keep_last=4)
    remove_surplus(tmp_path, tmp_path / "elsewhere" / "step_1", keep_last=1)
    assert len(names(tmp_path)) == 4
    (tmp_path / "checkpoints" / "step_0").mkdir()
    remove_surplus(tmp_path, three, keep_last=2)
    assert list_checkpoints(tmp_path) == [four, three, two]
    assert len(names(tmp_path)) == 3


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path, monkeypatch):
    """At an epoch's end after a signal. A kill between the two renames leaves the first one under its other name."""
    model, optimizer = train(0, 1)
    folder = save_checkpoint(tmp_path, 5, model, optimizer, {"step": 5, "epoch": 0})

    def rename(path, target):
        if path.name.endswith(".partial"):
            raise KeyboardInterrupt
        os.rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 5, model, optimizer, {"step": 5, "epoch": 1})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_5.replaced"]
    assert read_state(latest_valid(list_checkpoints(tmp_path), ONE_PROCESS)[0])["epoch"] == 0
    save_checkpoint(tmp_path, 5, model, optimizer, {"step": 5, "epoch": 1})
    assert names(tmp_path) == ["step_5"]
    assert read_state(folder)["epoch"] == 1


def test_archive_newer_hides_later_checkpoints(tmp_path):
    first, *_ = save_steps(tmp_path, 1, 2, 3, keep_last=3)
    archive_newer(tmp_path, first)
    assert list_checkpoints(tmp_path) == [first]
    save_steps(tmp_path, 2, keep_last=3)
    assert names(tmp_path) == ["step_1", "step_2"]


def test_only_folders_that_saves_have_made_are_removed(tmp_path):
    [other] = save_steps(tmp_path / "other", 7)
    save_steps(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    (folder / "step_9").symlink_to(other)
    shutil.copytree(folder / "step_2", folder / "keep_step_2")
    (folder / ".DS_Store").touch()
    (folder / "step_8").touch()
    (folder / "step_1.left").mkdir()
    (folder / "step_1.partial").mkdir()
    kept = [".DS_Store", "keep_step_2", "step_8", "step_9"]
    [last] = save_steps(tmp_path, 3)
    assert names(tmp_path) == sorted([*kept, "step_3"])
    assert list_checkpoints(tmp_path) == [last]
    assert latest_valid([other, folder / "keep_step_2"], ONE_PROCESS) == (other, [])


def test_a_second_resume_from_the_same_step_archives_again(tmp_path):
    for _ in range(2):
        first, *_ = save_steps(tmp_path, 1, 2, keep_last=2)
        (tmp_path / "checkpoints" / "step_2.left").mkdir(exist_ok=True)
        archive_newer(tmp_path, first)
        assert list_checkpoints(tmp_path) == [first]


def test_any_changed_byte_is_found_before_unpickling(tmp_path, monkeypatch):
    (folder,) = save_steps(tmp_path, 1)
    for function in ("pickle.load", "torch.load"):
        monkeypatch.setattr(function, lambda *_, **__: pytest.fail("unpickled"))
    files = sorted(folder.iterdir())
    assert {file.name for file in files} == {".metadata", "__0_0.distcp", "manifest.json", "rng_0.json", "state.json"}
    random.seed(0)
    for file in files:
        content = file.read_bytes()
        for position in {0, len(content) - 1, *random.sample(range(len(content)), 20)}:
            changed = bytearray(content)
            changed[position] ^= 1 << random.randrange(8)
            file.write_bytes(changed)
            result, (message,) = latest_valid([folder], ONE_PROCESS)
            assert result is None
            assert file.name in message
        file.write_bytes(content[:-1])
        assert latest_valid([folder], ONE_PROCESS)[0] is None
        file.unlink()
        assert latest_valid([folder], ONE_PROCESS)[0] is None
        file.write_bytes(content)
    assert latest_valid([folder], ONE_PROCESS) == (folder, [])


def test_latest_valid_skips_a_damaged_checkpoint(tmp_path):
    first, second = save_steps(tmp_path, 1, 2, keep_last=2)
    (second / "state.json").write_text("{}")
    result, (message,) = latest_valid(list_checkpoints(tmp_path), ONE_PROCESS)
    assert result == first
    assert "step_2 is damaged (state.json has 2 bytes instead of" in message


def test_find_resume_candidates_for_every_value(tmp_path):
    assert find_resume_candidates(tmp_path, False) == find_resume_candidates(tmp_path, "auto") == []
    with pytest.raises(UserError, match="holds no checkpoint"):
        find_resume_candidates(tmp_path, True)
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        find_resume_candidates(tmp_path, str(tmp_path / "checkpoints" / "step_1"))
    (folder,) = save_steps(tmp_path, 1)
    for resume in (True, "auto", str(folder)):
        assert find_resume_candidates(tmp_path, resume) == [folder]


def test_random_states_are_restored(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1), torch.randn(1)

    draw()
    folder = save_checkpoint(tmp_path, 1, *train(0, 1), {"seed": 0, "step": 1})
    expected = draw()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    load_rng_state(folder, read_state(folder), ONE_PROCESS)
    assert draw() == expected
    load_rng_state(folder, {**read_state(folder), "world_size": 2}, ONE_PROCESS)
    reseeded = draw()
    load_rng_state(folder, {**read_state(folder), "world_size": 2}, ONE_PROCESS)
    assert draw() == reseeded != expected


def test_async_save_keeps_the_weights_of_its_step(tmp_path, monkeypatch, caplog):
    model, optimizer = train(0, 2)
    may_write, write = threading.Event(), dcp.save
    monkeypatch.setattr(dcp, "save", lambda *args, **kwargs: (may_write.wait(60), write(*args, **kwargs)))
    caplog.set_level("INFO")
    writer = CheckpointWriter(tmp_path, ONE_PROCESS, asynchronous=True)
    assert writer.save(2, model, [optimizer], {"step": 2})
    expected, moments = copy.deepcopy(model), copy.deepcopy(list(optimizer.state.values()))
    update(model, optimizer)
    writer.poll()
    assert list_checkpoints(tmp_path) == []
    assert caplog.records == []
    may_write.set()
    assert writer.finish()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    other, other_optimizer = train(1, 0)
    load_tensors(list_checkpoints(tmp_path)[0], other, [other_optimizer], ONE_PROCESS)
    assert_equal_weights(expected, other)
    for one, two in zip(moments, other_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_saving_thread_is_on_its_ranks_gpu(tmp_path, monkeypatch):
    """A new thread's is the first one."""
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    CheckpointWriter(tmp_path, Parallel(torch.device("cuda", 3)), asynchronous=True)._write(1, {}, "", "")
    assert devices == [torch.device("cuda", 3)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [1000, 3000, 20000])
def test_full_disk_keeps_last_checkpoint_and_next_save_retries(tmp_path, asynchronous, limit, caplog):
    torch.manual_seed(0)
    model = nn.Linear(60, 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = CheckpointWriter(tmp_path, ONE_PROCESS, asynchronous=asynchronous)
    assert writer.save(1, model, [optimizer], {"step": 1}, wait=True)
    with disk_of_files_below(limit):
        is_saved = writer.save(2, model, [optimizer], {"step": 2}) and writer.finish()
    assert not is_saved
    assert "the state of step 2 could not be saved (" in caplog.messages[-1]
    assert "step_1 stays" in caplog.messages[-1]
    assert names(tmp_path) == ["step_1"]
    assert latest_valid(list_checkpoints(tmp_path), ONE_PROCESS)[1] == []
    assert writer.save(3, model, [optimizer], {"step": 3}, wait=True)
    assert names(tmp_path) == ["step_3"]


def test_check_identity_refuses_another_run(tmp_path):
    check_identity({"format": 1, "identity": {"seed": 1, "shuffle": True}}, {"seed": 1}, tmp_path)
    with pytest.raises(UserError, match="belongs to a run with seed=1, this config says 2"):
        check_identity({"format": 1, "identity": {"seed": 1}}, {"seed": 2}, tmp_path)
    with pytest.raises(UserError, match="was written by another version of finch"):
        check_identity({"identity": {"seed": 1}}, {"seed": 1}, tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_save_before_the_first_update_changes_nothing(kind, tmp_path):
    """torch creates the optimizer's state by a step."""
    saved, unsaved, loaded = (nn.Linear(3, 2) for _ in range(3))
    unsaved.load_state_dict(saved.state_dict())
    options = {"lr": 0.1} if kind is torch.optim.AdamW else {"lr": 0.1, "momentum": 0.9}
    optimizers = [kind(each.parameters(), **options) for each in (saved, unsaved, loaded)]
    folder = save_checkpoint(tmp_path, 0, saved, optimizers[0], {"step": 0})
    load_tensors(folder, loaded, [optimizers[2]], ONE_PROCESS)
    for _ in range(3):
        for model, optimizer in zip((saved, unsaved, loaded), optimizers, strict=True):
            update(model, optimizer)
    assert_equal_weights(saved, unsaved)
    assert_equal_weights(loaded, unsaved)
