"""A user's mistake fails early with a one-line error that names key, value and remedy; no part of a run is written."""

import json
import os
import re
from unittest import mock

import pytest
import torch
from helpers.runs import LORA, llama_args, make_config, run_here, run_ranks, tune_run, write_rows

from benchmarks.tiny_job import instruct_dataset
from finch import run_files
from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys
from finch.errors import UserError

LORA_MODEL = {"_component_": "torchtune.models.llama2.lora_llama2", **llama_args(), "lora_rank": 4, "lora_alpha": 8}
LORA_MODEL["lora_attn_modules"] = ["q_proj"]
KL, CACHED = "kl_penalty=finch.regularization.KL", "kl_penalty.reference=cached"
BUDGET = "forgetting_budget.probe=texts"
PLAN = "tensor_parallel_plan=torchtune.models.llama3.base_llama_tp_plan"


@pytest.fixture
def config(tmp_path, base_folder, rows_file):
    """A good config: "plain", with "lora", a "mixture" of 41 and 17 rows, the "first" of it only, or "probes" of three kinds."""

    def make(kind="plain", **changes):
        config = make_config(base_folder, rows_file, tmp_path / "run", **changes)
        if kind == "lora":
            config["model"] = LORA_MODEL
        if kind in ("mixture", "first"):
            write_rows(tmp_path / "general.jsonl", 17)
            files = {rows_file: 0.8, tmp_path / "general.jsonl": 0.2}
            config["dataset"] = [{**instruct_dataset(file), "weight": weight} for file, weight in files.items()]
            config["dataset"] = config["dataset"][: 1 if kind == "first" else 2]
        if kind == "probes":
            rows = [json.loads(line) for line in rows_file.read_text().splitlines()[:9]]
            (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": row["answer"]}) + "\n" for row in rows))
            config["probes"] = {
                "texts": {"data_files": str(tmp_path / "texts.jsonl")},
                "facts": {"data_files": str(rows_file), "kind": "question_answer"},
                "own": {"data_files": str(rows_file), "kind": "self", "rows": 5, "max_new_tokens": 6},
            }
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
        ("plain", "lr_scheduler.eta_maxx=3", "unknown key lr_scheduler.eta_maxx, did you mean lr_scheduler.eta_max?"),
        ("plain", "hf_token=hf_do_not_show", "unknown key hf_token=***"),
        ("plain", "epochs", "key=value"),
        ("plain", "~nothing", "Could not find key nothing"),
        ("plain", "model=torchtune.models.llama2.llama3", "model._component_=torchtune.models.llama2.llama3 does not exist, did you mean llama2?"),
        ("plain", "checkpointer.checkpoint_dir=/nowhere", "checkpointer.checkpoint_dir=/nowhere is not a folder"),
        ("plain", "checkpointer.checkpoint_files=[model-7.safetensors]", "checkpointer.checkpoint_files names model-7.safetensors, which is not in"),
        ("plain", "tokenizer.path=/nowhere/tokenizer.model", "tokenizer: .*/nowhere/tokenizer.model"),
        ("plain", "dataset.data_files=/nowhere/rows.jsonl", "/nowhere/rows.jsonl"),
        # Values; all keys' are in tests/config
        ("plain", "batch_size=0", "batch_size=0 must be int >= 1"),
        ("plain", "collate_fn=null", "collate_fn has no value"),
        *([] if torch.cuda.is_available() else [("plain", "device=cuda", "device=cuda needs a CUDA device, and torch sees none here")]),
        ("plain", "lr_scheduler.eta_max=-1.0", "lr_scheduler.eta_max=-1.0 must be number > 0 or auto"),
        ("plain", "lr_scheduler.eta_max=abc", "lr_scheduler.eta_max=abc must be number > 0 or auto"),
        ("plain", "lr_scheduler=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup ~lr_scheduler.eta_max ~lr_scheduler.init", "lr_scheduler: .*num_warmup_steps"),
        ("plain", "optimizer.lr=0", "optimizer.lr=0 must be a number above 0"),
        ("plain", "optimizer.lr=abc", "optimizer.lr=abc must be a number above 0"),
        ("plain", "optimizer.betas=[0.9,7]", "optimizer: Invalid beta parameter at index 1"),
        ("plain", "custom_sharded_layers=[tok_embedding]", "names tok_embedding, which the model does not have, did you mean tok_embeddings?"),
        # The loss and its penalties
        ("plain", "loss.label_smoothing=0.5", "loss.label_smoothing=0.5 would change plain cross-entropy"),
        ("plain", "loss=torch.nn.MSELoss", "is not a plain cross-entropy"),
        ("plain", "loss=finch.objectives.TALRR", "did you mean TALR"),
        ("plain", "loss=finch.objectives.TALR loss.tau=soon", "loss.tau=soon must be number > 0, auto, exact or lagged"),
        ("plain", "regularizer=finch.regularization.L2 regularizer.form=cubic", "regularizer.form=cubic must be sum, half or mean"),
        ("plain", "regularizer=finch.regularization.KL", "regularizer._component_=finch.regularization.KL has a"),
        ("plain", f"{KL} kl_penalty.strength=-1", "kl_penalty.strength=-1 must be number >= 0"),
        ("plain", f"{KL} kl_penalty.reference=base", "kl_penalty.reference=base must be online or cached"),
        ("plain", f"{KL} {CACHED} kl_penalty.top_k=0", "kl_penalty.top_k=0 must be int >= 1 or null"),
        ("plain", f"{KL} {CACHED} kl_penalty.top_k=65", "kl_penalty.top_k=65 is above the model's vocabulary of 64 tokens"),
        ("plain", "kl_penalty=finch.regularization.L2", "is not finch.regularization.KL"),
        ("plain", f"{KL} kl_penalty.top=1", "unknown key kl_penalty.top"),
        # Combinations
        ("plain", "optimizer_in_bwd=True", "optimizer_in_bwd=True excludes clip_grad_norm=1.0"),
        ("plain", "optimizer_in_bwd=True clip_grad_norm=null gradient_accumulation_steps=2", "optimizer_in_bwd=True excludes gradient_accumulation_steps=2"),
        ("plain", "optimizer_in_bwd=True clip_grad_norm=null regularizer=finch.regularization.L2", "optimizer_in_bwd=True excludes regularizer=finch.regularization.L2"),
        ("plain", "ac_mode=selective", "ac_mode=selective needs ac_option; set it to op, or to n"),
        ("plain", "enable_activation_offloading=True", "enable_activation_offloading=True needs device=cuda"),
        ("plain", "dtype=bf16_stochastic optimizer=torch.optim.SGD ~optimizer.fused", "optimizer._component_=torch.optim.SGD cannot round stochastically"),
        ("plain", "dtype=bf16_mixed optimizer=bitsandbytes.optim.AdamW8bit ~optimizer.fused", "bitsandbytes.optim.AdamW8bit does not update sharded weights"),
        ("plain", "data_parallel_replicate_dim=2", "does not divide the 1 rank that were started"),
        ("plain", "tensor_parallel_dim=2", "tensor_parallel_dim=2 needs tensor_parallel_plan"),
        ("plain", "data_parallel_shard_dim=0", "data_parallel_shard_dim=0 must be -1 or int >= 1"),
        # The model
        ("plain", "model.intermediate_dim=40", "model does not fit checkpointer.checkpoint_dir"),
        ("plain", "model.intermediate_dim=40", "layers.0.mlp.w1.weight has shape [48, 32], the model expects [40, 32]"),
        ("plain", "model.num_layers=1", "layers.1.attn.k_proj.weight"),
        ("lora", "model.lora_attn_modules=[q_proj,o_proj]", "model.lora_attn_modules names o_proj; torchtune's names are"),
        ("lora", "model.quantize_base=True", "model.quantize_base=True (QLoRA) is not supported"),
        ("lora", "regularizer=finch.regularization.L2", "regularizer=finch.regularization.L2 pulls weights"),
        ("lora", f"tensor_parallel_dim=2 {PLAN}", "does not cut LoRA layers"),
        # The rows
        ("plain", "dataset.column_map.output=reply", "has no field 'reply', which column_map names for 'output'; its fields are"),
        ("plain", "dataset.split=train[:0]", "dataset is empty"),
        ("plain", "batch_size=64", "global batch of 64 (batch_size 64 x gradient_accumulation_steps 1 x 1 ranks) is larger than the dataset of 41 samples"),
        ("plain", "tokenizer.max_seq_len=2", "none of the 41 samples"),
        ("mixture", "dataset[1].weight=0", "dataset[1].weight=0 must be a number above 0"),
        ("mixture", "dataset[0].weight=-1", "dataset[0].weight=-1 must be a number above 0"),
        ("mixture", "dataset[1].weight=x", "dataset[1].weight=x must be a number above 0"),
        ("mixture", "dataset[1].weight=null", "dataset[1] has no weight, but dataset[0].weight=0.8: give every entry"),
        ("mixture", "dataset[1].weight=0.001", "dataset[1].weight=0.001: an epoch of 41 samples would draw none of its rows"),
        ("mixture", "dataset[1].split=train[:0]", "general.jsonl (split train[:0]) has no rows"),
        ("mixture", "dataset[2].weight=1", "dataset[2].weight=1: dataset has 2 entries, [0] to [1]"),
        ("mixture", "dataset[1].packed=True", "some entries of the list have packed=True and others not"),
        ("mixture", "batch_size=64", "is larger than an epoch of 51 samples"),
        ("first", "", "dataset[0].weight=0.8: dataset has one entry"),
        # Probes, budget and selection
        ("probes", "probes.empty.kind=text", "probes.empty has no rows: set probes.empty.data_files"),
        ("probes", "probes.texts.kind=story", "probes.texts.kind=story must be auto, text, question_answer, multiple_choice or self"),
        ("probes", "probes.texts.row=3", "unknown key probes.texts.row=3, did you mean probes.texts.rows?"),
        ("probes", "probes.texts.kind=question_answer", "probes.texts.kind=question_answer, but the rows look like text"),
        ("probes", "probes.texts.data_files=/nowhere.jsonl", "probes.texts.data_files=/nowhere.jsonl does not exist"),
        ("probes", "probes.texts.kind=multiple_choice", "probes.texts: row 1 of"),
        ("probes", "forgetting_budget.probe=text forgetting_budget.max_increase=1", "there is no probe text, did you mean texts?"),
        ("probes", BUDGET, "forgetting_budget.max_increase is missing"),
        ("probes", f"{BUDGET} forgetting_budget.max_increase=1 forgetting_budget.metric=kl", "forgetting_budget.metric=kl needs a probe of kind self"),
        ("probes", "select_by=probe/fact/loss", "select_by=probe/fact/loss: there is no probe fact, did you mean facts?"),
        ("probes", "select_by=probe/texts/accuracy", "select_by=probe/texts/accuracy: probes.texts is of kind text, which has no accuracy"),
        ("probes", "select_by=probe/own/accuracy", "select_by=probe/own/accuracy: probes.own.kind=self has no accuracy"),
        ("probes", "select_by=validation_loss", "there is no such validation loss; known are none, since there is no dataset_validation"),
        ("probes", "select_by=loss", "select_by=loss must be validation_loss, validation/NAME/loss"),
        ("probes", "probes.own.max_new_tokens=90", "tokens and its answer of up to 90, the context has 64"),
        ("probes", "tokenizer.max_seq_len=5 ~probes.facts", "the context has 5; remove that row"),
    ],
)  # fmt: skip
def test_override_is_rejected(config, error_of, kind, overrides, message):
    recipe = LORA if kind == "lora" else "finch_full_finetune"
    error = error_of(config(kind), *overrides.split(), recipe=recipe)
    assert message in error or re.search(message, error)
    assert "do_not_show" not in error


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


