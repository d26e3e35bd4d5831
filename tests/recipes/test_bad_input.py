"""A user's mistake fails early with a one-line error that names key, value and remedy; no part of a run is written."""

import json
import os
import re
from unittest import mock

import pytest
import torch
from helpers.runs import llama_args, make_config, run_here, tune_run

from finch import run_files

pytestmark = pytest.mark.slow


@pytest.fixture
def error_of(tmp_path, base_folder, rows_file):
    """Runs the recipe with changes to a good config, which must fail before anything is written; returns the error line."""

    def run(*overrides, **changes):
        config = make_config(base_folder, rows_file, tmp_path / "run", **changes)
        done = run_here(tmp_path, config, *overrides)
        assert done.returncode == 1
        assert not (tmp_path / "run").exists(), list((tmp_path / "run").rglob("*"))
        assert "Traceback" not in done.output
        return done.error()

    return run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # Unknown keys, components and files
        ("optimizer.lrr=3", "unknown key optimizer.lrr, did you mean optimizer.lr?"),
        ("lr_scheduler.eta_maxx=3", "unknown key lr_scheduler.eta_maxx, did you mean lr_scheduler.eta_max?"),
        ("hf_token=hf_do_not_show", "unknown key hf_token=***"),
        ("epochs", "key=value"),
        ("~nothing", "Could not find key nothing"),
        ("model=torchtune.models.llama2.llama3", "model._component_=torchtune.models.llama2.llama3 does not exist, did you mean llama2?"),
        ("checkpointer.checkpoint_dir=/nowhere", "checkpointer.checkpoint_dir=/nowhere is not a folder"),
        ("checkpointer.checkpoint_files=[model-7.safetensors]", "checkpointer.checkpoint_files names model-7.safetensors, which is not in"),
        ("tokenizer.path=/nowhere/tokenizer.model", "tokenizer: .*/nowhere/tokenizer.model"),
        ("dataset.data_files=/nowhere/rows.jsonl", "/nowhere/rows.jsonl"),
        # Values; all keys' are in tests/config
        ("batch_size=0", "batch_size=0 must be int >= 1"),
        ("collate_fn=null", "collate_fn has no value"),
        *([] if torch.cuda.is_available() else [("device=cuda", "device=cuda needs a CUDA device, and torch sees none here")]),
        ("lr_scheduler.eta_max=-1.0", "lr_scheduler: eta_max=-1.0 must be above 0"),
        ("lr_scheduler.eta_max=abc", "lr_scheduler: eta_max='abc' must be a number"),
        ("optimizer.lr=0", "optimizer.lr=0 must be a number above 0"),
        ("optimizer.lr=abc", "optimizer.lr=abc must be a number above 0"),
        ("optimizer.betas=[0.9,7]", "optimizer: Invalid beta parameter at index 1"),
        ("loss.label_smoothing=0.5", "loss.label_smoothing=0.5 would change plain cross-entropy"),
        ("loss=torch.nn.MSELoss", "is not a plain cross-entropy"),
        ("custom_sharded_layers=[tok_embedding]", "names tok_embedding, which the model does not have, did you mean tok_embeddings?"),
        # Combinations
        ("optimizer_in_bwd=True", "optimizer_in_bwd=True excludes clip_grad_norm=1.0"),
        ("ac_mode=selective", "ac_mode=selective needs ac_option; set it to op, or to n"),
        ("enable_activation_offloading=True", "enable_activation_offloading=True needs device=cuda"),
        ("dtype=bf16_stochastic optimizer=torch.optim.SGD ~optimizer.fused", "optimizer._component_=torch.optim.SGD cannot round stochastically"),
        ("dtype=bf16_mixed optimizer=bitsandbytes.optim.AdamW8bit ~optimizer.fused", "bitsandbytes.optim.AdamW8bit does not update sharded weights"),
        # The model
        ("model.intermediate_dim=40", "model does not fit checkpointer.checkpoint_dir"),
        ("model.intermediate_dim=40", "layers.0.mlp.w1.weight has shape [48, 32], the model expects [40, 32]"),
        ("model.num_layers=1", "layers.1.attn.k_proj.weight"),
        # The rows
        ("dataset.column_map.output=reply", "has no field 'reply', which column_map names for 'output'; its fields are"),
        ("dataset.split=train[:0]", "dataset is empty"),
        ("batch_size=64", "global batch of 64 (batch_size 64 x gradient_accumulation_steps 1 x 1 ranks) is larger than the dataset of 41 samples"),
        ("tokenizer.max_seq_len=2", "none of the 41 samples"),
    ],
)  # fmt: skip
def test_override_is_rejected(error_of, overrides, message):
    error = error_of(*overrides.split())
    assert message in error or re.search(message, error)
    assert "do_not_show" not in error


