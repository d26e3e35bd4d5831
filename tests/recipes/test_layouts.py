"""A run is the same on every layout: equal to a few lines of plain torch in float64, and to one process on every mesh."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.causal_lm import train_plainly
from helpers.models import FAMILIES, save
from helpers.runs import (
    FULL,
    LORA,
    LORA_MODEL,
    assert_close_runs,
    assert_same_weights,
    finished,
    llama_args,
    make_config,
    relative_l2,
    run_here,
    run_ranks,
    weights,
    write_rows,
)
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torchtune.config import instantiate
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama2 import llama2
from torchtune.models.llama3 import base_llama_tp_plan
from torchtune.training import set_default_dtype

from finch.base.errors import UserError
from finch.distributed.tensor_parallel import check_plan
from finch.models.gemma2 import gemma2
from finch.models.qwen3 import qwen3_tp_plan
from finch.training.model import use_fast_rotary, use_fused_norm
from finch.weights.huggingface import HuggingFaceFolder

REPLAY = {"rows": 8, "max_new_tokens": 6, "strength": 2.0, "share": 1.0}
REPLAYED = {"self_replay": {**REPLAY, "share": 0.25}}
KL = {"_component_": "finch.regularization.KL", "strength": 2.0}
LLAMA_PLAN = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
QWEN3_PLAN = {"_component_": "finch.models.qwen3.qwen3_tp_plan"}
ONE_CALL = "helpers.one_call_recipe"
IN_BACKWARD = {"optimizer_in_bwd": True, "clip_grad_norm": None}


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "replay"), [(1, 4, None), (2, 2, None), (4, 1, None), (1, 4, REPLAY), (2, 2, REPLAY)]
)
def test_step_equals_plain_float64_torch_on_every_layout(ranks, micro_batches, replay, tmp_path, base_folder):
    """Invariance of docs: loss and update equal in float64 to 1e-12, micro-batches without any target token included; with replay to 2e-11: its
    divergence begins at 0, and Adam's first steps amplify the rounding of its gradient."""
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, 30, seed=5, without_targets=(0, 1, 7))
    changes = {"dtype": "fp64", "batch_size": 2, "gradient_accumulation_steps": micro_batches, "shuffle": False}
    if replay is not None:  # each step has all eight answers
        changes |= {"self_replay": replay, "max_steps_per_epoch": 3}
    config = make_config(base_folder, rows, tmp_path / "run", epochs=2, **changes)
    run = finished(tmp_path, config, ranks=ranks)
    assert "3 of 30 rows have no target token" in run.output
    reference, trained_weights = _float64_reference(base_folder, config)
    for name, expected in reference.items():
        assert run.column(name) == pytest.approx(expected, rel=1e-12 if replay is None else 2e-11), name
    assert relative_l2(weights(run.folder / "epoch_1"), trained_weights) < (1e-12 if replay is None else 2e-11)


@pytest.fixture
def config(tiny, tmp_path):
    """In float64, two epochs of 41 rows, 8 per step: the last step of an epoch has one row for all ranks."""

    def make(family=None, num_layers=2, **changes):
        config = tiny(**{"dtype": "fp64", "batch_size": 8, "epochs": 2, **changes})
        if family is not None:
            save(family, tmp_path / "base", num_hidden_layers=num_layers)
            config["model"] = FAMILIES[family].config(num_layers=num_layers)
            config["checkpointer"]["checkpoint_dir"] = str(tmp_path / "base")
        return config

    return make


