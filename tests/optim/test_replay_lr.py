"""ReplayLR against the log of a FINCH run."""

import json
import math

import pytest
import torch

from finch import FinchLR, ReplayLR
from finch.training.metrics import MetricsLog

LOSSES = [3.9, 3.1, 4.4, 0.7, 0.05, 0.02]


def optimizer_with(*rates, **kwargs):
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(3))], "lr": rate} for rate in rates], **kwargs)


@pytest.fixture
def run(tmp_path):
    """The folder of a FINCH run: metrics.jsonl with one step without targets, and validation losses."""
    optimizer = optimizer_with(2e-3)
    schedule = FinchLR(optimizer, eta_max=5e-3, init=3.6)
    log = MetricsLog(tmp_path, None, is_writer=True)
    log.open()
    for step, loss in enumerate(LOSSES, start=1):
        schedule.step(loss, 0 if step == 3 else 7)
        log.add(step, {"epoch": 0, "loss": loss, **schedule.metrics(), "num_target_tokens": 7})
        if step % 2 == 0:
            log.write_event({"step": step, "epoch": 0, "validation_loss": loss})
    log.close()
    return tmp_path


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["lr"] for line in lines if "lr" in line]


def test_replay_lr_equals_the_log_at_each_step(run):
    optimizer = optimizer_with(2e-3, 1e-3)
    replay = ReplayLR(optimizer, log=run / "metrics.jsonl")
    assert replay.num_steps == len(LOSSES)
    rates = []
    for step in range(len(LOSSES)):
        assert replay.step(torch.tensor(8.0 / (step + 1)))  # whatever the loss
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert replay.get_last_lr() == [first, second] == [first, pytest.approx(first / 2, rel=1e-15)]
        assert replay.metrics() == {"ema_loss": None, "lr": first, "lr_is_capped": False}
        rates.append(first)
    assert rates == logged(run)  # exactly
    assert len(set(rates)) > 3
    with pytest.raises(ValueError, match="holds 6 steps, the run takes 7"):
        replay.step(1.0)


def test_replay_lr_decays(run):
    replay = ReplayLR(optimizer_with(2e-3), log=run, decay=0.5, total_steps=6)
    rates = [replay.get_last_lr()[0] for _ in range(6) if replay.step(1.0)]
    assert rates == pytest.approx([a * b for a, b in zip(logged(run), [1, 1, 1, 1, 2 / 3, 1 / 3], strict=True)])


def test_replay_lr_writes_tensor_rates_in_place(run):
    rate = torch.tensor(2e-3, dtype=torch.float64)
    first, second = optimizer_with(rate, fused=True), optimizer_with(1e-2)
    replay = ReplayLR([first, second], log=run)
    assert replay.get_last_lr()[0] == rate.item() == logged(run)[0]  # set when built
    for expected in logged(run):
        assert replay.step(1.0)
        assert first.param_groups[0]["lr"] is rate
        assert rate.item() == expected
        assert second.param_groups[0]["lr"] == pytest.approx(5 * expected, rel=1e-15)


def test_replay_lr_counts_a_batch_without_targets(run):
    replay = ReplayLR(optimizer_with(2e-3), log=run)
    assert replay.step(1.0, torch.tensor(5))
    assert not replay.step(math.nan, torch.tensor(0))  # 0 / 0
    assert replay.step(1.0, 5)
    assert replay.step(1.0, 5)
    assert replay.get_last_lr() == [logged(run)[3]] != [logged(run)[2]]


@pytest.mark.parametrize("shape", ["curve", "linear", "mean"])
def test_replay_lr_resumes_at_its_step(run, shape):
    before = ReplayLR(optimizer_with(2e-3), log=run, shape=shape)
    for _ in range(3):
        before.step(1.0)
    state = json.loads(json.dumps(before.state_dict()))
    optimizer = optimizer_with(2e-3)
    after = ReplayLR(optimizer, log=run, shape=shape)
    optimizer.param_groups[0]["lr"] = 9.0  # as loading an optimizer's state does
    after.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == before.get_last_lr()[0]
    for _ in range(3):
        before.step(1.0)
        after.step(1.0)
        assert after.get_last_lr() == before.get_last_lr()
    with pytest.raises(ValueError, match="holds 6 steps, the run takes 8"):
        after.load_state_dict({"steps_taken": 8})


def replayed(run, shape, num_steps=6):
    replay = ReplayLR(optimizer_with(2e-3), log=run, shape=shape)
    rates = []
    for _ in range(num_steps):
        replay.step(1.0)
        rates += replay.get_last_lr()
    return rates


def test_replay_lr_linear_joins_the_ends_of_the_log_and_mean_is_constant(run, tmp_path_factory):
    log = logged(run)
    rates = replayed(run, "linear")
    assert [rates[0], rates[-1]] == [log[0], log[-1]]  # exactly
    assert rates == pytest.approx(torch.linspace(log[0], log[-1], 6, dtype=torch.float64).tolist(), rel=1e-14)
    assert replayed(run, "linear", 3) == rates[:3]  # of the complete log, also in a shorter run
    mean = replayed(run, "mean")
    assert mean == [pytest.approx(sum(log) / 6, rel=1e-14)] * 6
    assert replayed(run, "mean", 3) == mean[:3]
    one = tmp_path_factory.mktemp("one")
    (one / "metrics.jsonl").write_text('{"step": 1, "lr": 0.002}\n')
    assert [replayed(one, shape, 1) for shape in ("curve", "linear", "mean")] == [[0.002]] * 3


def test_replay_lr_ignores_a_truncated_last_line(run):
    file = run / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 7, "lr": 1e-')
    assert ReplayLR(optimizer_with(2e-3), log=run).num_steps == 6


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"step": 1, "validation_loss": 2.0}], "holds no step"),
        ([{"step": 1, "lr": 1e-3}, {"step": 3, "lr": 1e-3}], "has step 3 where step 2 belongs"),
        ([{"step": 1, "loss": 2.0}], "has lr=None at step 1"),
    ],
)
def test_replay_lr_rejects_an_incomplete_log(tmp_path, lines, message):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=message):
        ReplayLR(optimizer_with(2e-3), log=file)


def test_replay_lr_rejects_bad_arguments(run, tmp_path):
    with pytest.raises(ValueError, match=r"other\.jsonl does not exist: give the metrics\.jsonl"):
        ReplayLR(optimizer_with(2e-3), log=tmp_path / "other.jsonl")
    with pytest.raises(ValueError, match=r"lr=0\.0 of the first param group must be above 0"):
        ReplayLR(optimizer_with(0.0), log=run)
    with pytest.raises(ValueError, match="shape='flat' must be one of curve, linear, mean"):
        ReplayLR(optimizer_with(2e-3), log=run, shape="flat")
    with pytest.raises(ValueError, match="holds no param group"):
        ReplayLR([], log=run)