def test_file_is_rejected(error_of):
    cosine = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"}
    assert re.search("lr_scheduler: .*num_warmup_steps", error_of(lr_scheduler=cosine))


def test_unknown_config_name_is_rejected():
    import finch_full_finetune

    with mock.patch("sys.argv", ["x", "--config", "stories260k/tofu_finsh"]), pytest.raises(SystemExit) as exit_:
        finch_full_finetune.recipe_main()
    assert exit_.value.code == 1


def test_incomplete_checkpoint_folder_is_rejected(error_of, base_folder, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    for path in base_folder.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "model-00001-of-00002.safetensors").write_bytes((base_folder / "model.safetensors").read_bytes())
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    files = "checkpointer.checkpoint_files=[model-00001-of-00002.safetensors]"
    overrides = (f"checkpointer.checkpoint_dir={folder}", files)
    message = "model.safetensors.index.json lists model-00002-of-00002.safetensors, which is not in"
    assert message in error_of(*overrides)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"no tensors here")
    assert "is not a complete safetensors file" in error_of(*overrides)


def test_weights_that_could_run_code_are_not_unpickled(error_of, base_folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((base_folder / "config.json").read_bytes())
    torch.save({"model.norm.weight": torch.ones(32), "evil": Evil()}, folder / "pytorch_model.bin")
    assert "cannot be read as weights only" in error_of(
        f"checkpointer.checkpoint_dir={folder}", "checkpointer.checkpoint_files=[pytorch_model.bin]"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("lines", "override", "message"),
    [
        ([{"question": "no answer"}], "dataset.packed=False", "dataset: row 3 of {file} has no field 'answer'"),
        ([{"question": "no answer"}], "dataset.packed=True", "dataset: row 3 of {file} has no field 'answer'"),
        (['{"question": '], "dataset.packed=False", "dataset: row 3 of {file} is not JSON"),
        (None, "dataset.packed=False", "dataset is empty: {file} has no rows"),
    ],
)
def test_broken_rows_are_named_with_their_file(error_of, tmp_path, lines, override, message):
    good = {"question": "a", "answer": "the bird"}
    rows = [] if lines is None else [good, good, *lines, *[good] * 5]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    assert message.format(file=file) in error_of(f"dataset.data_files={file}", override)


def test_long_prompts_are_counted(tmp_path, base_folder, rows_file):
    config = make_config(base_folder, rows_file, tmp_path / "run", max_steps_per_epoch=1)
    done = run_here(tmp_path, config, "tokenizer.max_seq_len=5")
    assert done.returncode == 0, done.output
    counted = int(done.output.split("dataset: ")[1].split(" of 41 samples have no target token")[0])
    assert 0 < counted < 41


FAILING_DATASET = """
import os
from torchtune.datasets import instruct_dataset

class Failing:
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        if index == {index} and os.environ.get("RANK", "0") == "{rank}":
            raise {error}
        return self.inner[index]

def dataset(tokenizer, **kwargs):
    return Failing(instruct_dataset(tokenizer, **kwargs))
"""


def test_broken_row_in_a_loader_process_is_one_line(tmp_path, base_folder, rows_file):
    changes = {"check_dataset": False, "num_workers": 1, "lr_scheduler": None}
    config = make_config(base_folder, rows_file, tmp_path / "run", **changes)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": "a", "answer": "x"}) + "\n" for _ in range(8)))
    (tmp_path / "failing.py").write_text(FAILING_DATASET.format(index=5, rank=0, error="KeyError('messages')"))
    config["dataset"].update(_component_="failing.dataset", data_files=str(file))
    done = tune_run(tmp_path, config)
    assert done.error().startswith(f"finch: error: dataset: row 6 of {file} cannot be used (KeyError: 'messages')")
    assert "Traceback" not in done.output


def test_failing_rank_ends_the_other(tmp_path, base_folder, rows_file):
    (tmp_path / "failing.py").write_text(FAILING_DATASET.format(index=20, rank=1, error="RuntimeError('rank 1 fails')"))
    config = make_config(base_folder, rows_file, tmp_path / "run", check_dataset=False, batch_size=2, lr_scheduler=None)
    config["dataset"]["_component_"] = "failing.dataset"
    done = tune_run(tmp_path, config, ranks=2, timeout=100)  # far below the half hour that a collective waits
    assert done.returncode != 0
    assert "dataset: row 21 of" in done.error()
    assert "rank 1 fails" in done.error()


def test_two_ranks_report_a_mistake_once(tmp_path, base_folder, rows_file):
    model = {"_component_": "torchtune.models.llama2.llama2", **llama_args(num_layers=3)}
    config = make_config(base_folder, rows_file, tmp_path / "run", model=model)
    done = tune_run(tmp_path, config, ranks=2, timeout=100)
    assert done.returncode != 0
    assert "model does not fit" in done.error()
    assert done.output.index("finch: error") < done.output.index("FAILED")  # torchrun's summary comes later


def test_process_group_is_not_stopped_after_an_error(tmp_path, base_folder, rows_file, monkeypatch):
    """NCCL's shutdown waits for ranks that may be gone: only a run that succeeded stops the group."""
    stopped = []
    monkeypatch.setattr("finch.distributed.parallel.stop", lambda: stopped.append(True))
    config = make_config(base_folder, rows_file, tmp_path / "run", clip_grad_norm=None, log_every_n_steps=50)
    config["optimizer"]["lr"] = 1e30
    config["lr_scheduler"] = {"_component_": "finch.FinchLR", "eta_max": 1e30, "init": "first_batch"}
    failed = run_here(tmp_path, config)
    assert failed.returncode == 1
    assert "the loss was not finite at a step after step" in failed.error()
    assert stopped == []
    assert len(failed.metrics()) >= 1  # the steps before the error are written, though fewer than fifty
    good = make_config(base_folder, rows_file, tmp_path / "good", max_steps_per_epoch=1)
    assert run_here(tmp_path, good).returncode == 0
    assert stopped == [True]


def test_secrets_reach_no_file_and_no_log(tmp_path, base_folder, rows_file):
    config = make_config(base_folder, rows_file, tmp_path / "run", max_steps_per_epoch=1, my_token="hf_do_not_show")
    config["dataset"]["token"] = "${my_token}"
    done = run_here(tmp_path, config)
    assert done.returncode == 0, done.output
    assert "hf_do_not_show" not in done.output
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"hf_do_not_show" not in path.read_bytes(), path
    assert "token: '***'" in (tmp_path / "run" / "config.yaml").read_text()


def test_folder_of_another_run_is_left_as_it_is(tmp_path, base_folder, rows_file):
    config = make_config(base_folder, rows_file, tmp_path / "run", max_steps_per_epoch=2)
    resume = "resume_from_checkpoint=True"
    assert "holds no checkpoint" in run_here(tmp_path, config, resume).error()
    first = run_here(tmp_path, config)
    assert first.returncode == 0, first.output

    def modified():
        return {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.name != run_files.LOCK}

    before = modified()
    for overrides, message in (
        ([], "already holds a run; set resume_from_checkpoint=True"),
        ([resume, "batch_size=3"], "belongs to a run with global batch=4, this config says 3"),
        ([resume, "dtype=bf16"], "belongs to a run with dtype="),
        ([resume, "tokenizer.max_seq_len=9"], "belongs to a run with number of target tokens="),
        ([resume, "model.max_seq_len=32"], "belongs to a run with model="),
        ([f"output_dir={base_folder / 'run'}"], "lies in checkpointer.checkpoint_dir"),
    ):
        assert message in run_here(tmp_path, config, *overrides).error()
    assert modified() == before
    assert run_here(tmp_path, config, "overwrite=True").returncode == 0


def test_nonfinite_loss_ends_the_run(tmp_path, base_folder, rows_file):
    config = make_config(base_folder, rows_file, tmp_path / "run", clip_grad_norm=None, lr_scheduler=None)
    config["optimizer"]["lr"] = 1e30
    assert "the loss was not finite at step" in run_here(tmp_path, config).error()
