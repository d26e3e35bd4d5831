"""FinchLR against the equation in float64; param groups, tensor learning rates, state, non-finite losses."""

import itertools
import math
import warnings

import numpy
import pytest
import torch
from helpers.step_cost import HostReads

from finch import FinchLR

LOSSES = [3.9, 3.1, 4.4, 0.7, 1.2, 0.05, 0.02, 2.2]


def optimizer_with(*rates, kind=torch.optim.AdamW, **kwargs):
    return kind([{"params": [torch.nn.Parameter(torch.ones(3))], "lr": rate} for rate in rates], **kwargs)


def fused_with_tensor(*rates):
    return optimizer_with(*(torch.tensor(rate, dtype=torch.float64) for rate in rates), fused=True)


def reference(losses, eta_base, eta_max, ema, init, eps=1e-8):
    """Section 3.3 in plain floats; yields (Lbar_i, eta_i)."""
    average = init
    for loss in losses:
        average = loss if average is None else ema * average + (1 - ema) * loss
        yield average, min(eta_base / math.sqrt(average + eps), eta_max)


@pytest.mark.parametrize("init", [3.6, "first_batch"])
@pytest.mark.parametrize("ema", [0.9, 0.0, 0.5])
@pytest.mark.parametrize("make", [optimizer_with, fused_with_tensor], ids=["host", "tensor"])
def test_finch_lr_equals_the_papers_equation(make, ema, init):
    optimizer = make(2e-5)
    (group,) = optimizer.param_groups
    tensor = group["lr"]  # which is written in place
    schedule = FinchLR(optimizer, eta_max=5e-5, ema=ema, init=init)
    expected = reference(LOSSES, 2e-5, 5e-5, ema, None if init == "first_batch" else init)
    if init != "first_batch":  # before any step: the rate of init
        assert group["lr"] == pytest.approx(2e-5 / math.sqrt(init + 1e-8), rel=1e-14)
    capped = set()
    for loss, (average, eta) in zip(LOSSES, expected, strict=True):
        assert schedule.step(torch.tensor(loss, dtype=torch.float64))
        assert schedule.ema_loss == pytest.approx(average, rel=1e-14)
        assert schedule.get_last_lr() == [pytest.approx(eta, rel=1e-14)]
        assert float(group["lr"]) == schedule.get_last_lr()[0]
        assert group["lr"] is tensor or make is optimizer_with
        assert bool(schedule.metrics()["lr_is_capped"]) == (eta == 5e-5)
        capped.add(eta == 5e-5)
    assert len(capped) == 2 or ema > 0


@pytest.mark.parametrize("eta_base", [None, 0.03])
def test_finch_lr_keeps_the_groups_ratio_under_the_cap(eta_base):
    """The cap is the first group's: another one's rate may lie above it. eta_base overrides the first group's rate."""
    first, second = optimizer_with(1e-3, 1e-2), optimizer_with(5e-4)
    schedule = FinchLR([first, second], eta_base=eta_base, eta_max=0.05, init=1.5, ema=0.0)
    for loss in (1.0, 1e-4):
        schedule.step(loss)
        eta = min((eta_base or 1e-3) / math.sqrt(loss + 1e-8), 0.05)
        assert schedule.get_last_lr() == pytest.approx([eta, 10 * eta, eta / 2])
        assert [group["lr"] for group in first.param_groups] == schedule.get_last_lr()[:2]
    assert first.param_groups[1]["lr"] == pytest.approx(0.5)


