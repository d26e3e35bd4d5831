"""A user's mistake fails early with a one-line error that names key, value and remedy; no part of a run is written."""

import os
import re
import shutil

import datasets
import pytest
import torch
from helpers.evaluation import read_lines
from helpers.rows import write_lines
from helpers.runs import LORA, LORA_MODEL, finished, llama_args, mixed, run_here, run_ranks
from safetensors.torch import load_file, save_file
from torchtune.models.llama2 import llama2

from finch.base import run_files
from finch.base.errors import UserError
from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys
from finch.distributed import fsdp

KL, CACHED = "kl_penalty=finch.regularization.KL", "kl_penalty.reference=cached"
BUDGET = "forgetting_budget.probe=texts"


@pytest.fixture
def config(tmp_path, rows_file, tiny):
    """A good config: "plain", with "lora", a "mixture" of 41 and 17 rows, "probes" of three kinds, or a "replay" of measured prompts."""

    def make(kind="plain", **changes):
        config = tiny(**changes)
        if kind == "lora":
            config["model"] = LORA_MODEL
        if kind == "mixture":
            return mixed(config, tmp_path)
        if kind == "probes":
            texts = write_lines(
                tmp_path / "texts.jsonl", *[{"text": row["answer"]} for row in read_lines(rows_file)[:9]]
            )
            own = write_lines(tmp_path / "own.jsonl", *[{**row, "skill": "code"} for row in read_lines(rows_file)[:9]])
            config["probes"] = {
                "texts": {"data_files": texts},
                "facts": {"data_files": str(rows_file), "kind": "question_answer"},
                "own": {"data_files": own, "kind": "self", "rows": 5, "max_new_tokens": 6},
            }
        if kind == "replay":
            own = {"data_files": str(rows_file), "kind": "self", "max_new_tokens": 6}
            config |= {"dataset_validation": config["dataset"], "probes": {"own": own}}
            config["self_replay"] = {"prompts": str(rows_file), "max_new_tokens": 6}
        return config

    return make


