"""A run that is killed anywhere and resumed equals the uninterrupted run bit for bit; through the recipe, on the CPU."""

import json
import shutil

import pytest
from helpers.runs import (
    Broken,
    assert_same_run,
    llama_args,
    make_config,
    run_broken,
    run_here,
    tune_run,
)

pytestmark = pytest.mark.slow

COSINE = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 3}
LORA = {
    "_component_": "torchtune.models.llama2.lora_llama2",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.3,  # makes the random states matter
    **llama_args(),
}
CASES = {
    "finch": {},
    "cosine": {"lr_scheduler": COSINE},
    "accumulation": {"batch_size": 2, "gradient_accumulation_steps": 2},
    "workers": {"num_workers": 2},
    "packed": {"batch_size": 1, "epochs": 6},
    "talr": {"loss": {"_component_": "finch.objectives.TALR", "tau": "lagged"}},
    "dropout": {"model": LORA},
}


@pytest.fixture
def config(tmp_path, base_folder, rows_file):
    def make(name, **changes):
        case = {"epochs": 2, **CASES[name], **changes}
        config = make_config(base_folder, rows_file, tmp_path / "uninterrupted", **case)
        if name == "packed":
            config["dataset"]["packed"] = True
        return config

    return make


@pytest.mark.parametrize(
    ("name", "asynchronous"),
    [*((name, False) for name in CASES), ("finch", True), ("dropout", True), ("workers", True)],
)
def test_resume_within_an_epoch_equals_uninterrupted(name, asynchronous, config, tmp_path, monkeypatch):
    recipe = "finch_lora_finetune" if name == "dropout" else "finch_full_finetune"
    config = config(name)
    uninterrupted = run_here(tmp_path / "s", config, recipe=recipe)
    assert uninterrupted.returncode == 0, uninterrupted.output
    last = uninterrupted.column("step")[-1]
    assert last >= 10
    broken = {**config, "output_dir": str(tmp_path / "broken"), "resume_from_checkpoint": "auto"}
    broken["checkpoint"] = {"every_n_steps": 3, "async": asynchronous}
    for stop in (5, last - 2):
        run_broken(tmp_path / "b", broken, monkeypatch, stop, recipe=recipe)
    resumed = run_here(tmp_path / "b", broken, recipe=recipe)
    steps_per_epoch = last // config["epochs"]  # an epoch ends with a checkpoint
    saved = max(step for step in range(last - 1) if step % 3 == 0 or step % steps_per_epoch == 0)
    assert f"resumed from step {saved} of" in resumed.output
    assert_same_run(resumed, uninterrupted)


def test_resume_at_an_epochs_end_keeps_validation_and_best(config, tmp_path, monkeypatch):
    """Losses that rise in epoch 1 keep epoch 0 the best; the kill after the last step of an epoch comes before its end."""
    import finch_full_finetune

    config = config("finch", validate_every_n_steps=4, lr_scheduler=None, epochs=3)
    config["dataset_validation"] = {**config["dataset"], "split": "train[:7]"}
    config["optimizer"] = {**config["optimizer"], "lr": 3e-2}
    uninterrupted = run_here(tmp_path / "s", config)
    broken = {**config, "output_dir": str(tmp_path / "broken"), "resume_from_checkpoint": "auto"}
    broken["checkpoint"] = {"every_n_steps": 2}
    run_broken(tmp_path / "b", broken, monkeypatch, 13)

    export = finch_full_finetune.FinchFullFinetune._export

    def export_and_break(recipe, name):
        export(recipe, name)
        raise Broken

    with monkeypatch.context() as patch:  # between the export of an epoch and its checkpoint
        patch.setattr(finch_full_finetune.FinchFullFinetune, "_export", export_and_break)
        with pytest.raises(Broken):
            run_here(tmp_path / "b", broken)
    resumed = run_here(tmp_path / "b", broken)
    assert_same_run(resumed, uninterrupted)
    assert (resumed.folder / "best").readlink() == (uninterrupted.folder / "best").readlink()