@pytest.mark.parametrize("make", [optimizer_with, fused_with_tensor], ids=["host", "tensor"])
@pytest.mark.parametrize("loads_optimizer", [False, True])
@pytest.mark.parametrize("init", [4.0, "first_batch"])
def test_finch_lr_resumes_bit_for_bit(make, loads_optimizer, init):
    """Its base rates are the config's, not the rates in the optimizer's state."""
    optimizers = make(1e-3), make(1e-3)
    straight = FinchLR(optimizers[0], eta_max=1.0, init=init)
    for loss in LOSSES[:4]:
        straight.step(torch.tensor(loss))
    resumed = FinchLR(optimizers[1], eta_max=1.0, init="first_batch")
    if loads_optimizer:
        assert optimizers[0].state_dict()["param_groups"][0]["lr"] != 1e-3
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    resumed.load_state_dict(straight.state_dict())
    rates = [float(optimizer.param_groups[0]["lr"]) for optimizer in optimizers]
    assert rates[1] == (rates[0] if make is optimizer_with else pytest.approx(rates[0], rel=1e-15))
    for loss in LOSSES[4:]:
        straight.step(torch.tensor(loss))
        resumed.step(torch.tensor(loss))
        assert resumed.get_last_lr() == straight.get_last_lr()
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("make", [optimizer_with, fused_with_tensor], ids=["host", "tensor"])
@pytest.mark.parametrize("decay", [0.33, 0.9])
def test_finch_lr_decay_is_a_factor_and_resumes(make, decay):
    """Of the last 8 x decay steps the k-th from the end has k / (8 x decay) of FINCH's rate; a step after the last has 0."""
    total, rates, optimizer = len(LOSSES), [], make(2e-5, 1e-5)
    schedule = FinchLR(optimizer, eta_max=5e-5, init=3.6, decay=decay, total_steps=total)
    for step, loss in enumerate([*LOSSES, 1.0]):
        if step == total - 2:
            state, optimizer = schedule.state_dict(), make(2e-5, 1e-5)
            schedule = FinchLR(optimizer, eta_max=5e-5, init="first_batch", decay=decay, total_steps=total)
            schedule.load_state_dict(state)
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(rates[-1], rel=1e-14)
        schedule.step(torch.tensor(loss, dtype=torch.float64))
        rates.append(float(optimizer.param_groups[0]["lr"]))
        assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(rates[-1] / 2, rel=1e-14)
    plain = [eta for _, eta in reference(LOSSES, 2e-5, 5e-5, 0.9, 3.6)]
    factors = [min(1.0, (total - step) / (decay * total)) for step in range(total)]
    assert 0 < factors[-1] < 1 == factors[0]
    assert rates == pytest.approx([*(a * b for a, b in zip(plain, factors, strict=True)), 0.0], rel=1e-14, abs=0)