@pytest.fixture
def error_of(tmp_path):
    """Runs the recipe, which must fail before anything is written; returns the error line."""

    def run(config, *overrides, recipe="finch_full_finetune"):
        done = run_here(tmp_path, config, *overrides, recipe=recipe)
        assert done.returncode == 1
        assert not (tmp_path / "run").exists(), list((tmp_path / "run").rglob("*"))
        assert "Traceback" not in done.output
        return done.error()

    return run


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        # Unknown keys, components and files
        ("plain", "optimizer.lrr=3", "unknown key optimizer.lrr, did you mean optimizer.lr?"),
        ("plain", "~nothing", "Could not find key nothing"),
        ("plain", "model=torchtune.models.llama2.llama3", "model._component_=torchtune.models.llama2.llama3 does not exist, did you mean llama2?"),
        ("plain", "checkpointer.checkpoint_files=[model-7.safetensors]", "has no model-7.safetensors, which checkpointer.checkpoint_files names; download it"),
        ("plain", "tokenizer.path=/nowhere/tokenizer.model", "tokenizer: .*/nowhere/tokenizer.model"),
        # Values; all keys' are in tests/config
        ("plain", "collate_fn=null", "collate_fn has no value"),
        *([] if torch.cuda.is_available() else [("plain", "device=cuda", "device=cuda needs a CUDA device, and torch sees none here")]),
        ("plain", "lr_scheduler=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup ~lr_scheduler.eta_max ~lr_scheduler.init", "lr_scheduler: .*num_warmup_steps"),
        ("plain", "lr_scheduler.decay=1", "lr_scheduler.decay=1 must be number >= 0 and < 1: the last share of the steps"),
        ("plain", "lr_scheduler=null lr_scheduler.decay=-0.5", "lr_scheduler: decay=-0.5 must lie in [0, 1)"),
        ("plain", "optimizer.lr=abc", "optimizer.lr=abc must be a number above 0"),
        ("plain", "optimizer.lr=1e-4, lr_scheduler=null", "optimizer.lr=1e-4, must be a number above 0"),
        ("plain", "optimizer.betas=[0.9,7]", "optimizer: Invalid beta parameter at index 1"),
        ("plain", "custom_sharded_layers=[tok_embedding]", "names tok_embedding, which the model lacks, did you mean tok_embeddings?"),
        # The loss and its penalties
        ("plain", "loss.label_smoothing=0.5", "loss.label_smoothing=0.5 changes plain cross-entropy"),
        ("plain", "loss=finch.objectives.TALRR", "did you mean TALR"),
        ("plain", "loss=finch.objectives.TALR loss.tau=soon", "loss.tau=soon must be number > 0, auto, exact or lagged"),
        ("plain", "regularizer=finch.regularization.L2 regularizer.form=cubic", "regularizer.form=cubic must be sum, half or mean"),
        ("plain", "regularizer=finch.regularization.KL", "regularizer._component_=finch.regularization.KL has its"),
        ("plain", f"{KL} kl_penalty.reference=base", "kl_penalty.reference=base must be online or cached"),
        ("plain", f"{KL} {CACHED} kl_penalty.top_k=65", "kl_penalty.top_k=65 is above the model's vocabulary of 64 tokens"),
        ("plain", "kl_penalty=finch.regularization.L2", "is not finch.regularization.KL"),
        # Combinations
        ("plain", "optimizer_in_bwd=True clip_grad_norm=null gradient_accumulation_steps=2", "optimizer_in_bwd=True excludes gradient_accumulation_steps=2"),
        ("plain", "optimizer_in_bwd=True clip_grad_norm=null regularizer=finch.regularization.L2", "optimizer_in_bwd=True excludes regularizer=finch.regularization.L2"),
        ("plain", "ac_mode=selective", "ac_mode=selective needs ac_option; set it to n"),
        ("plain", "enable_activation_offloading=True", "enable_activation_offloading=True needs device=cuda"),
        ("plain", "dtype=bf16_mixed optimizer=bitsandbytes.optim.AdamW8bit ~optimizer.fused", "bitsandbytes.optim.AdamW8bit does not update sharded weights"),
        ("plain", "dtype=bf16_mixed optimizer=torch.optim.Adafactor ~optimizer.fused", "torch.optim.Adafactor does not update sharded weights"),
        ("plain", "collate_fn=torchtune.data.padded_collate", "collate_fn=torchtune.data.padded_collate does not take padding_idx and ignore_idx"),
        ("plain", "validate_every_n_steps=2", "validate_every_n_steps=2 needs dataset_validation; set it"),
        ("plain", "tensor_parallel_dim=2", "tensor_parallel_dim=2 needs tensor_parallel_plan"),
        ("plain", "compile=True tensor_parallel_dim=2 tensor_parallel_plan=torchtune.models.llama3.base_llama_tp_plan", "compile=True excludes tensor_parallel_dim=2"),
        ("plain", "dtype=bf16_stochastic data_parallel_replicate_dim=2", "data_parallel_replicate_dim=2 excludes stochastic rounding"),
        ("plain", "~optimizer.fused optimizer=torchao.optim._AdamW optimizer.bf16_stochastic_round=True tensor_parallel_dim=2 tensor_parallel_plan=torchtune.models.llama3.base_llama_tp_plan", "tensor_parallel_dim=2 excludes stochastic rounding"),
        # The model
        ("plain", "model.intermediate_dim=40", "layers.0.mlp.w1.weight has shape [48, 32], the model expects [40, 32]"),
        ("lora", "model.lora_attn_modules=[q_proj,o_proj]", "model.lora_attn_modules names o_proj; torchtune's names are"),
        ("lora", "regularizer=finch.regularization.L2", "regularizer=finch.regularization.L2 pulls weights"),
        # The rows
        ("plain", "dataset.column_map.output=reply", "has no field 'reply', which column_map names for 'output'; its fields are"),
        ("plain", "batch_size=64", "global batch of 64 (batch_size 64 x gradient_accumulation_steps 1 x 1 ranks) is larger than the dataset of 41 samples"),
        ("plain", "tokenizer.max_seq_len=2", "none of the 41 samples"),
        ("plain", "model.max_seq_len=12", "of 41 rows are longer than the 12 tokens of the model's context; tokenizer.max_seq_len=12 cuts them there"),
        ("mixture", "dataset[1].split=train[:0]", "general.jsonl (split train[:0]) has no rows"),
        ("mixture", "dataset[1].packed=True", "some entries of the list have packed=True and others not"),
        ("mixture", "batch_size=64", "is larger than an epoch of 51 samples"),
        # Self-replay
        ("plain", "self_replay.share=0", "self_replay.share=0 must be number > 0 and <= 1: replayed rows per row of the task"),
        ("plain", "self_replay.share=1.5", "self_replay.share=1.5 must be number"),
        ("plain", "self_replay.strength=-1", "self_replay.strength=-1 must be number >= 0"),
        ("plain", "self_replay.prompts=/nowhere.txt", "self_replay.prompts=/nowhere.txt does not exist"),
        ("plain", "self_replay.max_new_tokens=6 self_replay.cache=/dev/null/x", "/dev/null/x, for the answers of self_replay, cannot be written; give another output_dir or self_replay.cache"),
        ("plain", "self_replay.rows=4", "a prompt of the model's own has 1 tokens and its answer of up to 64, the context has 64; lower self_replay.max_new_tokens"),
        ("plain", "dataset.packed=True self_replay.rows=4", "self_replay adds rows to each micro-batch, which dataset.packed=True fills"),
        ("replay", "", "row 1 of dataset_validation has a prompt of self_replay.prompts="),
        ("replay", "dataset_validation=null", "row 1 of probes.own has a prompt of self_replay.prompts="),
        # Probes, budget and selection
        ("probes", "probes.empty.kind=text", "probes.empty has no rows: set probes.empty.data_files"),
        ("probes", "probes.texts.kind=story", "probes.texts.kind=story must be auto, text, question_answer, multiple_choice or self"),
        ("probes", "probes.texts.kind=multiple_choice", "probes.texts: row 1 of"),
        ("probes", "forgetting_budget.probe=text forgetting_budget.max_increase=1", "there is no probe text, did you mean texts?"),
        ("probes", f"{BUDGET} forgetting_budget.max_increase=1 forgetting_budget.metric=kl", "forgetting_budget.metric=kl needs a probe of kind self"),
        ("probes", "forgetting_budget.probe=own forgetting_budget.max_increase=1 forgetting_budget.metric=kl/cod", "forgetting_budget.metric: probes.own has no kl/cod, did you mean code?"),
        ("probes", "early_stopping.patience=0", "early_stopping.patience=0 must be int >= 1: readings in a row"),
        ("probes", "early_stopping.patience=2 select_by=probe/facts/loss save_last_epoch_only=True", "excludes save_last_epoch_only=True, which does not keep the best"),
        ("probes", "early_stopping.patience=2", "needs a validation loss, or another metric in select_by: set dataset_validation"),
        ("probes", "select_by=probe/texts/loss/code", "select_by: probes.texts has no loss/code; its groups are none"),
        ("probes", "select_by=probe/own/loss/code", "select_by: probes.own has no loss/code"),
        ("probes", "probes.own.group_by=topic", "probes.own.group_by=topic: the rows have no such field; they have question, answer, skill"),
        ("probes", "select_by=probe/fact/loss", "select_by=probe/fact/loss: there is no probe fact, did you mean facts?"),
        ("probes", "select_by=probe/texts/accuracy", "select_by=probe/texts/accuracy: probes.texts is of kind text, which has no accuracy"),
        ("probes", "select_by=probe/own/accuracy", "select_by=probe/own/accuracy: probes.own.kind=self has no accuracy"),
        ("probes", "select_by=validation_loss", "there is no such validation loss; known are none, since there is no dataset_validation"),
        ("probes", "probes.own.max_new_tokens=90", "tokens and its answer of up to 90, the context has 64"),
        ("probes", "tokenizer.max_seq_len=5 ~probes.facts", "the context has 5; remove that row"),
    ],
)  # fmt: skip
def test_override_is_rejected(config, error_of, kind, overrides, message):
    recipe = LORA if kind == "lora" else "finch_full_finetune"
    error = error_of(config(kind), *overrides.split(), recipe=recipe)
    assert message in error or re.search(message, error)


