"""A run is the same on every layout: equal to a few lines of plain torch in float64, and to one process on every mesh."""

import json
import math

import pytest
import torch
from helpers.models import FAMILIES, save
from helpers.runs import (
    FULL,
    LORA,
    assert_close_runs,
    llama_args,
    make_config,
    relative_l2,
    run_here,
    run_ranks,
    weights,
    write_rows,
)

KL = {"_component_": "finch.regularization.KL", "strength": 2.0}
LLAMA_PLAN = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
QWEN3_PLAN = {"_component_": "finch.models.qwen3.qwen3_tp_plan"}
IN_BACKWARD = {"optimizer_in_bwd": True, "clip_grad_norm": None}
LORA_MODEL = {"_component_": "torchtune.models.llama2.lora_llama2", **llama_args(), "lora_rank": 4, "lora_alpha": 8}
LORA_MODEL |= {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_step_equals_plain_float64_torch_on_every_layout(ranks, micro_batches, tmp_path, base_folder):
    """Invariance of docs: loss and update equal in float64 to 1e-12, micro-batches without any target token included."""
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, 30, seed=5)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for index in (0, 1, 7):  # longer than max_seq_len: no target token
        lines[index]["question"] = "the old red fox sings near a stone " * 12
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"dtype": "fp64", "batch_size": 2, "gradient_accumulation_steps": micro_batches, "shuffle": False}
    config = make_config(base_folder, rows, tmp_path / "run", epochs=2, **changes)
    run = run_ranks(ranks, tmp_path, config)
    assert run.returncode == 0, run.output[-3000:]
    assert "3 of 30 samples have no target token" in run.output
    reference = _float64_reference(base_folder, config)
    for name, expected in reference.items():
        if name != "weights":
            assert run.column(name) == pytest.approx(expected, rel=1e-12), name
    assert relative_l2(weights(run.folder / "epoch_1"), reference["weights"]) < 1e-12


@pytest.fixture
def config(base_folder, rows_file, tmp_path):
    """In float64, two epochs of 41 rows, 8 per step: the last step of an epoch has one row for all ranks."""

    def make(family=None, **changes):
        changes = {"dtype": "fp64", "batch_size": 8, "epochs": 2, **changes}
        config = make_config(base_folder, rows_file, tmp_path / "run", **changes)
        if family is not None:
            save(family, tmp_path / "base")
            config["model"] = {"_component_": FAMILIES[family].component, **FAMILIES[family].arguments}
            config["checkpointer"]["checkpoint_dir"] = str(tmp_path / "base")
        return config

    return make


# ranks; a model of another family; changes of the run in one process too; changes of the run on ranks
MESHES = {
    "hsdp": (4, None, {"kl_penalty": KL}, {"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": 2}),
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
        {"kl_penalty": KL},
        {"tensor_parallel_dim": 2, "tensor_parallel_plan": LLAMA_PLAN, "custom_sharded_layers": ["tok_embeddings"]}
        | {"batch_size": 4, "enable_activation_checkpointing": True},
    ),
    "no resharding": (2, None, {}, {"fsdp_reshard_after_forward": False}),
    "one reduction": (
        2,
        None,
        {},
        {"fsdp_reduce_every_micro_batch": False, "batch_size": 1, "gradient_accumulation_steps": 4},
    ),
    "optimizer in the backward": (4, None, {"clip_grad_norm": None}, {**IN_BACKWARD, "data_parallel_replicate_dim": 2}),
    "lora": (2, None, {"model": LORA_MODEL}, {}),
    # A tied embedding stays in the root's group, where the output layer is used, even if the config wants it apart.
    "qwen3 tied": (2, "qwen3 tied", {}, {"custom_sharded_layers": ["tok_embeddings"]}),
    "qwen3 tied x tensor": (
        2,
        "qwen3 tied",
        {},
        {"tensor_parallel_dim": 2, "tensor_parallel_plan": QWEN3_PLAN, "batch_size": 8},
    ),
    "qwen3 x tensor": (2, "qwen3", {}, {"tensor_parallel_dim": 2, "tensor_parallel_plan": QWEN3_PLAN, "batch_size": 8}),
    "llama 3.1": (2, "llama 3.1", {}, {}),  # its rotary scaling is built anew after sharding
}


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_equals_one_process(name, config, trained, tmp_path):
    """Loss counted once, gradients clipped by the whole norm; and a checkpoint of the mesh goes on in one process."""
    ranks, family, changes, of_mesh = MESHES[name]
    recipe = LORA if name == "lora" else FULL
    config = config(family, **changes)
    straight = trained(config, recipe=recipe)
    cut = {"batch_size": 8 // ranks, **of_mesh, "epochs": 1, "debug_checks": True}
    run = run_ranks(ranks, tmp_path, {**config, **cut}, recipe=recipe)
    assert run.returncode == 0, run.output[-3000:]
    assert f"{ranks} ranks on cpu" in run.output
    resumed = run_here(tmp_path, config, "resume_from_checkpoint=True", recipe=recipe)
    assert "resumed from step 6" in resumed.output
    columns = ["loss", "ema_loss", "lr", "num_target_tokens", *["kl"] * ("kl_penalty" in changes)]
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
    longer = run_here(tmp_path, {**config, "epochs": 3}, "resume_from_checkpoint=True")
    assert longer.returncode == 0, longer.output
    assert longer.column("lr")[:12] == rates
    assert len(longer.column("lr")) == 18


@pytest.mark.parametrize("changes", [{}, {"lr_scheduler": {"_component_": "finch.cosine.cosine_with_warmup"}}])
def test_optimizer_in_the_backward_is_bitwise(changes, config, trained):
    """The rate is known before the backward: bit for bit the ordinary order."""
    ordinary = trained(config(dtype="fp32", clip_grad_norm=None, **changes))
    run = trained(config(dtype="fp32", **IN_BACKWARD, **changes))
    for column in ("loss", "lr"):
        assert run.column(column) == ordinary.column(column)
    one, other = weights(run.folder / "epoch_1"), weights(ordinary.folder / "epoch_1")
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert run.column("grad_norm") == [None] * 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data_parallel_shard_dim": 3},
            "data_parallel_shard_dim=3 x data_parallel_replicate_dim=1 x tensor_parallel_dim=1 is 3, but 2 ranks started",
        ),
        (
            {"tensor_parallel_dim": 2, "tensor_parallel_plan": QWEN3_PLAN},
            "layers.*.attn.q_norm, which the model does not have",
        ),
    ],
)
def test_mesh_sizes_that_do_not_fit_raise(changes, message, config, tmp_path):
    """On two ranks: one sentence, once, and no rank left waiting."""
    run = run_ranks(2, tmp_path, config(**changes))
    assert run.returncode == 1
    assert not run.folder.exists()
    assert message in run.error()


