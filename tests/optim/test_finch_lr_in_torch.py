"""FinchLR next to torch's own schedulers: its attributes, its state, and the mistakes that it names."""

import copy
import math
import re
import warnings

import accelerate
import pytest
import torch
from helpers.ranks import on_ranks
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, SequentialLR

from finch import FinchLR


def sgd(lr=1e-3, factor=2.0):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in (lr, factor * lr)]
    return torch.optim.SGD(groups)


@pytest.fixture
def optimizer():
    return sgd()


@pytest.fixture
def schedule(optimizer):
    return FinchLR(optimizer, eta_max=1.0)


def test_attributes_are_those_of_torchs_schedulers(optimizer, schedule):
    assert schedule.optimizer is optimizer
    assert schedule.base_lrs == LinearLR(sgd()).base_lrs
    assert schedule.last_epoch == 0
    for _ in range(3):
        schedule.step(4.0)
    assert schedule.last_epoch == 3
    assert repr(schedule) == (
        "FinchLR(eta_base=0.001, eta_max=1, ema=0.9, eps=1e-08, warmup_steps=0, last_epoch=3, lr=0.0005)"
    )
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


def test_average_starts_with_the_first_loss_by_default(schedule):
    assert schedule.ema_loss is None
    schedule.step(4.0)
    assert schedule.ema_loss == 4.0


@pytest.mark.parametrize("on_device", [False, True])
def test_warmup_takes_a_share_of_the_rate(on_device):
    losses = [4.0, 3.0, 2.0, 1.0]
    weight = torch.nn.Parameter(torch.ones(2))
    options = {"lr": torch.tensor(1e-3), "fused": True} if on_device else {"lr": 1e-3}
    plain, warm = (torch.optim.AdamW([weight], **copy.deepcopy(options)) for _ in range(2))
    plain, warm = FinchLR(plain, eta_max=1.0), FinchLR(warm, eta_max=1.0, warmup_steps=3)
    for number, loss in enumerate(losses, start=1):
        for schedule in (plain, warm):
            schedule.step(torch.tensor(loss))
        assert warm.get_last_lr()[0] == pytest.approx(min(number / 3, 1) * plain.get_last_lr()[0], rel=1e-6)
    assert warm.is_on_device == on_device


def test_changed_hyper_parameter_is_a_warning_and_stays(optimizer, schedule):
    schedule.step(4.0)
    state = schedule.state_dict()
    resumed = FinchLR(sgd(), eta_max=1.0, eta_base=2e-3, ema=0.8)
    with pytest.warns(UserWarning, match=re.escape("eta_base=0.002 in place of 0.001, ema=0.8 in place of 0.9")):
        resumed.load_state_dict(state)
    assert (resumed.eta_base, resumed.ema_loss, resumed.get_last_lr()[0]) == (2e-3, 4.0, pytest.approx(1e-3))
    old = {name: state[name] for name in ("ema_loss", "num_steps", "nonfinite", "nonfinite_in_a_row")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FinchLR(sgd(), eta_max=1.0).load_state_dict(state)
        FinchLR(sgd(), eta_max=0.5).load_state_dict(old)  # of a version that did not keep them


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda s: s.step(3), TypeError, "FinchLR.step(3): it takes the loss of the step in nats"),
        (lambda s: s.step(torch.ones(4)), ValueError, "the loss has the shape [4]; pass one number"),
        (lambda s: s.step(), TypeError, "FinchLR(optimizer, warmup_steps=100) warms up by itself"),
        (lambda s: FinchLR(torch.optim.AdamW), TypeError, "optimizer=AdamW is a class; pass AdamW(model.parameters()"),
        (lambda s: FinchLR(sgd(), warmup_steps=0.1), ValueError, "warmup_steps=0.1 must be a number of updates"),
        (
            lambda s: SequentialLR(s.optimizer, [LinearLR(s.optimizer), s], milestones=[3]),
            TypeError,
            "FinchLR cannot be a part of torch's SequentialLR and ChainedScheduler, which step without a loss",
        ),
        (lambda s: ChainedScheduler([s]).step(), TypeError, "FinchLR.step() needs the loss of the step"),
    ],
)  # fmt: skip
def test_mistakes_are_named(schedule, mistake, error, message):
    with pytest.raises(error, match=re.escape(message)):
        mistake(schedule)