def test_file_is_rejected(config, error_of, tmp_path):
    assert "builds no LoRA layers; give the builder" in error_of(config(), recipe=LORA)
    named_twice = {**config("probes"), "dataset_validation": {"texts": config()["dataset"]}}
    assert "probes.texts and dataset_validation.texts have the same name" in error_of(named_twice)
    (tmp_path / "twice.yaml").write_text("probes:\n  one: {data_files: x.jsonl}\n  one: {data_files: y.jsonl}\n")
    with pytest.raises(UserError, match="found duplicate key one in line 3"):
        read(["--config", str(tmp_path / "twice.yaml")], FullFinetuneKeys)


def test_threshold_that_keeps_nothing_is_rejected(config, tmp_path):
    """Known once the pretrained model has been evaluated."""
    changes = ["loss._component_=finch.objectives.STM", "loss.threshold=1.0001"]
    assert "loss: STM with threshold=1.0001 keeps 0 of" in run_here(tmp_path, config(), *changes).error()


def test_gpu_that_another_process_fills_is_named_before_weights_are_loaded(config, tmp_path, monkeypatch):
    """Weights and AdamW's states are 12 bytes per parameter in fp32."""
    size = sum(weight.numel() for weight in llama2(**llama_args()).parameters())
    monkeypatch.setattr(fsdp, "free_memory", lambda device: 12 * size - 1)
    run = run_here(tmp_path, config(dtype="fp32"))
    assert re.search(
        r"device=cpu: GPU None of \S+ has .* free, weights and optimizer states need .* there; end", run.error()
    )
    assert "parameters loaded" not in run.output
    monkeypatch.setattr(fsdp, "free_memory", lambda device: 12 * size)
    assert run_here(tmp_path, config(dtype="fp32")).returncode == 0


