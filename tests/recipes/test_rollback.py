"""on_nonfinite: a nonfinite loss or gradient raises, is skipped, or rolls back to the last checkpoint; through the recipe."""

import json
import math

import pytest
import torch
from helpers.runs import llama_args, make_config, relative_l2, run_broken, run_here, tune_run, weights

from finch.checkpoint import manifest

pytestmark = pytest.mark.slow

COSINE = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 3}
COLUMNS = ("step", "loss", "ema_loss", "lr", "grad_norm")


@pytest.fixture
def recipe(monkeypatch):
    import finch_full_finetune

    return finch_full_finetune.FinchFullFinetune


def make_losses_nan(patch, recipe, *steps):
    losses_of = recipe._losses

    def nan_at_steps(self, batch, scale):
        losses = losses_of(self, batch, scale)
        return [each * math.nan for each in losses] if self.state.step + 1 in steps else losses

    patch.setattr(recipe, "_losses", nan_at_steps)


def lines_of(run, first):
    return [[line[name] for name in COLUMNS] for line in run.metrics() if "loss" in line and line["step"] >= first]


def rollbacks_of(run):
    return [(line["step"], line["rolled_back_to"]) for line in run.metrics() if "rolled_back_to" in line]


@pytest.fixture
def config(base_folder, rows_file, tmp_path):
    """22 steps in two epochs, a checkpoint every 3."""

    def make(name="run", **changes):
        changes = {
            "epochs": 2,
            "checkpoint": {"every_n_steps": 3, "keep_last": 9},
            "on_nonfinite": "rollback",
            **changes,
        }
        return make_config(base_folder, rows_file, tmp_path / name, **changes)

    return make


LORA = {
    "_component_": "torchtune.models.llama2.lora_llama2",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "lora_rank": 4,
    "lora_alpha": 8,
    **llama_args(),
}
CASES = {
    "finch": {},
    "lora": {"model": LORA},
    "in the backward": {"optimizer_in_bwd": True, "clip_grad_norm": None},
    "talr": {"loss": {"_component_": "finch.objectives.TALR", "tau": "lagged"}},
    "stochastic": {"dtype": "bf16_stochastic", "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-3}},
    "8 bit": {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 2e-3}},
}


@pytest.mark.parametrize("case", CASES)
def test_rollback_continues_after_the_batch(case, config, recipe, tmp_path, monkeypatch):
    """Equals a run that was killed after step 6 and resumes with batch 9: its checkpoint is edited."""
    name = "finch_lora_finetune" if case == "lora" else "finch_full_finetune"
    with monkeypatch.context() as patch:
        make_losses_nan(patch, recipe, 8)
        run = run_here(tmp_path / "r", config(**CASES[case]), recipe=name)
    assert run.returncode == 0, run.output[-3000:]
    assert "a loss or gradient was not finite at step 8: back to " in run.output
    assert rollbacks_of(run) == [(8, 6)]
    assert [line["loss"] for line in run.metrics() if line["step"] == 8 and "loss" in line] == [None]

    edited = config("edited", **CASES[case])
    run_broken(tmp_path / "e", edited, monkeypatch, 6, recipe=name)
    folder = tmp_path / "edited" / "checkpoints" / "step_6"
    state = json.loads((folder / "state.json").read_text())
    state.update(step=8, consumed=state["consumed"] + 2 * 4)
    (folder / "state.json").write_text(json.dumps(state))
    entries = manifest.read(folder)
    manifest.write(folder, {**entries, "state.json": manifest.file_entry(folder / "state.json")})
    reference = run_here(tmp_path / "e", edited, "resume_from_checkpoint=True", recipe=name)
    assert len(lines_of(run, 9)) == 14
    if case == "stochastic":  # rounding continues with other random numbers
        assert lines_of(run, 9)[0] == lines_of(reference, 9)[0]
        return
    assert lines_of(run, 9) == lines_of(reference, 9)
    one, other = weights(run.folder / "epoch_1"), weights(reference.folder / "epoch_1")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_resume_after_a_rollback_equals_uninterrupted(config, recipe, tmp_path, monkeypatch):
    make_losses_nan(monkeypatch, recipe, 8)
    run = run_here(tmp_path / "r", config())
    broken = {**config("broken"), "resume_from_checkpoint": "auto"}
    run_broken(tmp_path / "b", broken, monkeypatch, 8)  # the last checkpoint is that of step 6
    resumed = run_here(tmp_path / "b", broken)
    assert "resumed from step 6 of" in resumed.output
    assert rollbacks_of(run) == rollbacks_of(resumed) == [(8, 6)]
    assert lines_of(resumed, 1) == lines_of(run, 1)
    one, other = weights(run.folder / "epoch_1"), weights(resumed.folder / "epoch_1")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rollback_without_checkpoint_restores_pretrained(config, recipe, tmp_path, monkeypatch):
    """Step 1 is undone: as if both steps had been skipped."""
    with monkeypatch.context() as patch:
        make_losses_nan(patch, recipe, 2)
        run = run_here(tmp_path / "r", config())
    assert "not finite at step 2: back to the pretrained model, continuing with the next batch" in run.output
    with monkeypatch.context() as patch:
        make_losses_nan(patch, recipe, 1, 2)
        skipped = run_here(tmp_path / "s", config("skipped", on_nonfinite="skip"))
    assert lines_of(run, 3) == lines_of(skipped, 3)
    assert [line[1] for line in lines_of(skipped, 1)[:2]] == [None, None]


