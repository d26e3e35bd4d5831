"""What a run shows in a log file, and what it leaves for people: lines without carriage returns, a summary."""

import shutil

import pytest
from helpers.runs import before_steps, finished, run_here, tune_run


@pytest.fixture
def config(tiny):
    return tiny(epochs=2, max_steps_per_epoch=2, is_validated=True)


@pytest.mark.slow
def test_log_file_has_lines_only(tmp_path, config):
    """Of two ranks of a real `tune run`; the second one is silent."""
    done = tune_run(tmp_path, config, ranks=2)
    assert done.returncode == 0, done.output
    assert "\r" not in done.output
    lines = done.output.splitlines()
    for epoch, step in ((1, 2), (2, 4)):
        assert sum(line.startswith(f"epoch {epoch}/2, step {step} of 4: loss ") for line in lines) == 1
    assert sum(line.startswith(("best epoch: ", "its model: ", "4 steps, ")) for line in lines) == 3
    assert "Skipping import of cpp extensions" not in done.output.split("2 ranks on cpu")[1]


def test_run_ends_with_a_summary(tmp_path, config):
    """Also when it was resumed; the tokens are the complete run's."""
    run_here(tmp_path, config, "epochs=1")
    run = finished(tmp_path, config, "resume_from_checkpoint=True", "epochs=2")
    best = min(run.metrics(validation=True), key=lambda line: line["validation_loss"])
    assert f"best epoch: {best['epoch'] + 1} of 2, validation loss {best['validation_loss']:.4f} nats\n" in run.output
    assert f'transformers.AutoModelForCausalLM.from_pretrained("{run.folder}/best")\n' in run.output
    assert f"4 steps, {sum(run.column('num_target_tokens')):,} target tokens; 0:00:0" in run.output
    assert "epoch 2/2, step 4 of 4: loss " in run.output
    assert "epoch 1/2" not in run.output


def test_a_run_whose_folder_is_removed_goes_on(tmp_path, config, monkeypatch):
    """And says so: what it writes from then on is all there."""

    def remove(recipe):
        if recipe.state.step == 1:
            shutil.rmtree(recipe.run.path)

    before_steps(monkeypatch, remove)
    run = finished(tmp_path, config)
    assert run.output.count("metrics.jsonl was moved or removed while the run writes it") == 1
    assert run.column("step") == [2, 3, 4]
    assert (run.folder / "best" / "model.safetensors").is_file()
    assert "best epoch: " in run.output