def test_weights_that_could_run_code_are_not_unpickled(config, error_of, base_folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((base_folder / "config.json").read_bytes())
    torch.save({"model.norm.weight": torch.ones(32), "evil": Evil()}, folder / "pytorch_model.bin")
    overrides = (f"checkpointer.checkpoint_dir={folder}", "checkpointer.checkpoint_files=[pytorch_model.bin]")
    assert "cannot be read as weights only" in error_of(config(), *overrides)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, "dataset: row 3 of FILE has no field 'answer'"),
        ('{"question": ', "data_files=FILE: row 3 is not JSON"),
    ],
)
def test_broken_rows_are_named_with_their_file(config, error_of, tmp_path, row, message):
    good = {"question": "a", "answer": "the bird"}
    file = write_lines(tmp_path / "rows.jsonl", good, good, row, *[good] * 5)
    assert message.replace("FILE", file) in error_of(config(), f"dataset.data_files={file}")


@pytest.mark.skipif(not datasets.__version__.startswith("4.7."), reason="this version reads such files")
def test_rows_without_a_field_are_counted(config, error_of, tmp_path):
    good, bad = {"question": "a", "answer": "the bird"}, {"question": "a"}
    file = write_lines(tmp_path / "rows.jsonl", good, bad, good, *[bad] * 3)
    message = f"dataset: 4 rows of {file} (2, 4, 5, ...) have no field 'answer', or null in it; fix or remove them"
    assert message in error_of(config(), f"dataset.data_files={file}")


@pytest.mark.parametrize(("ranks", "changes"), [(1, {"num_workers": 1}), (2, {"batch_size": 2})])
def test_broken_row_of_one_rank_is_one_line(ranks, changes, config, tmp_path):
    """In a data-loader process too. A rank that fails ends the others, which would wait half an hour for it."""
    config = config(check_dataset=False, lr_scheduler=None, **changes)
    config["dataset"] |= {"_component_": "helpers.acting_rows.dataset", "fails_at": 20}
    done = run_ranks(ranks, tmp_path, config)
    assert done.returncode != 0
    file = config["dataset"]["data_files"]
    assert done.error().startswith(f"finch: error: dataset: row 21 of {file} cannot be used (KeyError: 'messages')")
    assert "Traceback" not in done.output


