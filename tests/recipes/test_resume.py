"""A run broken anywhere and resumed is the run that was never broken: through the recipe, on the CPU, bit for bit."""

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
    "lora_dropout": 0.3,  # so that the random states matter
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
        config = make_config(base_folder, rows_file, tmp_path / "straight", **case)
        if name == "packed":
            config["dataset"]["packed"] = True
        return config

    return make


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_broken_within_an_epoch(name, asynchronous, config, tmp_path, monkeypatch):
    if asynchronous and name not in ("finch", "dropout", "workers"):
        pytest.skip("one way of saving is enough for the others")
    recipe = "finch_lora_finetune" if name == "dropout" else "finch_full_finetune"
    config = config(name)
    straight = run_here(tmp_path / "s", config, recipe=recipe)
    assert straight.returncode == 0, straight.output
    last = straight.column("step")[-1]
    assert last >= 10
    broken = {**config, "output_dir": str(tmp_path / "broken"), "resume_from_checkpoint": "auto"}
    broken["checkpoint"] = {"every_n_steps": 3, "async": asynchronous}
    for stop in (5, last - 2):
        run_broken(tmp_path / "b", broken, monkeypatch, stop, recipe=recipe)
    resumed = run_here(tmp_path / "b", broken, recipe=recipe)
    first = next(line for line in resumed.output.splitlines() if line)
    saved = [step for step in (*range(3, last, 3), last // 2) if step <= last - 2]
    assert f"resumed from step {max(saved)} of" in first or name == "packed"
    assert_same_run(resumed, straight)


def test_validation_and_the_best_epoch_survive_breaks_around_an_epochs_end(config, tmp_path, monkeypatch):
    """Losses that rise in epoch 1 keep epoch 0 the best; the break after the last step of an epoch comes before its end."""
    import finch_full_finetune

    config = config("finch", validate_every_n_steps=4, lr_scheduler=None, epochs=3)
    config["dataset_validation"] = {**config["dataset"], "split": "train[:7]"}
    config["optimizer"] = {**config["optimizer"], "lr": 3e-2}
    straight = run_here(tmp_path / "s", config)
    broken = {**config, "output_dir": str(tmp_path / "broken"), "resume_from_checkpoint": "auto"}
    broken["checkpoint"] = {"every_n_steps": 2}
    run_broken(tmp_path / "b", broken, monkeypatch, 13)

    export = finch_full_finetune.FinchFullFinetune._export
    with monkeypatch.context() as patch:  # between the export of an epoch and its checkpoint
        patch.setattr(
            finch_full_finetune.FinchFullFinetune,
            "_export",
            lambda recipe, name: (export(recipe, name), (_ for _ in ()).throw(Broken)),
        )
        with pytest.raises(Broken):
            run_here(tmp_path / "b", broken)
    resumed = run_here(tmp_path / "b", broken)
    assert_same_run(resumed, straight)
    assert (resumed.folder / "best").readlink() == (straight.folder / "best").readlink()


def test_no_line_of_a_lost_attempt_stays(config, tmp_path, monkeypatch):
    """Lines that were written after the save, of the saved step too, and a line cut off by the kill."""
    config = config("finch")
    straight = run_here(tmp_path / "s", config)
    broken = {**config, "output_dir": str(tmp_path / "broken"), "checkpoint": {"every_n_steps": 5}}
    run_broken(tmp_path / "b", broken, monkeypatch, 8, "log_every_n_steps=4")
    assert len((tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()) == 8
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "epoch": 0, "validation_loss": 1.0}) + '\n{"step": 9, "lo')
    resumed = run_here(tmp_path / "b", broken, "resume_from_checkpoint=True")
    assert_same_run(resumed, straight)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(config, tmp_path, monkeypatch):
    config = config("finch")
    straight = run_here(tmp_path / "s", config)
    broken = {**config, "output_dir": str(tmp_path / "broken"), "checkpoint": {"every_n_steps": 2, "keep_last": 2}}
    run_broken(tmp_path / "b", broken, monkeypatch, 7)
    folder = tmp_path / "broken" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_4", "step_6"]
    shutil.copytree(tmp_path / "broken", tmp_path / "other")
    shard = folder / "step_6" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    told = run_here(tmp_path / "b", broken, f"resume_from_checkpoint={folder / 'step_6'}").error()
    assert "step_6 is damaged (__0_0.distcp is not as it was written)" in told
    resumed = run_here(tmp_path / "b", broken, "resume_from_checkpoint=True")
    assert "resumed from step 4 of" in resumed.output.splitlines()[0]
    assert "step_6 is damaged (__0_0.distcp is not as it was written) and is not used" in resumed.output
    assert_same_run(resumed, straight)

    # Going back by hand, to a step before the last one.
    broken["output_dir"] = str(tmp_path / "other")
    back = run_here(tmp_path / "b", broken, f"resume_from_checkpoint={tmp_path}/other/checkpoints/step_4")
    assert "resumed from step 4 of" in back.output.splitlines()[0]
    assert_same_run(back, straight)


def test_auto_starts_afresh_where_there_is_nothing(config, tmp_path):
    config = config("finch", max_steps_per_epoch=1)
    run = run_here(tmp_path / "s", config, "resume_from_checkpoint=auto")
    assert run.returncode == 0, run.output
    assert "resumed" not in run.output
    again = run_here(tmp_path / "s", config, "resume_from_checkpoint=auto")
    assert "resumed from step 2 of" in again.output
    assert "nothing to do" in again.output


def on(ranks, folder, config):
    config = {**config, "batch_size": 4 // ranks}
    run = run_here(folder, config) if ranks == 1 else tune_run(folder, config, ranks=ranks)
    assert run.returncode == 0, run.output[-3000:]
    return run


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory, base_folder, rows_file):
    """A run of one epoch on a number of ranks, with checkpoints in its middle; made once for each number."""
    made = {}

    def make(ranks):
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"by_{ranks}")
            config = make_config(base_folder, rows_file, folder / "run")
            made[ranks] = on(ranks, folder, {**config, "checkpoint": {"every_n_steps": 3, "keep_last": 5}})
        return made[ranks].folder

    return make


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_on_another_number_of_ranks(before, after, config, saved_by, tmp_path):
    """The same samples in the same order; losses within 1e-5 over the 20 steps and more that follow on step 9 of 11."""
    config = config("finch", epochs=3)
    straight = run_here(tmp_path / "s", config)
    shutil.copytree(saved_by(before), tmp_path / "moved", symlinks=True)
    resume = str(tmp_path / "moved" / "checkpoints" / "step_9")
    moved = {**config, "output_dir": str(tmp_path / "moved"), "resume_from_checkpoint": resume}
    resumed = on(after, tmp_path / "m", moved)
    assert "resumed from step 9 of" in resumed.output
    assert resumed.column("num_target_tokens") == straight.column("num_target_tokens")
    assert len(resumed.column("loss")) == 33
    assert max(abs(a - b) for a, b in zip(resumed.column("loss"), straight.column("loss"), strict=True)) < 1e-5