def test_schedules_by_step_continue_after_a_rollback(config, recipe, tmp_path, monkeypatch):
    finite = run_here(tmp_path / "s", config("finite", lr_scheduler=COSINE))
    make_losses_nan(monkeypatch, recipe, 8)
    for action in ("rollback", "skip"):
        run = run_here(tmp_path / "r", config(action, lr_scheduler=COSINE, on_nonfinite=action))
        assert [line[3] for line in lines_of(run, 1)] == finite.column("lr")
        assert lines_of(run, 9)[0][1] != finite.column("loss")[8]
        assert lines_of(run, 1)[:7] == lines_of(finite, 1)[:7]
    replay = {"_component_": "finch.ReplayLR", "log": str(tmp_path / "finite")}
    replayed = run_here(tmp_path / "p", config("replayed", lr_scheduler=replay))
    assert lines_of(replayed, 1) == lines_of(run_here(tmp_path / "q", config("again", lr_scheduler=COSINE)), 1)
    assert rollbacks_of(replayed) == [(8, 6)]


def test_run_gives_up_when_rollbacks_do_not_help(config, recipe, tmp_path, monkeypatch):
    """In consecutive steps: further back each time while there is a checkpoint. With finite steps between: ten times."""
    with monkeypatch.context() as patch:
        make_losses_nan(patch, recipe, 7, 8, 9)
        run = run_here(tmp_path / "r", config())
    assert "a loss or gradient was not finite at step 9, and 2 rollbacks have not helped" in run.error()
    assert rollbacks_of(run) == [(7, 6), (8, 3)]
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step_3", "step_6"]
    with monkeypatch.context() as patch:
        make_losses_nan(patch, recipe, *range(4, 33, 2))
        run = run_here(tmp_path / "r", config("often", epochs=3))
    assert "a loss or gradient was not finite at step 24, and 10 rollbacks have not helped" in run.error()