@pytest.mark.parametrize("what", ["rows of dataset", "pretrained weights", "settings"])
def test_a_rank_that_reads_an_older_copy_is_named(what, config, base_folder, tmp_path):
    """As on a node whose disk holds one: the others must not train with it without a word."""
    config = config(batch_size=2)
    for rank in (0, 1):
        folder = tmp_path / f"disk_{rank}"
        shutil.copytree(base_folder, folder)
        shutil.copyfile(config["dataset"]["data_files"], folder / "rows.jsonl")
    if what == "pretrained weights":
        weights = load_file(tmp_path / "disk_1" / "model.safetensors")
        weights["model.norm.weight"][0] += 1
        save_file(weights, tmp_path / "disk_1" / "model.safetensors", {"format": "pt"})
    elif what == "settings":
        config["optimizer"]["lr"] = "${oc.decode:1e-${oc.env:RANK}}"
    else:
        first, *others = read_lines(tmp_path / "disk_1" / "rows.jsonl")
        write_lines(tmp_path / "disk_1" / "rows.jsonl", {**first, "answer": "the bird"}, *others)
    config["checkpointer"]["checkpoint_dir"] = str(tmp_path / "disk_${oc.env:RANK}")
    config["dataset"]["data_files"] = str(tmp_path / "disk_${oc.env:RANK}" / "rows.jsonl")
    done = run_ranks(2, tmp_path, config)
    assert re.match(f"finch: error: rank 1 on .* has other {what} than rank 0 on ", done.error())
    assert "parameters loaded" not in done.output


def test_process_group_is_not_stopped_after_an_error(config, tmp_path, monkeypatch):
    """NCCL's shutdown waits for ranks that may be gone: only a run that succeeded stops the group."""
    stopped = []
    monkeypatch.setattr("finch.distributed.parallel.stop", lambda: stopped.append(True))
    assert run_here(tmp_path, config(), "model.num_layers=3").returncode == 1
    assert stopped == []
    finished(tmp_path, config(max_steps_per_epoch=1))
    assert stopped == [True]


def test_secrets_reach_no_file_and_no_log(config, tmp_path):
    config = config(max_steps_per_epoch=1, my_token="hf_do_not_show")
    config["dataset"]["token"] = "${my_token}"
    done = finished(tmp_path, config)
    assert "hf_do_not_show" not in done.output
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"hf_do_not_show" not in path.read_bytes(), path
    assert "token: '***'" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["run", "run/deeper"])
def test_a_loop_of_links_is_no_output_folder(name, config, tmp_path):
    (tmp_path / "run").symlink_to("other")
    (tmp_path / "other").symlink_to("run")
    message = f"output_dir={tmp_path / name} is a loop of links; give another folder"
    assert message in run_here(tmp_path, config(), f"output_dir={tmp_path / name}").error()


def test_metrics_that_are_a_loop_of_links_are_one_line(config, tmp_path):
    file = finished(tmp_path, config(max_steps_per_epoch=1)).folder / "metrics.jsonl"
    file.unlink()
    file.symlink_to(file.name)
    done = run_here(tmp_path, config(max_steps_per_epoch=1), "resume_from_checkpoint=True", "epochs=2")
    assert f"{file} cannot be read (Too many levels of symbolic links); restore it" in done.error()


def test_folder_of_another_run_is_left_as_it_is(config, base_folder, tmp_path):
    config = config(max_steps_per_epoch=2)
    resume = "resume_from_checkpoint=True"
    assert "holds no checkpoint" in run_here(tmp_path, config, resume).error()
    first = finished(tmp_path, config)

    def modified():
        return {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.name != run_files.LOCK}

    before, other = modified(), tmp_path / "other" / base_folder.name
    shutil.copytree(base_folder, other)
    kept = load_file(other / "model.safetensors")
    save_file({**kept, "model.norm.weight": kept["model.norm.weight"] + 0.1}, other / "model.safetensors")
    for overrides, message in (
        ([], "already holds a run; set resume_from_checkpoint=True"),
        ([resume, "batch_size=3"], "belongs to a run with global batch=4, this config says 3"),
        ([resume, "dtype=bf16"], "belongs to a run with dtype="),
        ([resume, "tokenizer.max_seq_len=9"], "belongs to a run with number of target tokens="),
        ([resume, "model.max_seq_len=32"], "belongs to a run with model="),
        ([resume, "loss=finch.objectives.FLOW"], "belongs to a run with loss="),
        ([resume, f"checkpointer.checkpoint_dir={other}"], "belongs to a run with digest of the weights="),
        ([f"output_dir={base_folder / 'run'}"], "lies in checkpointer.checkpoint_dir"),
    ):
        assert message in run_here(tmp_path, config, *overrides).error()
    assert modified() == before
    finished(tmp_path, config, "overwrite=True")