def test_plans_that_do_not_fit_the_model_raise():
    from torchtune.models.llama2 import llama2
    from torchtune.models.llama3 import base_llama_tp_plan

    from finch.distributed.tensor_parallel import check_plan
    from finch.errors import UserError
    from finch.models.gemma2 import gemma2
    from finch.models.qwen3 import qwen3_tp_plan

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
    """The same training in a few lines of plain torch: one batch per step, AdamW, the equation of Section 3.3."""
    import torch.nn.functional as F
    from omegaconf import OmegaConf
    from torchtune.config import instantiate
    from torchtune.models.convert_weights import tune_to_hf
    from torchtune.models.llama2 import llama2
    from torchtune.training import set_default_dtype

    from finch.models.rotary import use_complex_product
    from finch.weights.huggingface import HuggingFaceFolder

    with set_default_dtype(torch.float64):
        model = llama2(**llama_args())
    use_complex_product(model)  # torchtune's own rotates in fp32
    model.load_state_dict(dict(HuggingFaceFolder(str(base)).weights()))
    cfg = OmegaConf.create(config)
    samples = list(instantiate(cfg.dataset, instantiate(cfg.tokenizer)))

    def sums(rows):
        total, count = 0, 0
        for row in rows:  # one sample at a time: no padding
            tokens, labels = torch.tensor(row["tokens"]), torch.tensor(row["labels"])
            hidden = model.norm(_hidden(model, tokens[None]))
            total = total + F.cross_entropy(
                model.output(hidden)[0, :-1], labels[1:], reduction="sum", ignore_index=-100
            )
            count += int((labels[1:] != -100).sum())
        return total, count

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    with torch.no_grad():
        total, count = sums(samples)
    average = float(total / count)
    found = {"loss": [], "ema_loss": [], "lr": [], "grad_norm": []}
    for _ in range(2):
        for start in range(0, len(samples), 8):
            total, count = sums(samples[start : start + 8])
            loss = total / count
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            average = 0.9 * average + 0.1 * float(loss)
            optimizer.param_groups[0]["lr"] = min(2e-3 / math.sqrt(average + 1e-8), 5e-3)
            optimizer.step()
            for name, value in (
                ("loss", float(loss)),
                ("ema_loss", average),
                ("lr", optimizer.param_groups[0]["lr"]),
                ("grad_norm", float(norm)),
            ):
                found[name].append(value)
    size = llama_args()
    found["weights"] = tune_to_hf(model.state_dict(), size["num_heads"], size["num_kv_heads"], size["embed_dim"])
    return found


def _hidden(model, tokens):
    hidden = model.tok_embeddings(tokens)
    for layer in model.layers:
        hidden = layer(hidden)
    return hidden
