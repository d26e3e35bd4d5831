"""Each mistake of a user gets one sentence that names key, value and remedy; nothing is left half-written."""

import json
import os

import pytest
import torch
from helpers.runs import llama_args, make_config, run_here, tune_run

pytestmark = pytest.mark.slow


@pytest.fixture
def refused(tmp_path, base_folder, rows_file):
    """Runs the recipe with changes to a good config and returns the sentence; asserts that nothing of a run was written."""

    def run(*overrides, **changes):
        config = make_config(base_folder, rows_file, tmp_path / "run", **changes)
        done = run_here(tmp_path, config, *overrides)
        assert done.returncode == 1
        assert not (tmp_path / "run").exists(), list((tmp_path / "run").rglob("*"))
        assert "Traceback" not in done.output
        return done.error()

    return run


def test_a_misspelt_key(refused):
    assert "unknown key epoch=3, did you mean epochs?" in refused("epoch=3")
    assert "unknown key optimizer.lrr, did you mean optimizer.lr?" in refused("optimizer.lrr=3")
    assert "unknown key lr_scheduler.eta_maxx, did you mean lr_scheduler.eta_max?" in refused("lr_scheduler.eta_maxx=3")


def test_values_of_the_wrong_kind(refused):
    assert "batch_size=0 must be at least 1" in refused("batch_size=0")
    assert "batch_size=x must be int" in refused("batch_size=x")
    assert "clip_grad_norm=-1 must be a number above 0" in refused("clip_grad_norm=-1")
    assert "model=7 must be a block with a _component_" in refused(model=7)
    assert "dataset is missing: component of the training rows" in refused(dataset=None)
    assert "model._component_=torchtune.models.llama2.llama3 does not exist, did you mean llama2?" in refused(
        "model=torchtune.models.llama2.llama3"
    )


def test_numbers_that_finch_refuses(refused):
    assert "lr_scheduler: eta_max=-1.0 must be above 0" in refused("lr_scheduler.eta_max=-1.0")
    assert "lr_scheduler: ema=1.5 must lie in [0, 1)" in refused("lr_scheduler.ema=1.5")
    assert "lr_scheduler: init=-2 must be above 0" in refused("lr_scheduler.init=-2")
    assert "optimizer.lr=0 must be a number above 0" in refused("optimizer.lr=0")


def test_fp16_and_devices(refused):
    assert "dtype=fp16 is not trained in full" in refused("dtype=fp16")
    assert "dtype=fp8 is not known: use one of fp32" in refused("dtype=fp8")
    assert "device=tpu is not known" in refused("device=tpu")
    if not torch.cuda.is_available():
        assert "device=cuda needs a CUDA device, and torch sees none here" in refused("device=cuda")


def test_options_that_exclude_each_other(refused):
    assert "optimizer_in_bwd=True excludes clip_grad_norm=1.0" in refused("optimizer_in_bwd=True")
    assert "enable_activation_offloading=True needs device=cuda" in refused("enable_activation_offloading=True")
    assert "optimizer._component_=torch.optim.SGD cannot round stochastically" in refused(
        "dtype=bf16_stochastic", "optimizer=torch.optim.SGD", "~optimizer.fused"
    )
    assert "bitsandbytes.optim.AdamW8bit does not update sharded weights" in refused(
        "dtype=bf16_mixed", "optimizer=bitsandbytes.optim.AdamW8bit", "~optimizer.fused"
    )
    assert "is not a plain cross-entropy" in refused("loss=torch.nn.MSELoss")


def test_missing_files(refused, tmp_path):
    assert "checkpointer.checkpoint_dir=/nowhere is not a folder" in refused("checkpointer.checkpoint_dir=/nowhere")
    assert "checkpointer.checkpoint_files names model-7.safetensors, which is not in" in refused(
        "checkpointer.checkpoint_files=[model-7.safetensors]"
    )
    assert "tokenizer" in (told := refused("tokenizer.path=/nowhere/tokenizer.model"))
    assert "/nowhere/tokenizer.model" in told
    assert "/nowhere/rows.jsonl" in refused("dataset.data_files=/nowhere/rows.jsonl")


