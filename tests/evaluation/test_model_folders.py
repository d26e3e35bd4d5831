"""Which folder of a run is evaluated, and what is refused before any weights are loaded."""

import json
import os
import shutil

import pytest
from filelock import FileLock

from finch.base.errors import UserError
from finch.evaluation.loading import hash_weights
from finch.evaluation.model_folders import ModelFolder, find_base, find_tuned, has_average, labels
from finch.models.hf_config import read_config


@pytest.fixture
def base(base_folder):
    return find_base(base_folder)


def make_run(folder, base_folder, *epochs, best=None):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    for name in epochs:
        shutil.copytree(base_folder, folder / name)
    if best is not None:
        (folder / "best").symlink_to(best)
    return folder


@pytest.mark.parametrize(
    ("epochs", "best", "chosen"),
    [(("epoch_0", "epoch_1"), "epoch_0", "epoch_0"), (("epoch_2", "epoch_10"), None, "epoch_10")],
)
def test_run_is_its_best_or_last_epoch(base, base_folder, tmp_path, epochs, best, chosen):
    run = make_run(tmp_path / "run", base_folder, *epochs, best=best)
    tuned = find_tuned(run, base)
    assert (tuned.path.resolve().name, tuned.run, tuned.label) == (chosen, run, "run")


def test_a_runs_average_is_not_what_its_folder_stands_for(base, base_folder, tmp_path, caplog):
    run = make_run(tmp_path / "run", base_folder, "epoch_0")
    find_tuned(run, base)
    assert "average" not in caplog.text
    shutil.copytree(run / "epoch_0", run / "average" / "model")
    (run / "average" / "model" / "config.json").touch()  # written after the model that it averages
    find_tuned(run, base)
    assert f"--tuned={run}: its model before the average; --tuned {run}/average evaluates the average" in caplog.text
    assert find_tuned(run / "average" / "model", base).results == run / "average" / "evaluation"


def test_epoch_of_a_run_has_its_results_in_the_run(base, base_folder, tmp_path):
    run = make_run(tmp_path / "run", base_folder, "epoch_0", best="epoch_0")
    tuned = find_tuned(run / "epoch_0", base)
    assert (tuned.run, tuned.results) == (None, run / "evaluation" / "epoch_0")
    assert find_tuned(run, base).results == run / "evaluation"
    assert find_base(run / "epoch_0").results is None


def test_labels_of_folders_with_one_name_differ(tmp_path):
    paths = [tmp_path / name for name in ("a/alpha_0.5", "b/alpha_0.5", "b/other")]
    folders = [ModelFolder("--tuned", path) for path in paths]
    assert labels(folders) == ["a/alpha_0.5", "b/alpha_0.5", "other"]


def test_sweeps_cell_without_config_is_a_run(base, base_folder, tmp_path):
    run = make_run(tmp_path / "run", base_folder, "epoch_0")
    (run / "config.yaml").rename(run / "cell.json")
    assert find_tuned(run, base).run == run


def test_run_that_is_training_is_named(base, base_folder, tmp_path, caplog):
    run = make_run(tmp_path / "run", base_folder, "epoch_0", best="epoch_0")
    (run / ".lock").touch()
    find_tuned(run, base)
    assert "still training" not in caplog.text
    with FileLock(run / ".lock"):
        find_tuned(run, base)
    assert "is still training; epoch_0, the best so far, is evaluated" in caplog.text


def test_run_without_an_epoch_is_refused(base, base_folder, tmp_path):
    with pytest.raises(UserError, match="has no epoch: there is neither best nor epoch_N"):
        find_tuned(make_run(tmp_path / "run", base_folder), base)


def make_adapter(folder):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def test_adapter_of_a_run_is_found(base, base_folder, tmp_path):
    run = make_run(tmp_path / "run", base_folder)
    make_adapter(run / "epoch_1_adapter")
    tuned = find_tuned(run, base)
    assert tuned.is_adapter
    assert tuned.path == run / "epoch_1_adapter"


def test_hash_is_of_the_content(base, base_folder, tmp_path):
    copy = shutil.copytree(base_folder, tmp_path / "copy")
    assert hash_weights(find_tuned(copy, base)) == hash_weights(base)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert hash_weights(find_tuned(copy, base)) != hash_weights(base)


def test_hash_has_the_ends_of_answers(base, base_folder, tmp_path):
    """Where generation_config.json has others than config.json: answers are of another length."""
    copy = shutil.copytree(base_folder, tmp_path / "copy")
    hashes = []
    for ends in (read_config(copy, "")["eos_token_id"], [1, 2], [2, 1], 7):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "temperature": 0.6}))
        hashes.append(hash_weights(find_tuned(copy, base)))
    assert hashes[0] == hash_weights(base)
    assert hashes[1] == hashes[2]
    assert len(set(hashes)) == 3


def test_hash_of_an_adapter_has_the_base(base, base_folder, tmp_path):
    adapter = make_adapter(tmp_path / "adapter")
    other = shutil.copytree(base_folder, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    hashes = {hash_weights(find_tuned(adapter, each)) for each in (base, find_base(other))}
    assert len(hashes | {hash_weights(base)}) == 3


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_another_architecture_is_refused(base, base_folder, tmp_path):
    tuned = shutil.copytree(base_folder, tmp_path / "tuned")
    change_config(tuned, num_hidden_layers=3)
    with pytest.raises(
        UserError, match=r"--base=.* has num_hidden_layers=2, --tuned=.*tuned has num_hidden_layers=3; give the"
    ):
        find_tuned(tuned, base)
    change_config(tuned, num_hidden_layers=2, model_type="qwen2")
    with pytest.raises(UserError, match="has model_type=qwen2"):
        find_tuned(tuned, base)


def test_folder_that_is_no_model_is_refused(base, base_folder, tmp_path):
    with pytest.raises(UserError, match=r"--tuned=.*nowhere is not a folder"):
        find_tuned(tmp_path / "nowhere", base)
    with pytest.raises(UserError, match=r"has no config\.json"):
        find_tuned(tmp_path, base)
    tuned = shutil.copytree(base_folder, tmp_path / "tuned")
    (tuned / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has config\.json but no weights"):
        find_tuned(tuned, base)
    with pytest.raises(UserError, match=r"--base=.* is an adapter; give the model"):
        find_base(make_adapter(tmp_path / "adapter"))


def test_an_average_is_of_a_model_without_files_and_with_a_link_to_nothing(tmp_path):
    (tmp_path / "epoch_0").mkdir()
    (tmp_path / "average" / "model").mkdir(parents=True)
    config = tmp_path / "average" / "model" / "config.json"
    config.write_text("{}")
    assert has_average(tmp_path)
    os.utime(config, (1, 1))
    (tmp_path / "epoch_0" / "notes.json").symlink_to("nowhere")
    assert not has_average(tmp_path)
