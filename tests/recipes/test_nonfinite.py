"""A loss or gradient that is not finite ends the run, or with on_nonfinite: skip leaves the weights as they are; through the recipe."""

import math

import pytest
import torch
from helpers.runs import COSINE, before_steps, make_config, run_here, spoil, weights_now

IN_BACKWARD = {"optimizer_in_bwd": True, "clip_grad_norm": None}


@pytest.fixture
def config(base_folder, rows_file, tmp_path):
    """11 steps."""

    def make(name="run", **changes):
        return make_config(base_folder, rows_file, tmp_path / name, on_nonfinite="skip", **changes)

    return make


def keep_weights(monkeypatch):
    """The weights before each step, by the number of steps done."""
    seen = {}
    before_steps(monkeypatch, lambda recipe: seen.update({recipe.state.step: weights_now(recipe)}))
    return seen


def have_moved(seen, step):
    return any(not torch.equal(seen[step - 1][name], seen[step][name]) for name in seen[step])


@pytest.mark.parametrize("changes", [{}, IN_BACKWARD], ids=["plain", "in the backward"])
def test_nonfinite_loss_is_skipped(changes, config, tmp_path, monkeypatch):
    """With the optimizer in the backward, the backward does not run."""
    seen = keep_weights(monkeypatch)
    spoil(monkeypatch, losses=[5])
    run = run_here(tmp_path, config(**changes))
    assert run.returncode == 0, run.output[-2000:]
    assert [have_moved(seen, step) for step in (4, 5, 6)] == [True, False, True]
    losses, averages = run.column("loss"), run.column("ema_loss")
    assert [loss is None for loss in losses] == [step == 5 for step in range(1, 12)]
    assert averages[4] == averages[3]  # the EMA waits as well
    assert averages[5] == pytest.approx(0.9 * averages[3] + 0.1 * losses[5], rel=1e-12)


def test_nonfinite_gradient_of_a_finite_loss_is_skipped(config, tmp_path, monkeypatch):
    """Its update would make all weights nonfinite."""
    seen = keep_weights(monkeypatch)
    spoil(monkeypatch, gradients=[5])
    run = run_here(tmp_path, config())
    assert run.returncode == 0, run.output[-2000:]
    assert [have_moved(seen, step) for step in (4, 5, 6)] == [True, False, True]
    line = run.metrics()[4]
    assert (line["step"], line["grad_norm"], math.isfinite(line["loss"])) == (5, None, True)


def test_schedules_by_step_continue_after_a_skipped_step(config, trained, tmp_path, monkeypatch):
    finite = trained(config(lr_scheduler=COSINE))
    spoil(monkeypatch, losses=[8])
    run = run_here(tmp_path, config(lr_scheduler=COSINE))
    assert run.column("lr") == finite.column("lr")
    assert run.column("loss")[:7] == finite.column("loss")[:7]
    assert run.column("loss")[8] != finite.column("loss")[8]


@pytest.mark.parametrize("spoiled", ["losses", "gradients"])
def test_nonfinite_number_ends_the_run(spoiled, config, tmp_path, monkeypatch):
    spoil(monkeypatch, **{spoiled: [5]})
    run = run_here(tmp_path, config(), "on_nonfinite=raise", "log_every_n_steps=50")
    assert run.returncode == 1
    assert "the loss was not finite at a step after step 4" in run.error()
    assert len(run.metrics()) >= 4  # the steps before are written, though fewer than fifty


def test_losses_on_a_device_are_checked_before_a_save(config, tmp_path, monkeypatch):
    """They are read with the metrics, which is late here; no state is saved before that."""
    from finch.training import optimizer

    build = optimizer.build_optimizers

    def with_tensor_rates(*args, **kwargs):
        optimizers = build(*args, **kwargs)
        for group in optimizers[0].param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))  # as on a GPU
        return optimizers

    monkeypatch.setattr(optimizer, "build_optimizers", with_tensor_rates)
    spoil(monkeypatch, losses=[5])
    changes = {"on_nonfinite": "raise", "log_every_n_steps": 100, "checkpoint": {"every_n_steps": 3, "keep_last": 9}}
    run = run_here(tmp_path, {**config(), **changes})
    assert "not finite" in run.error()
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_3"]
    assert run.column("step") == [1, 2, 3, 4, 5, 6]