def test_a_config_name_that_does_not_exist(tmp_path):
    from unittest import mock

    import finch_full_finetune

    with mock.patch("sys.argv", ["x", "--config", "stories260k/tofu_finsh"]), pytest.raises(SystemExit) as left:
        finch_full_finetune.recipe_main()
    assert left.value.code == 1


def test_a_folder_that_is_not_whole(refused, base_folder, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    for path in base_folder.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "model-00001-of-00002.safetensors").write_bytes((base_folder / "model.safetensors").read_bytes())
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert "model.safetensors.index.json lists model-00002-of-00002.safetensors, which is not in" in refused(
        f"checkpointer.checkpoint_dir={folder}", "checkpointer.checkpoint_files=[model-00001-of-00002.safetensors]"
    )
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"no tensors here")
    assert "is not a complete safetensors file" in refused(
        f"checkpointer.checkpoint_dir={folder}", "checkpointer.checkpoint_files=[model-00001-of-00002.safetensors]"
    )


def test_weights_that_could_run_code_are_not_unpickled(refused, base_folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((base_folder / "config.json").read_bytes())
    torch.save({"model.norm.weight": torch.ones(32), "evil": Evil()}, folder / "pytorch_model.bin")
    assert "cannot be read as weights only" in refused(
        f"checkpointer.checkpoint_dir={folder}", "checkpointer.checkpoint_files=[pytorch_model.bin]"
    )
    assert not (tmp_path / "ran").exists()


def test_shapes_that_do_not_fit(refused):
    told = refused("model.intermediate_dim=40")
    assert "model does not fit checkpointer.checkpoint_dir" in told
    assert "layers.0.mlp.w1.weight has shape [48, 32], the model expects [40, 32]" in told
    assert "layers.1.attn.k_proj.weight" in refused("model.num_layers=1")


def test_a_row_without_a_field_is_named_with_its_file(refused, tmp_path):
    rows = [
        {"question": "a", "answer": "the bird"},
        {"question": "b", "answer": "the fox"},
        {"question": "no answer"},
    ] + [{"question": "c", "answer": "x"}] * 5
    file = tmp_path / "broken.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for packed in (False, True):
        assert f"dataset: row 3 of {file} has no field 'answer'" in refused(
            f"dataset.data_files={file}", f"dataset.packed={packed}"
        )
    assert "has no field 'reply', which column_map names for 'output'; its fields are question, answer" in refused(
        "dataset.column_map.output=reply"
    )
    file.write_text('{"question": "a", "answer": "the bird"}\n{"question": \n')
    assert f"dataset: row 2 of {file} is not JSON" in refused(f"dataset.data_files={file}")


def test_empty_and_small_datasets(refused, tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_text("")
    assert f"dataset is empty: {file} has no rows" in refused(f"dataset.data_files={file}")
    assert "dataset is empty" in refused("dataset.split=train[:0]")
    assert (
        "global batch of 64 (batch_size 64 x gradient_accumulation_steps 1 x 1 ranks) is larger than the dataset of 41 samples"
        in refused("batch_size=64")
    )


def test_prompts_longer_than_max_seq_len(refused, tmp_path, base_folder, rows_file):
    assert "none of the 41 samples" in refused("tokenizer.max_seq_len=2")
    config = make_config(base_folder, rows_file, tmp_path / "some", max_steps_per_epoch=1)
    done = run_here(tmp_path, config, "tokenizer.max_seq_len=5")
    assert done.returncode == 0, done.output
    counted = int(done.output.split("dataset: ")[1].split(" of 41 samples have no target token")[0])
    assert 0 < counted < 41


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("epochs=null", "epochs has no value"),
        ("collate_fn=null", "collate_fn has no value"),
        ("log_level=FOO", "log_level=FOO is not known"),
        ("cudnn_deterministic_mode=foo", "cudnn_deterministic_mode=foo must be default"),
        (
            "custom_sharded_layers=[tok_embedding]",
            "names tok_embedding, which the model does not have, did you mean tok_embeddings?",
        ),
        ("ac_mode=selective", "ac_option=None must be op, or a number"),
        ("optimizer.betas=[0.9,7]", "optimizer: Invalid beta parameter at index 1"),
        ("optimizer.lr=abc", "optimizer.lr=abc must be a number above 0"),
        ("lr_scheduler.eta_max=abc", "lr_scheduler: eta_max='abc' must be a number"),
        ("loss.label_smoothing=0.5", "loss.label_smoothing=0.5 would change plain cross-entropy"),
        ("export_dtype=bf16_mixed", "export_dtype=bf16_mixed must be fp32"),
        ("hf_token=hf_do_not_tell", "unknown key hf_token=***"),
    ],
)
def test_values_that_cannot_be(refused, override, told):
    sentence = refused(override)
    assert told in sentence
    assert "do_not_tell" not in sentence


