"""A run that is killed anywhere and resumed equals the uninterrupted run bit for bit; through the recipe, on the CPU."""

import datetime
import json
import os
import shutil

import pytest
from helpers.models import save
from helpers.rows import write_lines
from helpers.runs import (
    COSINE,
    FULL,
    LORA,
    LORA_MODEL,
    assert_same_run,
    before_steps,
    finished,
    mixed,
    run_broken,
    run_here,
)
from helpers.tokenizers import write_qwen3_tokenizer
from omegaconf import OmegaConf

from benchmarks.tiny_text import WORDS
from finch.base import run_files
from finch.models import chat_tokenizer

DROPOUT = {**LORA_MODEL, "lora_dropout": 0.3}  # makes the random states matter
KL = {"_component_": "finch.regularization.KL", "reference": "cached", "top_k": 5}
CASES = {
    "finch": {},
    "cosine, accumulation, workers": {
        "lr_scheduler": COSINE,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_workers": 2,
    },
    "lora, dropout, workers": {"model": DROPOUT, "num_workers": 2},
    "talr lagged": {"loss": {"_component_": "finch.objectives.TALR", "tau": "lagged"}},
    "flow on a mixture, packed": {"loss": {"_component_": "finch.objectives.FLOW"}, "batch_size": 1, "epochs": 4},
    "dft with a cached kl and self-replay": {
        "loss": {"_component_": "finch.objectives.DFT"},
        "kl_penalty": KL,
        "self_replay": {"rows": 5, "max_new_tokens": 8},
    },
    "stm with l2, 8-bit states": {
        "loss": {"_component_": "finch.objectives.STM", "threshold": 40.0},
        "regularizer": {"_component_": "finch.regularization.L2", "strength": 0.1},
        "optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 2e-3, "block_size": 64},
    },
    "constant, decaying": {"lr_scheduler": {"decay": 0.33}},
    "finch, decaying": {"lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 5e-3, "decay": 0.9}},
    "optimizer in the backward": {"optimizer_in_bwd": True, "clip_grad_norm": None},
    "bf16, stochastic rounding": {"dtype": "bf16_stochastic"},
}


@pytest.fixture
def config(tmp_path, tiny):
    def make(name="finch", **changes):
        config = tiny(**{"epochs": 2, **CASES[name], **changes})
        if "mixture" in name:
            config["dataset"]["packed"] = True
            return mixed(config, tmp_path, 0.4)
        return config

    return make


def broken_config(config, folder, **checkpoint):
    return {**config, "output_dir": str(folder), "resume_from_checkpoint": "auto", "checkpoint": checkpoint}


@pytest.mark.parametrize("name", CASES)
def test_resume_within_an_epoch_equals_uninterrupted(name, config, tmp_path, monkeypatch):
    """Killed twice. What the pretrained model said is made again where its file is lost, with its weights."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its optimizer; a test machine may lack a compiler
    recipe = LORA if "lora" in name else FULL
    config = config(name)
    uninterrupted = finished(tmp_path / "uninterrupted", config, recipe=recipe)
    last = uninterrupted.column("step")[-1]
    assert last >= 10
    if "constant" in name:
        factors = [min(1, (last - step) / (0.33 * last)) for step in range(last)]
        assert uninterrupted.column("lr") == pytest.approx([config["optimizer"]["lr"] * each for each in factors])
    broken = broken_config(config, tmp_path / "broken", every_n_steps=3, **{"async": "finch" in name or "lora" in name})
    for stop in (5, last - 2):
        run_broken(tmp_path / "b", broken, monkeypatch, stop, recipe=recipe)
    for file in (run_files.REFERENCE_LOSSES, run_files.REFERENCE_TOP_K, run_files.SELF_REPLAY):
        (tmp_path / "broken" / file).unlink(missing_ok=True)
    resumed = run_here(tmp_path / "b", broken, recipe=recipe)
    steps_per_epoch = last // config["epochs"]  # an epoch ends with a checkpoint
    saved = max(step for step in range(last - 1) if step % 3 == 0 or step % steps_per_epoch == 0)
    assert f"resumed from step {saved} of" in resumed.output
    assert_same_run(resumed, uninterrupted)


def test_resume_at_an_epochs_end_keeps_validation_and_best(config, tmp_path, monkeypatch):
    """Losses that rise in epoch 1 keep epoch 0 the best; the kill after the last step of an epoch comes before its end."""
    config = config(validate_every_n_steps=4, lr_scheduler=None, epochs=3, is_validated=True)
    config["optimizer"]["lr"] = 3e-2
    uninterrupted = finished(tmp_path / "uninterrupted", config)
    broken = broken_config(config, tmp_path / "broken", every_n_steps=2)
    run_broken(tmp_path / "b", broken, monkeypatch, 13)
    run_broken(tmp_path / "b", broken, monkeypatch, "export")  # between the export of an epoch and its checkpoint
    resumed = run_here(tmp_path / "b", broken)
    assert_same_run(resumed, uninterrupted)
    assert (resumed.folder / "best").readlink() == (uninterrupted.folder / "best").readlink()


def test_resume_without_step_checkpoints_repeats_the_epoch(config, trained, tmp_path, monkeypatch):
    config = config(lr_scheduler=COSINE)

    def interrupt(recipe):
        if recipe.state.step == 15:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before_steps(patch, interrupt)
        assert run_here(tmp_path, config).returncode == 130
    resumed = run_here(tmp_path, config, "resume_from_checkpoint=True")
    assert "resumed from step 11" in resumed.output
    assert_same_run(resumed, trained(config))
    again = run_here(tmp_path, config, "resume_from_checkpoint=True")
    assert "nothing to do" in again.output
    assert "written again" not in again.output
    assert len(again.metrics()) == 22


def test_a_finished_run_writes_its_last_epoch_again_where_it_is_not_whole(config, trained, tmp_path):
    config = {**config(), "output_dir": str(tmp_path / "run")}
    shutil.copytree(trained(config).folder, tmp_path / "run", symlinks=True)
    folder = tmp_path / "run" / "epoch_1"
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = folder / "model.safetensors"
    for damage in (
        lambda: shutil.rmtree(folder),
        lambda: os.truncate(weights, len(whole[weights.name]) // 2),
        lambda: weights.write_bytes(bytes(len(whole[weights.name]))),
        lambda: (folder / "config.json").write_text(""),
    ):
        damage()
        again = run_here(tmp_path, config, "resume_from_checkpoint=True")
        assert f"{folder} is not complete: it is written again" in again.output
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_finished_run_that_keeps_its_best_epoch_writes_no_other(config, tmp_path, monkeypatch):
    losses = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr("finch.training.hooks.dataset_loss", lambda *_: next(losses))
    config = config(epochs=2, is_validated=True, save_best_only=True, checkpoint={"every_n_steps": 20})
    run = finished(tmp_path, config)
    again = finished(tmp_path, config, "resume_from_checkpoint=True")
    assert "nothing to do: 2 epochs have ended" in again.output
    assert [path.name for path in run.folder.glob("epoch_*")] == ["epoch_0"]


def test_models_of_steps_that_are_taken_again_are_not_the_runs(config, tmp_path):
    config = config(epochs=2, is_validated=True, checkpoint={"every_n_steps": 4, "keep_last": 9})
    run = finished(tmp_path, config)
    assert (run.folder / "best").readlink().name == "epoch_1"
    step = f"resume_from_checkpoint={run.folder}/checkpoints/step_4"
    back = finished(tmp_path, config, step, "epochs=1")
    assert sorted(path.name for path in back.folder.glob("epoch_*")) == [
        "epoch_0",
        "epoch_0.left",
        "epoch_1.left",
    ]
    assert run_files.chosen_model(back.folder).resolve().name == "epoch_0"


def test_resume_removes_metrics_of_lost_steps(config, trained, tmp_path, monkeypatch):
    """Lines written after the save, of the saved step too, and a line cut off by the kill."""
    config = config()
    broken = broken_config(config, tmp_path / "broken", every_n_steps=5)
    run_broken(tmp_path / "b", broken, monkeypatch, 8, "log_every_n_steps=4")
    assert len((tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()) == 8
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "epoch": 0, "validation_loss": 1.0}) + '\n{"step": 9, "lo')
    assert_same_run(run_here(tmp_path / "b", broken), trained(config))


def test_resume_skips_a_damaged_checkpoint_and_names_it(config, trained, tmp_path, monkeypatch):
    config = config()
    broken = broken_config(config, tmp_path / "broken", every_n_steps=2, keep_last=2)
    run_broken(tmp_path / "b", broken, monkeypatch, 7)
    folder = tmp_path / "broken" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_4", "step_6"]
    shutil.copytree(tmp_path / "broken", tmp_path / "other")
    shard = folder / "step_6" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    error = run_here(tmp_path / "b", broken, f"resume_from_checkpoint={folder / 'step_6'}").error()
    assert "step_6 is damaged (__0_0.distcp is not as it was written)" in error
    resumed = run_here(tmp_path / "b", broken)
    assert "resumed from step 4 of" in resumed.output
    assert "step_6 is damaged (__0_0.distcp is not as it was written) and is not used" in resumed.output
    assert_same_run(resumed, trained(config))

    # An earlier checkpoint by choice, although the last one is valid
    broken["output_dir"] = str(tmp_path / "other")
    back = run_here(tmp_path / "b", broken, f"resume_from_checkpoint={tmp_path}/other/checkpoints/step_4")
    assert "resumed from step 4 of" in back.output
    assert_same_run(back, trained(config))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4)])
def test_resume_on_another_number_of_ranks(before, after, config, trained, tmp_path):
    """The same samples in the same order; losses within 1e-5 over the 13 steps that follow step 9. To one rank: test_layouts.py."""
    config = config()
    uninterrupted = trained(config)
    saved = {**config, "batch_size": 4 // before, "epochs": 1, "checkpoint": {"every_n_steps": 3, "keep_last": 5}}
    finished(tmp_path, saved, ranks=before)
    step_9 = f"resume_from_checkpoint={tmp_path}/run/checkpoints/step_9"
    resumed = finished(tmp_path, {**config, "batch_size": 4 // after}, step_9, ranks=after)
    assert "resumed from step 9 of" in resumed.output
    assert resumed.column("num_target_tokens") == uninterrupted.column("num_target_tokens")
    assert len(resumed.column("loss")) == 22
    assert resumed.column("loss") == pytest.approx(uninterrupted.column("loss"), rel=0, abs=1e-5)


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_a_run_keeps_the_prompts_that_it_replays(tiny, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    replay = {"prompts": str(prompts), "rows": 3, "max_new_tokens": 4, "share": 0.5}
    config = {**tiny(epochs=1, max_steps_per_epoch=3), "self_replay": replay}
    write_lines(prompts, *({"question": f"the {word}"} for word in ("fox", "bird", "sea")))
    run = finished(tmp_path / "a", config)
    write_lines(prompts, *({"question": f"a {word}"} for word in ("fox", "bird", "sea")))
    resumed = {**config, "output_dir": str(run.folder)}, "epochs=2", "resume_from_checkpoint=True"
    assert "belongs to a run with digest of the replayed prompts=" in run_here(tmp_path / "a", *resumed).error()


def test_a_run_keeps_the_rows_that_it_is_validated_on(tiny, tmp_path):
    """Its best epoch would be chosen among losses of different rows; without any the run goes on."""
    config = tiny(epochs=1, max_steps_per_epoch=1)
    config["dataset_validation"] = {**config["dataset"], "split": "train[:7]"}
    run = finished(tmp_path / "a", config)
    assert "dataset_validation: 7 of 7 validation rows are training rows too; dataset.split_by=content" in run.output
    resumed = {"output_dir": str(run.folder)}, "epochs=2", "resume_from_checkpoint=True"
    other = {**config, **resumed[0], "dataset_validation": {**config["dataset"], "split": "train[:8]"}}
    assert (
        "belongs to a run with digest of the validation rows=" in run_here(tmp_path / "a", other, *resumed[1:]).error()
    )
    config |= {"dataset_validation": None, **resumed[0]}
    other = run_here(tmp_path / "a", config, *resumed[1:], "optimizer.amsgrad=True")
    assert (
        "cannot be loaded into this config's model and optimizer (Missing key in checkpoint state_dict: optimizer"
        in other.error()
    )
    finished(tmp_path / "a", config, *resumed[1:])


def test_a_run_keeps_the_date_that_its_template_writes(tiny, tmp_path, monkeypatch):
    """A run that is resumed on another day, with its model elsewhere, is the same run; so is what reads its rows later."""
    folder = tmp_path / "base"
    save("qwen3 tied", folder, vocab_size=320)
    write_qwen3_tokenizer(folder, WORDS, DATED)
    config = {**tiny(epochs=2), "model": {"_component_": "finch.models.auto", "path": str(folder)}}
    config["checkpointer"]["checkpoint_dir"] = str(folder)
    config["tokenizer"] = {"_component_": "finch.models.auto_tokenizer", "path": str(folder)}

    def on(day):
        monkeypatch.setattr(chat_tokenizer, "day_of", lambda date: datetime.date.fromisoformat(date or day))

    on("2026-01-31")
    uninterrupted = finished(tmp_path / "uninterrupted", config)
    broken = broken_config(config, tmp_path / "broken", every_n_steps=3)
    run_broken(tmp_path / "b", broken, monkeypatch, 5)
    on("2026-02-01")
    moved = shutil.move(folder, tmp_path / "elsewhere" / "base")
    broken["model"]["path"] = broken["tokenizer"]["path"] = broken["checkpointer"]["checkpoint_dir"] = str(moved)
    assert_same_run(run_here(tmp_path / "b", broken), uninterrupted)
    saved = OmegaConf.load(tmp_path / "broken" / "config.yaml")
    assert saved.tokenizer.date == "2026-01-31"
    other = run_here(tmp_path / "b", broken, "tokenizer.date=2026-02-01", "epochs=3")
    assert 'belongs to a run with tokenizer.date="2026-01-31", this config says "2026-02-01"' in other.error()