@pytest.mark.parametrize("make", [optimizer_with, fused_with_tensor], ids=["host", "tensor"])
def test_finch_lr_decay_counts_steps_without_an_update(make):
    """Their objective kept no token; the run ends as soon."""
    rates = []
    for targets in ([1, 1, 1, 1], [1, 0, 0, 1]):
        optimizer = make(2e-5)
        schedule = FinchLR(optimizer, eta_max=1.0, init=1.0, decay=0.5, total_steps=4)
        for number in targets:
            schedule.step(torch.tensor(1.0, dtype=torch.float64), torch.tensor(number))
        rates.append(float(optimizer.param_groups[0]["lr"]))
        state = schedule.state_dict()
        assert (state["num_steps"], state["num_calls"]) == (sum(targets), 4)
    assert rates[0] == rates[1] == pytest.approx(1e-5, rel=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_finch_lr_raise_leaves_the_state_unchanged(bad):
    optimizer = optimizer_with(1e-3)
    schedule = FinchLR(optimizer, eta_max=1.0, init=2.0)
    schedule.step(1.0)
    before = schedule.ema_loss, optimizer.param_groups[0]["lr"]
    with pytest.raises(FloatingPointError, match="after step 1"):
        schedule.step(bad)
    assert (schedule.ema_loss, optimizer.param_groups[0]["lr"]) == before


def test_finch_lr_skip_raises_after_ten_in_a_row():
    schedule = FinchLR(optimizer_with(1e-3), eta_max=1.0, init=2.0, on_nonfinite="skip")
    for _ in range(9):
        assert schedule.step(math.nan) is False
    assert schedule.step(1.0) is True
    assert schedule.state_dict()["nonfinite"] == 9
    assert schedule.state_dict()["nonfinite_in_a_row"] == 0
    for _ in range(9):
        schedule.step(math.inf)
    with pytest.raises(FloatingPointError, match="10 times in a row"):
        schedule.step(math.nan)
    assert schedule._ema_loss == pytest.approx(0.9 * 2.0 + 0.1 * 1.0)


def test_finch_lr_on_device_skips_then_raises_at_a_read():
    optimizer = fused_with_tensor(1e-3)
    (group,) = optimizer.param_groups
    (parameter,) = group["params"]
    schedule = FinchLR(optimizer, eta_max=1.0, init=2.0)

    def update(loss):
        """Everything that the step changes."""
        parameter.grad = torch.full_like(parameter, float(loss))
        assert schedule.step(loss) is True
        optimizer.step()
        state = optimizer.state[parameter]
        values = (parameter.detach(), state["exp_avg"], state["step"], schedule._ema_loss, group["lr"])
        return [torch.as_tensor(value).tolist() for value in values]

    before = update(torch.tensor(1.0))
    assert update(torch.tensor(math.nan)) == before
    assert update(1.0)[0] != before[0]  # a float after a NaN tensor takes a step as well
    with pytest.raises(FloatingPointError, match="not finite at a step"):
        schedule.get_last_lr()


@pytest.mark.parametrize("unscales", [True, False])
def test_finch_lr_on_device_skips_under_grad_scaler(unscales):
    """Which puts its own found_inf in the place of FINCH's. The reference is an unfused optimizer, which the loop leaves out."""
    steps = [(1.0, 3, 1.0), (math.nan, 3, 1.0), (2.0, 3, 1.0), (2.0, 0, 1.0), (2.0, 3, math.inf), (0.5, 3, -1.0)]
    taken = []
    for make in (optimizer_with, fused_with_tensor):
        optimizer, scaler, weights = make(0.1), torch.amp.GradScaler("cpu"), []
        (parameter,) = optimizer.param_groups[0]["params"]
        schedule = FinchLR(optimizer, eta_max=1.0, init=2.0, on_nonfinite="skip")
        for loss, targets, gradient in steps:
            scaler.scale((gradient * parameter).sum()).backward()
            if unscales or make is optimizer_with:
                scaler.unscale_(optimizer)
            if schedule.step(torch.tensor(loss), torch.tensor(targets)):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            weights.append(parameter[0].item())
        assert schedule.is_on_device is (make is fused_with_tensor)
        assert [one == other for one, other in itertools.pairwise(weights)] == [True, False, True, True, False]
        taken.append(weights)
    assert taken[1] == pytest.approx(taken[0], rel=1e-6)


def test_finch_lr_on_device_counts_a_row_that_has_ended():
    schedule = FinchLR(fused_with_tensor(1e-3), eta_max=1.0, init=2.0, on_nonfinite="skip", max_nonfinite=3)
    for loss in (math.nan, math.nan, 1.0, math.nan):
        schedule.step(torch.tensor(loss))
    schedule.check()
    for loss in (math.nan, math.nan, 1.0):
        schedule.step(torch.tensor(loss))
    with pytest.raises(FloatingPointError, match="3 times in a row"):
        schedule.check()


def test_finch_lr_names_a_group_that_came_later():
    optimizer = optimizer_with(1e-3)
    schedule = FinchLR(optimizer, eta_max=1.0, init=2.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="has 2 param groups, and had 1: build FinchLR after add_param_group"):
        schedule.step(1.0)


@pytest.mark.parametrize("make", [optimizer_with, fused_with_tensor], ids=["host", "tensor"])
def test_finch_lr_batch_without_targets_changes_nothing(make):
    optimizer = make(1e-3)
    (parameter,) = optimizer.param_groups[0]["params"]
    schedule = FinchLR(optimizer, eta_max=1.0, init=2.0)
    assert schedule.step(torch.tensor(1.0), torch.tensor(5))
    before = schedule.state_dict(), schedule.get_last_lr(), parameter.detach().clone()
    takes_step = schedule.step(torch.tensor(math.nan), torch.tensor(0))
    assert takes_step is schedule.is_on_device is (make is fused_with_tensor)
    if takes_step:  # on the device path the optimizer itself skips the update
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert (schedule.state_dict(), schedule.get_last_lr()) == before[:2]
    assert torch.equal(parameter, before[2])
    assert schedule.check() == 0


def test_finch_lr_does_not_read_a_tensor_loss():
    options = {"init": 2.0, "decay": 0.9, "total_steps": 3}
    schedule, reads = FinchLR(fused_with_tensor(1e-3, 1e-4), eta_max=1.0, **options), HostReads()
    with reads:
        reads.is_started = True
        for loss in (torch.tensor(3.0), torch.tensor(math.nan), torch.tensor(2.0)):
            schedule.step(loss, torch.tensor(7))
            schedule.metrics()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_finch_lr_on_cuda_does_not_synchronize():
    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(1e-3, device="cuda"), fused=True)
    schedule = FinchLR(optimizer, eta_max=1.0, init=2.0, decay=0.5, total_steps=3)
    losses = [torch.tensor(value, device="cuda") for value in (3.0, math.nan, 2.0)]
    schedule.step(losses[0])  # moves the state to the device, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss in losses:
            parameter.grad = torch.ones_like(parameter) * loss
            schedule.step(loss)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(parameter.isfinite().all())
    with pytest.raises(FloatingPointError):
        schedule.check()


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("ema", [1.0, -0.1], "must lie in"),
        ("eta_max", [0.0, -1.0, math.nan], "must be above 0"),
        ("eta_max", ["5e-5"], "must be a number"),
        ("eta_base", [0.0], "must be above 0"),
        ("init", [0.0, -3.0, math.inf, "dataset", "first"], ""),
        ("eps", [-1e-8], "must not be negative"),
        ("decay", [1.0, -0.1, math.nan, "0.3"], r"must lie in \[0, 1\)"),
        ("decay", [0.33], "needs the number of the run's steps: total_steps=None is none; give it"),
        ("on_nonfinite", ["ignore"], "must be 'raise' or 'skip'"),
        ("max_nonfinite", [0], "must be at least 1"),
    ],
)
def test_finch_lr_rejects_bad_arguments(key, values, message):
    for value in values:
        with pytest.raises(ValueError, match=f"{key}={value!r}.* {message}"):
            FinchLR(optimizer_with(1e-3), **{"eta_max": 1.0, "init": 2.0, key: value})