def test_resume_removes_metrics_of_lost_steps(config, tmp_path, monkeypatch):
    """Lines written after the save, of the saved step too, and a line cut off by the kill."""
    config = config("finch")
    uninterrupted = run_here(tmp_path / "s", config)
    broken = {**config, "output_dir": str(tmp_path / "broken"), "checkpoint": {"every_n_steps": 5}}
    run_broken(tmp_path / "b", broken, monkeypatch, 8, "log_every_n_steps=4")
    assert len((tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()) == 8
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "epoch": 0, "validation_loss": 1.0}) + '\n{"step": 9, "lo')
    resumed = run_here(tmp_path / "b", broken, "resume_from_checkpoint=True")
    assert_same_run(resumed, uninterrupted)


def test_resume_skips_a_damaged_checkpoint_and_names_it(config, tmp_path, monkeypatch):
    config = config("finch")
    uninterrupted = run_here(tmp_path / "s", config)
    broken = {**config, "output_dir": str(tmp_path / "broken"), "checkpoint": {"every_n_steps": 2, "keep_last": 2}}
    run_broken(tmp_path / "b", broken, monkeypatch, 7)
    folder = tmp_path / "broken" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_4", "step_6"]
    shutil.copytree(tmp_path / "broken", tmp_path / "other")
    shard = folder / "step_6" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    error = run_here(tmp_path / "b", broken, f"resume_from_checkpoint={folder / 'step_6'}").error()
    assert "step_6 is damaged (__0_0.distcp is not as it was written)" in error
    resumed = run_here(tmp_path / "b", broken, "resume_from_checkpoint=True")
    assert "resumed from step 4 of" in resumed.output
    assert "step_6 is damaged (__0_0.distcp is not as it was written) and is not used" in resumed.output
    assert_same_run(resumed, uninterrupted)

    # An earlier checkpoint by choice, although the last one is valid
    broken["output_dir"] = str(tmp_path / "other")
    back = run_here(tmp_path / "b", broken, f"resume_from_checkpoint={tmp_path}/other/checkpoints/step_4")
    assert "resumed from step 4 of" in back.output
    assert_same_run(back, uninterrupted)


def test_auto_starts_from_scratch_without_a_checkpoint(config, tmp_path):
    config = config("finch", max_steps_per_epoch=1)
    run = run_here(tmp_path / "s", config, "resume_from_checkpoint=auto")
    assert run.returncode == 0, run.output
    assert "resumed" not in run.output
    again = run_here(tmp_path / "s", config, "resume_from_checkpoint=auto")
    assert "resumed from step 2 of" in again.output
    assert "nothing to do" in again.output


def run_on_ranks(ranks, folder, config):
    config = {**config, "batch_size": 4 // ranks}
    run = run_here(folder, config) if ranks == 1 else tune_run(folder, config, ranks=ranks)
    assert run.returncode == 0, run.output[-3000:]
    return run


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory, base_folder, rows_file):
    """The folder of a run of one epoch on a number of ranks, with checkpoints within it; made once per number."""
    made = {}

    def make(ranks):
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"by_{ranks}")
            config = make_config(base_folder, rows_file, folder / "run")
            made[ranks] = run_on_ranks(ranks, folder, {**config, "checkpoint": {"every_n_steps": 3, "keep_last": 5}})
        return made[ranks].folder

    return make


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_resume_on_another_number_of_ranks(before, after, config, saved_by, tmp_path):
    """The same samples in the same order; losses within 1e-5 over the 24 steps that follow step 9."""
    config = config("finch", epochs=3)
    uninterrupted = run_here(tmp_path / "s", config)
    shutil.copytree(saved_by(before), tmp_path / "moved", symlinks=True)
    resume = str(tmp_path / "moved" / "checkpoints" / "step_9")
    moved = {**config, "output_dir": str(tmp_path / "moved"), "resume_from_checkpoint": resume}
    resumed = run_on_ranks(after, tmp_path / "m", moved)
    assert "resumed from step 9 of" in resumed.output
    assert resumed.column("num_target_tokens") == uninterrupted.column("num_target_tokens")
    assert len(resumed.column("loss")) == 33
    assert max(abs(a - b) for a, b in zip(resumed.column("loss"), uninterrupted.column("loss"), strict=True)) < 1e-5
