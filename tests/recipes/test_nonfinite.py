"""A loss or gradient that is not finite ends the run, or with on_nonfinite: skip leaves the weights as they are; through the recipe."""

import functools
import itertools
import re

import pytest
import torch
from helpers.runs import COSINE, before_steps, finished, run_here, spoil

IN_BACKWARD = {"optimizer_in_bwd": True, "clip_grad_norm": None}


@pytest.fixture
def config(tiny):
    """11 steps."""
    return functools.partial(tiny, on_nonfinite="skip")


@pytest.mark.parametrize(
    ("spoiled", "changes"),
    [("losses", {}), ("losses", IN_BACKWARD), ("gradients", {})],
    ids=["loss", "bwd", "gradient"],
)
def test_nonfinite_number_is_skipped(spoiled, changes, config, tmp_path, monkeypatch):
    """With the optimizer in the backward, the backward does not run. The update of a gradient would make all weights nonfinite."""
    seen = []
    before_steps(
        monkeypatch, lambda recipe: seen.append([weight.detach().clone() for weight in recipe.model.parameters()])
    )
    spoil(monkeypatch, **{spoiled: [5]})
    run = finished(tmp_path, config(**changes))
    same = [all(map(torch.equal, *pair)) for pair in itertools.pairwise(seen)]
    assert same[3:6] == [False, True, False]
    what = {"losses": "loss", "gradients": "gradient"}[spoiled]
    assert re.search(rf"updates skipped up to step [5-9], since the {what} was not finite: 1\n", run.output)
    said = f"updates that were skipped, since the {what} was not finite: 1\n"
    assert said in run.output
    assert [loss is None for loss in run.column("loss")] == [step == 5 and spoiled == "losses" for step in range(1, 12)]
    if spoiled == "losses":
        losses, averages = run.column("loss"), run.column("ema_loss")
        assert averages[4] == averages[3]  # the EMA waits as well
        assert averages[5] == pytest.approx(0.9 * averages[3] + 0.1 * losses[5], rel=1e-12)
    else:
        assert run.column("grad_norm")[4] is None
    # In the steps of a later start nothing is spoiled.
    assert said in finished(tmp_path, config(**changes), "resume_from_checkpoint=True", "epochs=2").output


def test_schedules_by_step_continue_after_a_skipped_step(config, trained, tmp_path, monkeypatch):
    finite = trained(config(lr_scheduler=COSINE))
    spoil(monkeypatch, losses=[8])
    run = finished(tmp_path, config(lr_scheduler=COSINE))
    assert run.column("lr") == finite.column("lr")
    assert run.column("loss")[:7] == finite.column("loss")[:7]
    assert run.column("loss")[8] != finite.column("loss")[8]


@pytest.mark.parametrize("spoiled", ["losses", "gradients"])
def test_nonfinite_number_ends_the_run(spoiled, config, tmp_path, monkeypatch):
    spoil(monkeypatch, **{spoiled: [5]})
    run = run_here(tmp_path, config(), "on_nonfinite=raise", "log_every_n_steps=50")
    assert run.returncode == 1
    what = {"losses": "loss", "gradients": "gradient"}[spoiled]
    assert f"the {what} was not finite at a step after step 4" in run.error()
    assert len(run.metrics()) >= 4  # the steps before are written, though fewer than fifty


def test_losses_and_gradients_that_are_skipped_are_told_apart(config, tmp_path, monkeypatch):
    """The gradient of a loss that is not finite is not finite either, which the loss explains."""
    spoil(monkeypatch, losses=[3, 4], gradients=[6])
    run = finished(tmp_path, config())
    for what, number in (("loss", 2), ("gradient", 1)):
        assert f"updates that were skipped, since the {what} was not finite: {number}\n" in run.output
    spoil(monkeypatch, losses=[3, 4])  # and the gradient of step 6 still
    config = config(output_dir=str(tmp_path / "other"))
    config["lr_scheduler"]["max_nonfinite"] = 2
    assert "the loss was not finite 2 times in a row after step 2" in run_here(tmp_path, config).error()


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