def test_a_scheduler_with_wrong_arguments(refused):
    cosine = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"}
    assert "lr_scheduler" in refused(lr_scheduler=cosine)


def test_a_broken_row_in_a_worker_process_is_one_sentence(tmp_path, base_folder, rows_file):
    config = make_config(
        base_folder, rows_file, tmp_path / "run", check_dataset=False, num_workers=1, lr_scheduler=None
    )
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": "a", "answer": "x"}) + "\n" for _ in range(8)))
    (tmp_path / "breaking.py").write_text(
        "from torchtune.datasets import instruct_dataset\n"
        "class Breaking:\n"
        "    def __init__(self, inner): self.inner = inner\n"
        "    def __len__(self): return len(self.inner)\n"
        "    def __getitem__(self, index):\n"
        "        if index == 5: raise KeyError('messages')\n"
        "        return self.inner[index]\n"
        "def dataset(tokenizer, **kwargs): return Breaking(instruct_dataset(tokenizer, **kwargs))\n"
    )
    config["dataset"].update(_component_="breaking.dataset", data_files=str(file))
    done = tune_run(tmp_path, config)
    assert done.error().startswith(f"finch: error: dataset: row 6 of {file} cannot be used (KeyError: 'messages')")
    assert "Traceback" not in done.output


def test_after_an_error_the_process_group_is_not_waited_for(tmp_path, base_folder, rows_file, monkeypatch):
    """NCCL's end waits for ranks that may be gone: only a run that went well takes the group down."""
    stopped = []
    monkeypatch.setattr("finch.distributed.parallel.stop", lambda: stopped.append(True))
    config = make_config(base_folder, rows_file, tmp_path / "run", clip_grad_norm=None, log_every_n_steps=50)
    config["optimizer"]["lr"] = 1e30
    config["lr_scheduler"] = {"_component_": "finch.FinchLR", "eta_max": 1e30, "init": "first_batch"}
    failed = run_here(tmp_path, config)
    assert failed.returncode == 1
    assert stopped == []
    assert len(failed.metrics()) >= 1  # the steps before the error are written, though fewer than fifty
    assert (
        run_here(tmp_path, make_config(base_folder, rows_file, tmp_path / "good", max_steps_per_epoch=1)).returncode
        == 0
    )
    assert stopped == [True]


def test_overrides_that_are_not_key_value(refused):
    assert "key=value" in refused("epochs")
    assert "Could not find key nothing" in refused("~nothing")