def test_torchs_warm_up_before_it_keeps_its_base_rate():
    optimizer = sgd()
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=4)
    for _ in range(2):
        optimizer.step()
        warm_up.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = FinchLR(optimizer, eta_max=1.0)
        for _ in range(3):
            schedule.step(4.0)
            optimizer.step()
    assert schedule.get_last_lr() == [1e-3 / math.sqrt(4.0 + 1e-8), 2 * (1e-3 / math.sqrt(4.0 + 1e-8))]


def run(schedule, optimizer, order):
    """S: the schedule's step, O: the optimizer's. Returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for letter in order:
            schedule.step(1.0) if letter == "S" else optimizer.step()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("SOSOSOSO", None),
        ("OSOSOSOS", "optimizer.step() has come before FinchLR.step(loss)"),
        ("SSOSSOSSOSSOSSO", "FinchLR.step(loss) is called 2 times for each optimizer.step()"),
        ("SSSSOSOSSOSOSO", None),  # GradScaler has left out updates
        ("OOOSOSO", None),  # another schedule has come first
    ],
)
def test_order_of_steps_is_watched(optimizer, schedule, order, expected):
    caught = run(schedule, optimizer, order)
    assert len(caught) == (expected is not None)
    assert all(text.startswith(expected) for text in caught)
    copied = copy.deepcopy(optimizer)  # a copy is not watched, and can be stepped
    assert run(schedule, copied, "OOOO") == []


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("SOSOSOSO", None),
        ("SoooOSoooOSoooOSoooO", None),
        ("SoSOSoSOSoSO", "FinchLR.step(loss) is called 2 times for each optimizer.step()"),
        ("OSOSOSOS", "optimizer.step() has come before FinchLR.step(loss)"),
    ],
)
def test_order_of_steps_is_watched_under_accelerate(optimizer, order, expected):
    """o: a step that Accelerate's wrapper passes over, of a micro-batch that is not the last."""
    wrapper = accelerate.Accelerator(cpu=True).prepare(optimizer)
    schedule, caught = FinchLR(wrapper, eta_max=1.0), []
    for letter in order:
        wrapper.gradient_state._set_sync_gradients(letter != "o")
        caught += run(schedule, wrapper, letter.upper())
    assert len(caught) == (expected is not None)
    assert all(text.startswith(expected) for text in caught)


def test_loss_that_is_a_dtensor_counts_whole(tmp_path):
    """A partial one holds another value on each rank."""
    code = """
        from finch import FinchLR
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate
        mesh, told = init_device_mesh("cpu", (2,)), []
        for fused in (False, True):
            for placement in (Partial("avg"), Replicate()):
                own = 2.0 * mesh.get_rank() + 3.0 if placement.is_partial() else 4.0
                lr = torch.tensor(1e-3) if fused else 1e-3
                schedule = FinchLR(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr, fused=fused), eta_max=1.0)
                count = DTensor.from_local(torch.tensor(mesh.get_rank()), mesh, [Partial("sum")])
                assert schedule.step(DTensor.from_local(torch.tensor(own), mesh, [placement]), count)
                told.append(schedule.get_last_lr()[0])
        tell(told)
    """
    assert on_ranks(2, code, tmp_path) == [[pytest.approx(5e-4, rel=1e-6)] * 4] * 2


def test_scaled_loss_is_one_warning(schedule):
    with pytest.warns(UserWarning, match="pass the loss before GradScaler.scale"):
        schedule.step(2.5 * 65536)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step(2.5 * 65536)


def test_compiled_optimizer_step_has_no_graph_break():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(1e-3))
    schedule = FinchLR(optimizer, eta_max=1.0)
    weight.grad = torch.ones(2)
    explained = torch._dynamo.explain(optimizer.step)()
    assert explained.graph_break_count == 0, explained.break_reasons
    schedule.step(torch.tensor(4.0))
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(5e-4)