# ranks; a model of another family; changes of the run in one process too; changes of the run on ranks
MESHES = {
    "hsdp": (4, None, {"kl_penalty": KL, **REPLAYED}, {"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": 2}),
    "replicate x tensor": (
        4,
        None,
        {"kl_penalty": KL},
        {"data_parallel_replicate_dim": 2, "tensor_parallel_dim": 2, "tensor_parallel_plan": LLAMA_PLAN}
        | {"batch_size": 2, "gradient_accumulation_steps": 2},
    ),
    "shard x tensor": (
        4,
        None,
        {"kl_penalty": KL, **REPLAYED},
        {"tensor_parallel_dim": 2, "tensor_parallel_plan": LLAMA_PLAN, "custom_sharded_layers": ["tok_embeddings"]}
        | {"batch_size": 4, "enable_activation_checkpointing": True},
    ),
    "no resharding": (2, None, {}, {"fsdp_reshard_after_forward": False, "fsdp_layers_per_group": 1}),
    # FSDP2 gathers four layers, then the other three, which the first four prefetch; a backward computes them anew.
    "groups of layers": (2, "llama", {"num_layers": 7}, {"enable_activation_checkpointing": True}),
    "one reduction": (
        2,
        None,
        {},
        {"fsdp_reduce_every_micro_batch": False, "batch_size": 1, "gradient_accumulation_steps": 4},
    ),
    "optimizer in the backward": (
        4,
        None,
        {"clip_grad_norm": None, **REPLAYED},
        {**IN_BACKWARD, "data_parallel_replicate_dim": 2},
    ),
    "lora": (2, None, {"model": LORA_MODEL, **REPLAYED}, {}),
    # A tied embedding stays in the root's group, where the output layer is used, even if the config wants it apart.
    "qwen3 tied": (2, "qwen3 tied", REPLAYED, {"custom_sharded_layers": ["tok_embeddings"]}),
    "qwen3 tied x tensor": (
        2,
        "qwen3 tied",
        {},
        {"tensor_parallel_dim": 2, "tensor_parallel_plan": QWEN3_PLAN, "batch_size": 8},
    ),
    "qwen3 x tensor": (2, "qwen3", {}, {"tensor_parallel_dim": 2, "tensor_parallel_plan": QWEN3_PLAN, "batch_size": 8}),
    "one call": (2, None, {"kl_penalty": KL, **REPLAYED}, {"enable_activation_checkpointing": True}),
    "one call, qwen3 x tensor": (
        2,
        "qwen3",
        {},
        {"tensor_parallel_dim": 2, "tensor_parallel_plan": QWEN3_PLAN, "batch_size": 8},
    ),
    "llama 3.1": (2, "llama 3.1", {}, {}),  # its rotary scaling is built anew after sharding
}


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_equals_one_process(name, config, trained, tmp_path):
    """Loss counted once, gradients clipped by the whole norm; and a checkpoint of the mesh goes on in one process."""
    ranks, family, changes, of_mesh = MESHES[name]
    recipe, of_ranks = (LORA, LORA) if name == "lora" else (FULL, ONE_CALL if name.startswith("one call") else FULL)
    config = config(family, **changes)
    straight = trained(config, recipe=recipe)
    cut = {"batch_size": 8 // ranks, **of_mesh, "epochs": 1, "debug_checks": True}
    run = finished(tmp_path, {**config, **cut}, recipe=of_ranks, ranks=ranks)
    assert f"{ranks} ranks on cpu" in run.output
    assert (of_ranks == ONE_CALL) == ("one call per layer" in run.output)
    resumed = run_here(tmp_path, config, "resume_from_checkpoint=True", recipe=recipe)
    assert "resumed from step 6" in resumed.output
    columns = ["loss", "ema_loss", "lr", "num_target_tokens", *["kl"] * ("kl_penalty" in changes)]
    columns += ["replay_kl", "num_replayed"] * ("self_replay" in changes)
    if "clip_grad_norm" not in changes:
        columns.append("grad_norm")
        assert name == "lora" or min(straight.column("grad_norm")) > 1.0  # so that clipping to 1 is at work
    assert_close_runs(resumed, straight, 1e-7, columns)


def test_cosine_schedule_resumes_on_another_mesh(config, trained, tmp_path):
    """An optimizer has a group of parameters for each mesh they lie on: two under tensor parallelism, one without."""
    config = config(lr_scheduler={"_component_": "finch.cosine.cosine_with_warmup", "warmup_fraction": 0.2})
    straight = trained(config)
    run = run_ranks(2, tmp_path, {**config, "tensor_parallel_dim": 2, "tensor_parallel_plan": LLAMA_PLAN})
    assert_close_runs(run, straight, 1e-7, columns=("loss", "lr", "grad_norm"))
    rates = run.column("lr")
    longer = finished(tmp_path, {**config, "epochs": 3}, "resume_from_checkpoint=True")
    assert longer.column("lr")[:12] == rates
    assert len(longer.column("lr")) == 18


@pytest.mark.parametrize("changes", [{}, {"lr_scheduler": {"_component_": "finch.cosine.cosine_with_warmup"}}])
def test_optimizer_in_the_backward_is_bitwise(changes, config, trained):
    """The rate is known before the backward: bit for bit the ordinary order."""
    ordinary = trained(config(dtype="fp32", clip_grad_norm=None, **changes))
    run = trained(config(dtype="fp32", **IN_BACKWARD, **changes))
    assert run.columns("loss", "lr") == ordinary.columns("loss", "lr")
    assert_same_weights(run.folder / "epoch_1", ordinary.folder / "epoch_1")
    assert run.column("grad_norm") == [None] * 12


def test_plan_of_another_model_raises_once_on_two_ranks(config, tmp_path):
    """One sentence, and no rank left waiting."""
    run = run_ranks(2, tmp_path, config(tensor_parallel_dim=2, tensor_parallel_plan=QWEN3_PLAN))
    assert run.returncode == 1
    assert not run.folder.exists()
    assert "layers.*.attn.q_norm, which the model does not have" in run.error()


def test_plans_that_do_not_fit_the_model_raise():
    small = FAMILIES["qwen3"].build()
    check_plan(small, qwen3_tp_plan(), 2)
    with pytest.raises(UserError, match=r"leaves out layers\.0\.attn\.q_norm, which sees only this rank's heads"):
        check_plan(small, base_llama_tp_plan(), 2)
    without = {name: style for name, style in qwen3_tp_plan().items() if "output_proj" not in name}
    with pytest.raises(UserError, match=r"leaves out layers\.\*\.attn\.output_proj; heads are sharded in all four"):
        check_plan(small, without, 2)
    with pytest.raises(UserError, match="tensor_parallel_dim=4 does not divide the model's 2 key-value heads"):
        check_plan(llama2(**llama_args()), base_llama_tp_plan(), 4)
    gemma = {**llama_args(), "query_pre_attn_scalar": 8, "hidden_capping_value": 50.0, "final_capping_value": 30.0}
    with pytest.raises(UserError, match="attention or output layer torchtune does not shard"):
        check_plan(gemma2(**gemma, head_dim=8), base_llama_tp_plan(), 2)


def _float64_reference(base, config):
    """The same training in a few lines of plain torch, and its weights."""
    with set_default_dtype(torch.float64):
        model = llama2(**llama_args())
    use_fast_rotary(model)  # torchtune's own rotates in fp32, and its norms round to it
    use_fused_norm(model)
    model.load_state_dict(dict(HuggingFaceFolder(str(base)).weights()))
    cfg = OmegaConf.create(config)
    samples = list(instantiate(cfg.dataset, instantiate(cfg.tokenizer)))

    def sums(model, rows):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in rows:  # one sample at a time: no padding
            hidden, labels = model.tok_embeddings(torch.tensor([row["tokens"]])), torch.tensor(row["labels"][1:])
            for layer in model.layers:
                hidden = layer(hidden)
            logits = model.output(model.norm(hidden))[0, :-1]  # the model's own are rounded to fp32
            total = total + F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
            count += int((labels != -100).sum())
        return total, count

    def log_probs(tokens):
        hidden = model.tok_embeddings(tokens[None])
        for layer in model.layers:
            hidden = layer(hidden)
        return model.output(model.norm(hidden))[0, :-1].log_softmax(-1)

    options = {}
    if "self_replay" in config:
        # Of a model without a chat template: BOS and what it wrote; three steps per epoch, so that each has eight rows.
        tensors = load_file(Path(config["output_dir"]) / "self_replay.safetensors")
        answers = tensors["answers"].long().split(tensors["lengths"].tolist())
        texts = [torch.cat([torch.tensor([1]), answer]) for answer in answers]
        with torch.no_grad():
            pretrained, (total, count) = [log_probs(text) for text in texts], sums(model, samples)
        number = sum(map(len, pretrained))

        def kl():
            pairs = zip(pretrained, map(log_probs, texts), strict=True)
            return torch.stack([(old.exp() * (old - new)).sum() for old, new in pairs]).sum() / number

        options = {"replay_kl": kl, "strength": REPLAY["strength"], "init": float(total) / count}
        samples = samples[:24]
    found = train_plainly(model, samples, 8, 2e-3, 5e-3, epochs=2, sums=sums, **options)
    size = llama_args()
    return found, tune_to_hf(model.state_dict(), size["num_heads"], size["num_kv_heads"], size["embed_dim"])