def test_secrets_reach_no_file_and_no_log(tmp_path, base_folder, rows_file):
    config = make_config(base_folder, rows_file, tmp_path / "run", max_steps_per_epoch=1, my_token="hf_do_not_tell")
    config["dataset"]["token"] = "${my_token}"
    done = run_here(tmp_path, config)
    assert done.returncode == 0, done.output
    assert "hf_do_not_tell" not in done.output
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"hf_do_not_tell" not in path.read_bytes(), path
    assert "token: '***'" in (tmp_path / "run" / "config.yaml").read_text()


def test_the_folders_of_other_runs(tmp_path, base_folder, rows_file):
    config = make_config(base_folder, rows_file, tmp_path / "run", max_steps_per_epoch=2)
    assert "holds no checkpoint" in run_here(tmp_path, config, "resume_from_checkpoint=True").error()
    first = run_here(tmp_path, config)
    assert first.returncode == 0, first.output
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert "already holds a run; set resume_from_checkpoint=True" in run_here(tmp_path, config).error()
    told = run_here(tmp_path, {**config, "batch_size": 3}, "resume_from_checkpoint=True").error()
    assert "belongs to a run with global batch=4, this config says 3" in told
    for override, key in (("dtype=bf16", "dtype"), ("tokenizer.max_seq_len=9", "number of target tokens")):
        assert (
            f"belongs to a run with {key}="
            in run_here(tmp_path, config, "resume_from_checkpoint=True", override).error()
        )
    told = run_here(
        tmp_path, {**config, "model": {**config["model"], "max_seq_len": 32}}, "resume_from_checkpoint=True"
    ).error()
    assert "belongs to a run with model=" in told
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == written
    assert run_here(tmp_path, config, "overwrite=True").returncode == 0
    assert (
        "lies in checkpointer.checkpoint_dir"
        in run_here(tmp_path, {**config, "output_dir": str(base_folder / "run")}).error()
    )


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(tmp_path, base_folder, rows_file):
    config = make_config(base_folder, rows_file, tmp_path / "run", clip_grad_norm=None, lr_scheduler=None)
    config["optimizer"]["lr"] = 1e30
    assert "the loss was not finite at step" in run_here(tmp_path, config).error()
    config["lr_scheduler"] = {"_component_": "finch.FinchLR", "eta_max": 1e30, "init": "first_batch"}
    assert "the loss was not finite at a step after step" in run_here(tmp_path, config, "overwrite=True").error()


def test_two_ranks_tell_a_mistake_once_and_leave(tmp_path, base_folder, rows_file):
    config = make_config(
        base_folder,
        rows_file,
        tmp_path / "run",
        model={"_component_": "torchtune.models.llama2.llama2", **llama_args(num_layers=3)},
    )
    done = tune_run(tmp_path, config, ranks=2, timeout=100)  # far below the half hour that a collective waits
    assert done.returncode != 0
    assert "model does not fit" in done.error()
    assert done.output.index("finch: error") < done.output.index("FAILED")  # torchrun's summary comes after ours


def test_one_rank_dying_ends_the_other(tmp_path, base_folder, rows_file):
    (tmp_path / "dying.py").write_text(
        "import os\n"
        "from torchtune.datasets import instruct_dataset\n"
        "class Dying:\n"
        "    def __init__(self, inner): self.inner = inner\n"
        "    def __len__(self): return len(self.inner)\n"
        "    def __getitem__(self, index):\n"
        "        if os.environ['RANK'] == '1' and index == 20: raise RuntimeError('this rank has had enough')\n"
        "        return self.inner[index]\n"
        "def dataset(tokenizer, **kwargs): return Dying(instruct_dataset(tokenizer, **kwargs))\n"
    )
    config = make_config(base_folder, rows_file, tmp_path / "run", check_dataset=False, batch_size=2, lr_scheduler=None)
    config["dataset"]["_component_"] = "dying.dataset"
    done = tune_run(tmp_path, config, ranks=2, timeout=100)
    assert done.returncode != 0
    assert "dataset: row 21 of" in done.error()
    assert "this rank has had enough" in done.error()
