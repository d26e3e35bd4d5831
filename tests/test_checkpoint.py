"""Whole or absent, the last one kept, and only for the run it came from."""

import pytest
import torch
from torch import nn

from finch import FinchLR
from finch.checkpoint import check_identity, latest_checkpoint, load_tensors, read_state, save_checkpoint
from finch.errors import UserError
from finch.parallel import Parallel

ALONE = Parallel(torch.device("cpu"))


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
    save_checkpoint(tmp_path, 3, model, optimizer, {"step": 3}, ALONE)
    other, other_optimizer = trained(1, 0)
    load_tensors(latest_checkpoint(tmp_path), other, other_optimizer, ALONE)
    assert read_state(latest_checkpoint(tmp_path)) == {"step": 3}
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
    save_checkpoint(tmp_path, 2, model, optimizer, {"schedule": schedule.state_dict()}, ALONE)
    other, other_optimizer, other_schedule = with_schedule(1, 0)
    load_tensors(latest_checkpoint(tmp_path), other, other_optimizer, ALONE)
    other_schedule.load_state_dict(read_state(latest_checkpoint(tmp_path))["schedule"])
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
    save_checkpoint(tmp_path, 2, model, optimizer, {}, ALONE)
    other, other_optimizer = optimizer_of(after, 1, 0, 0.5)
    load_tensors(latest_checkpoint(tmp_path), other, other_optimizer, ALONE)
    (group,) = other_optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor) == (after == "tensor")
    assert group["weight_decay"] == 0.5
    assert float(other_optimizer.state[next(other.parameters())]["step"]) == 2


def test_a_checkpoint_with_a_missing_file_is_named(tmp_path):
    model, optimizer = trained(0, 1)
    folder = save_checkpoint(tmp_path, 1, model, optimizer, {}, ALONE)
    for file in folder.glob("*.distcp"):
        file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_tensors(folder, model, optimizer, ALONE)


def test_the_last_one_is_kept_and_a_torn_one_does_not_count(tmp_path):
    model, optimizer = trained(0, 1)
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, model, optimizer, {"step": step}, ALONE)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_10"]
    (tmp_path / "checkpoints" / "step_11.partial").mkdir()
    (tmp_path / "checkpoints" / "step_12").mkdir()
    assert latest_checkpoint(tmp_path).name == "step_10"
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_another_runs_checkpoint_is_refused(tmp_path):
    check_identity({"identity": {"seed": 1, "shuffle": True}}, {"seed": 1}, tmp_path)
    with pytest.raises(UserError, match="belongs to a run with seed=1, this config says 2"):
        check_identity({"identity": {"seed": 1}}, {"seed": 2}, tmp_path)