@pytest.mark.parametrize("eta_base", [None, 1e-3])
def test_finch_lr_rejects_a_base_rate_of_zero(eta_base):
    with pytest.raises(ValueError, match=r"lr=0\.0 of the first param group must be above 0"):
        FinchLR(optimizer_with(0.0, 1e-3), eta_max=1.0, init=2.0, eta_base=eta_base)


@pytest.mark.parametrize(
    ("eta_base", "eta_max", "init", "limit"),
    [
        (2e-5, 1e-5, "first_batch", "4 nats"),
        (1e-3, 5e-5, 3.6, r"400 nats \(it is 3.6\)"),
        (1e-4, 5e-5, 3.58, r"4 nats \(it is 3.58\)"),
    ],
)
def test_finch_lr_warns_of_a_constant_rate(eta_base, eta_max, init, limit):
    with pytest.warns(
        UserWarning, match=f"FINCH has no effect: .* while the loss is below {limit}; set eta_max='auto'"
    ):
        FinchLR(optimizer_with(eta_base), eta_max=eta_max, init=init)


def test_finch_lr_warns_once_where_the_first_batch_is_at_the_cap():
    schedule = FinchLR(optimizer_with(4e-5), eta_max=5e-5)  # reached below 0.64 nats
    with pytest.warns(UserWarning, match=r"below 0.64 nats \(it is 0.6\)") as caught:
        _ = [schedule.step(loss) for loss in (0.6, 0.5)]
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("loss", [3, True, None, "2.5", torch.tensor(3), numpy.int64(3)])
def test_finch_lr_step_takes_a_loss_only(loss):
    with pytest.raises(TypeError, match=r"it takes the loss of the step in nats, .*, not a number of epochs or steps"):
        FinchLR(optimizer_with(1e-5)).step(loss)


def test_finch_lr_step_takes_floats_of_numpy():
    schedule = FinchLR(optimizer_with(1e-5), init=numpy.float32(2.5))
    assert schedule.step(numpy.float32(2.5))
    assert schedule.ema_loss == 2.5


@pytest.mark.parametrize("optimizer", [None, torch.nn.Linear(1, 1), [torch.zeros(1)]])
def test_finch_lr_takes_optimizers_only(optimizer):
    with pytest.raises(TypeError, match=r"is no optimizer; pass one of torch\.optim, or a list of them"):
        FinchLR(optimizer)


@pytest.mark.parametrize(("eta_base", "eta_max", "init"), [(2e-5, 5e-5, 3.6), (1e-4, 5e-5, 4.1), (1e-3, "auto", 0.2)])
def test_finch_lr_below_its_cap_does_not_warn(eta_base, eta_max, init):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FinchLR(optimizer_with(eta_base), eta_max=eta_max, init=init)


def test_finch_lr_default_cap_is_the_papers_and_auto_scales():
    assert FinchLR(optimizer_with(2e-5), init=3.6).eta_max == 5e-5
    assert FinchLR(optimizer_with(1e-3), eta_max="auto", init=3.6).eta_max == pytest.approx(2.5e-3)
    assert FinchLR(optimizer_with(1e-3), eta_max="auto", eta_base=1e-4, init=3.6).eta_max == pytest.approx(2.5e-4)


@pytest.mark.parametrize("make", [optimizer_with, fused_with_tensor], ids=["host", "tensor"])
def test_finch_lr_twice_on_one_optimizer_starts_alike(make):
    optimizer = make(2e-5, 1e-5)
    first = FinchLR(optimizer, eta_max=5e-5, init=3.6)
    rates = first.get_last_lr()
    first.step(torch.tensor(0.2))
    second = FinchLR(optimizer, eta_max=5e-5, init=3.6)
    assert second.eta_base == pytest.approx(2e-5)
    assert second.get_last_lr() == rates
    scheduled = torch.optim.lr_scheduler.LambdaLR(optimizer_with(2e-5), lambda step: 0.1).optimizer
    assert FinchLR(scheduled, eta_max=5e-5, init=3.6).eta_base == 2e-5  # torch's own convention


def test_finch_lr_without_a_loss_says_what_to_use_instead():
    """transformers' Trainer calls it so."""
    with pytest.raises(TypeError, match=r"Trainer.*finch\.integrations\.transformers\.FinchCallback"):
        FinchLR(optimizer_with(2e-5), init=3.6).step()