def test_unknown_config_name_is_rejected():
    import finch_full_finetune

    with mock.patch("sys.argv", ["x", "--config", "stories260k/tofu_finsh"]), pytest.raises(SystemExit) as exit_:
        finch_full_finetune.recipe_main()
    assert exit_.value.code == 1


def test_incomplete_checkpoint_folder_is_rejected(config, error_of, base_folder, tmp_path):
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
    assert message in error_of(config(), *overrides)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"no tensors here")
    assert "is not a complete safetensors file" in error_of(config(), *overrides)


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
    ("lines", "override", "message"),
    [
        ([{"question": "no answer"}], "dataset.packed=False", "dataset: row 3 of {file} has no field 'answer'"),
        ([{"question": "no answer"}], "dataset.packed=True", "dataset: row 3 of {file} has no field 'answer'"),
        (['{"question": '], "dataset.packed=False", "dataset: row 3 of {file} is not JSON"),
        (None, "dataset.packed=False", "dataset is empty: {file} has no rows"),
    ],
)
def test_broken_rows_are_named_with_their_file(config, error_of, tmp_path, lines, override, message):
    good = {"question": "a", "answer": "the bird"}
    rows = [] if lines is None else [good, good, *lines, *[good] * 5]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    assert message.format(file=file) in error_of(config(), f"dataset.data_files={file}", override)