def test_rollback_skips_a_damaged_checkpoint(config, recipe, tmp_path, monkeypatch):
    losses_of = recipe._losses

    def damage_and_return_nan(self, batch, scale):
        if self.state.step + 1 == 8:
            self._checkpoint_writer.finish()
            for name in damaged:
                (self._run / "checkpoints" / name / "__0_0.distcp").write_bytes(b"?")
            return [each * math.nan for each in losses_of(self, batch, scale)]
        return losses_of(self, batch, scale)

    monkeypatch.setattr(recipe, "_losses", damage_and_return_nan)
    damaged = ["step_6"]
    run = run_here(tmp_path / "r", config())
    assert run.returncode == 0, run.output[-2000:]
    assert rollbacks_of(run) == [(8, 3)]
    assert "step_6 is damaged (__0_0.distcp has 1 bytes" in run.output
    damaged = ["step_6", "step_3"]
    assert "on_nonfinite=rollback: " in run_here(tmp_path / "r", config("all")).error()


def test_nonfinite_gradient_of_a_finite_loss(config, recipe, tmp_path, monkeypatch):
    """Its update would make all weights nonfinite."""
    clip, seen = recipe._clip_gradients, []

    def overflows(self):
        seen.append({name: weight.detach().clone() for name, weight in self._model.named_parameters()})
        if self.state.step + 1 == 5:
            next(self._model.parameters()).grad[0] = math.inf
        return clip(self)

    monkeypatch.setattr(recipe, "_clip_gradients", overflows)
    run = run_here(tmp_path / "r", config(on_nonfinite="skip"))
    assert run.returncode == 0, run.output[-2000:]
    assert all(torch.equal(seen[4][name], seen[5][name]) for name in seen[4])
    assert not all(torch.equal(seen[3][name], seen[4][name]) for name in seen[4])
    line = run.metrics()[4]
    assert (line["step"], line["grad_norm"], math.isfinite(line["loss"])) == (5, None, True)
    error = run_here(tmp_path / "r", config("raises", on_nonfinite="raise")).error()
    assert "the loss was not finite at a step after step 4" in error


def test_losses_on_a_device_are_checked_before_a_save(config, recipe, tmp_path, monkeypatch):
    """They are checked when the device is read; no state is saved before that."""
    import finch_full_finetune

    build = finch_full_finetune.build_optimizers

    def with_tensor_rates(*args, **kwargs):
        optimizers = build(*args, **kwargs)
        for group in optimizers[0].param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))
        return optimizers

    monkeypatch.setattr(finch_full_finetune, "build_optimizers", with_tensor_rates)
    make_losses_nan(monkeypatch, recipe, 5, 13)
    run = run_here(tmp_path / "r", config(log_every_n_steps=100))
    assert run.returncode == 0, run.output[-2000:]
    assert rollbacks_of(run) == [(6, 3), (15, 12)]
    run = run_here(tmp_path / "r", config("often", log_every_n_steps=2))
    assert rollbacks_of(run) == [(6, 3), (14, 12)]


def test_rollback_on_two_ranks_equals_one(config, tmp_path):
    """An update makes weights nonfinite, in a step with a save and at the epoch's end: neither saves them."""
    (tmp_path / "breaking.py").write_text(
        "import torch\n"
        "class AdamW(torch.optim.AdamW):\n"
        "    taken = 0\n"
        "    def step(self, closure=None):\n"
        "        super().step(closure)\n"
        "        self.taken += 1\n"
        "        if self.taken in (6, 11):\n"
        "            for group in self.param_groups:\n"
        "                for weight in group['params']: weight.data.mul_(float('nan'))\n"
    )
    changes = {"optimizer": {"_component_": "breaking.AdamW", "lr": 2e-3}, "epochs": 1}
    one, two = (
        tune_run(tmp_path, config(f"on_{ranks}", batch_size=4 // ranks, **changes), ranks=ranks) for ranks in (1, 2)
    )
    for run in (one, two):
        assert run.returncode == 0, run.output[-3000:]
        assert rollbacks_of(run) == [(6, 3), (11, 9)]
    for line, expected in zip(lines_of(two, 1), lines_of(one, 1), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    assert relative_l2(weights(two.folder / "epoch_0"), weights(one.folder / "epoch_0")) < 1e-5