def test_long_prompts_are_counted(config, tmp_path):
    done = run_here(tmp_path, config(max_steps_per_epoch=1), "tokenizer.max_seq_len=5")
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
        if index == 20 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            raise KeyError("messages")
        return self.inner[index]

def dataset(tokenizer, **kwargs):
    return Failing(instruct_dataset(tokenizer, **kwargs))
"""


@pytest.mark.parametrize(("ranks", "changes"), [(1, {"num_workers": 1}), (2, {"batch_size": 2})])
def test_broken_row_of_one_rank_is_one_line(ranks, changes, config, tmp_path):
    """In a data-loader process too. A rank that fails ends the others, which would wait half an hour for it."""
    (tmp_path / "failing.py").write_text(FAILING_DATASET)
    config = config(check_dataset=False, lr_scheduler=None, **changes)
    config["dataset"]["_component_"] = "failing.dataset"
    done = run_ranks(ranks, tmp_path, config)
    assert done.returncode != 0
    file = config["dataset"]["data_files"]
    assert done.error().startswith(f"finch: error: dataset: row 21 of {file} cannot be used (KeyError: 'messages')")
    assert "Traceback" not in done.output


def test_two_ranks_report_a_mistake_once(config, tmp_path):
    """By the real torchrun."""
    model = {"_component_": "torchtune.models.llama2.llama2", **llama_args(num_layers=3)}
    done = tune_run(tmp_path, config(model=model), ranks=2)
    assert done.returncode != 0
    assert "model does not fit" in done.error()
    assert done.output.index("finch: error") < done.output.index("FAILED")  # torchrun's summary comes later


def test_process_group_is_not_stopped_after_an_error(config, tmp_path, monkeypatch):
    """NCCL's shutdown waits for ranks that may be gone: only a run that succeeded stops the group."""
    stopped = []
    monkeypatch.setattr("finch.distributed.parallel.stop", lambda: stopped.append(True))
    assert run_here(tmp_path, config(), "model.num_layers=3").returncode == 1
    assert stopped == []
    assert run_here(tmp_path, config(max_steps_per_epoch=1)).returncode == 0
    assert stopped == [True]


def test_secrets_reach_no_file_and_no_log(config, tmp_path):
    config = config(max_steps_per_epoch=1, my_token="hf_do_not_show")
    config["dataset"]["token"] = "${my_token}"
    done = run_here(tmp_path, config)
    assert done.returncode == 0, done.output
    assert "hf_do_not_show" not in done.output
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"hf_do_not_show" not in path.read_bytes(), path
    assert "token: '***'" in (tmp_path / "run" / "config.yaml").read_text()


def test_folder_of_another_run_is_left_as_it_is(config, base_folder, tmp_path):
    config = config(max_steps_per_epoch=2)
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
        ([resume, "loss=finch.objectives.FLOW"], "belongs to a run with loss="),
        ([f"output_dir={base_folder / 'run'}"], "lies in checkpointer.checkpoint_dir"),
    ):
        assert message in run_here(tmp_path, config, *overrides).error()
    assert modified() == before
    assert run_here(tmp_path, config, "overwrite=True").returncode == 0
