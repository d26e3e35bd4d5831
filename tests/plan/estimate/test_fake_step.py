"""A step on fake tensors against a real one: memory, collectives, operations."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.runs import make_config, run_here, write_config

from benchmarks.estimate import measured_step
from benchmarks.tiny_job import llama_args, make_base
from finch.base.errors import UserError
from finch.cli.early_checks import read_job
from finch.objectives import CrossEntropy
from finch.plan.estimate.fake_step import StepEstimate, candidates, estimate_step
from finch.plan.estimate.formula import Rows
from finch.plan.estimate.step_time import COLLECTIVE, COPY, LAUNCH, Rates, read_rates
from finch.plan.estimate.step_trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective

SIZE = {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "intermediate_dim": 160}
SIZE |= {"max_seq_len": 256}
ROWS = Rows(seq=20, targets=8)
LLAMA2 = "torchtune.models.llama2"
SCALED_ROTARY = {"_component_": "torchtune.models.llama3_2.llama3_2", **llama_args(**SIZE)}  # it reads values
TP = {"tensor_parallel_dim": 2, "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}}

QWEN3_TP = {
    "model": {"_component_": "finch.models.qwen3.qwen3", **llama_args(**SIZE), "head_dim": 16},
    "tensor_parallel_dim": 2,
    "tensor_parallel_plan": {"_component_": "finch.models.qwen3.qwen3_tp_plan"},
    "dtype": "bf16",
    "device": "auto",  # norms are one operator there
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_base(folder, 0.02, **SIZE)
    return folder


@pytest.fixture(scope="module")
def equal_rows(tmp_path_factory):
    """8 rows of one length without a common prefix."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = ({"question": f"{word} {'a ' * 40}", "answer": "b " * 30} for word in "abcdefgh")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def make(tmp_path):
    """A config of the small model; its files need not exist."""

    def make(base=tmp_path / "absent", rows=tmp_path / "absent", **changes):
        model = {"_component_": f"{LLAMA2}.llama2", **llama_args(**SIZE)}
        config = make_config(base, rows, tmp_path / "run", **{"model": model, **changes})
        config["tokenizer"]["max_seq_len"] = 256
        return config

    return make


@pytest.fixture
def estimate(make, tmp_path):
    def estimate(ranks=1, rows=ROWS, **changes):
        changes = {"output_dir": str(tmp_path / "estimated"), **changes}
        recipe, cfg = read_job(write_config(tmp_path / "config", make(**changes)), [], is_here=False)
        return estimate_step(recipe, cfg, ranks=ranks, rows=rows)

    return estimate


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 2, "enable_activation_checkpointing": True}, {"dtype": "bf16_mixed"}],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_peak_is_the_allocators(changes, base, equal_rows, make, estimate, tmp_path):
    config = make(base, equal_rows, batch_size=2, lr_scheduler=None, max_steps_per_epoch=2, **changes)
    with measured_step() as measured:
        run = run_here(tmp_path, config)
    assert run.returncode == 0, run.output[-3000:]
    (real,) = measured
    step = estimate(rows=real.rows, batch_size=2, **changes)
    assert sum(step.between_steps.values()) == pytest.approx(real.before, rel=0.01)
    assert step.peak == pytest.approx(real.peak, rel=0.01)  # to be within 0.1; it is equal but for a few scalars


def test_operations_are_those_of_the_matrices(estimate):
    dim, hidden, vocab, layers, batch = 64, 160, llama_args()["vocab_size"], SIZE["num_layers"], 4
    seq = ROWS.seq - 1  # nothing depends on a row's last token
    weights = layers * (2 * dim * dim + 2 * dim * dim // 2 + 3 * dim * hidden)
    products = 2 * batch * (seq * weights + ROWS.targets * dim * vocab)
    attention = 4 * batch * layers * seq**2 * dim
    step = estimate(enable_activation_checkpointing=True, gradient_accumulation_steps=3)
    assert (step.tokens, step.targets) == (3 * batch * seq, 3 * batch * ROWS.targets)
    assert step.flops["forward"] == 3 * (products + attention)
    assert step.flops["backward"] == 3 * (2 * products + 5 * attention // 2)
    # The last product of a layer's forward is not recomputed: its output is not needed.
    down = 2 * batch * layers * seq * dim * hidden
    assert step.flops["recomputation"] == 3 * (2 * batch * seq * weights + attention - down)


def test_replayed_rows_are_counted(estimate):
    """Half as many as the task's, of four tokens and four targets; nothing depends on a row's last token."""
    plain, step = estimate(), estimate(self_replay={"share": 0.5, "max_new_tokens": 4})
    assert (step.tokens, step.targets) == (plain.tokens + 2 * 7, plain.targets)
    assert step.flops["backward"] > plain.flops["backward"]
    assert step.peak > plain.peak


def test_collectives_are_fsdps_and_three_small_ones(estimate):
    step = estimate(ranks=4, gradient_accumulation_steps=3, fsdp_layers_per_group=1)
    calls = {kind: [each for each in step.collectives if each.kind == kind] for kind in (ALL_GATHER, REDUCE_SCATTER)}
    groups = SIZE["num_layers"] + 1
    assert len(calls[ALL_GATHER]) == 3 * (2 * groups - 1)  # the root stays gathered until its backward
    assert len(calls[REDUCE_SCATTER]) == 3 * groups
    assert sum(each.nbytes for each in calls[REDUCE_SCATTER]) == 3 * 4 * step.parameters
    others = [each for each in step.collectives if each.kind not in calls]
    assert [each.kind for each in others] == 3 * [ALL_REDUCE]  # target tokens, loss, norm of the gradients
    assert all(each.nbytes < 1000 for each in others)


def test_16_bit_gradients_are_reduced_in_fp32_on_demand(estimate):
    plain, wide = (
        dict((kind, nbytes) for kind, _, nbytes, _ in estimate(2, dtype="bf16", **changes).summed_collectives())
        for changes in ({}, {"fsdp_reduce_in_fp32": True})
    )
    assert wide == {**plain, REDUCE_SCATTER: 2 * plain[REDUCE_SCATTER]}


def test_ranks_share_weights_gradients_and_states(estimate):
    one, four = estimate(), estimate(ranks=4)
    assert (one.shards, four.shards) == (1, 4)
    for part in ("weights", "optimizer states"):
        assert 4 * four.between_steps[part] == pytest.approx(one.between_steps[part], rel=0.01)
    assert four.memory["gathered layers"] > 0
    copies = estimate(ranks=4, data_parallel_replicate_dim=2)
    assert 2 * copies.between_steps["weights"] == pytest.approx(one.between_steps["weights"], rel=0.01)


@pytest.mark.parametrize(
    ("changes", "ranks", "part"),
    [
        ({"kl_penalty": {"_component_": "finch.regularization.KL"}}, 2, "reference model"),
        ({"kl_penalty": {"_component_": "finch.regularization.KL", "reference": "cached", "top_k": 4}}, 1, "weights"),
        ({"regularizer": {"_component_": "finch.regularization.L2"}}, 2, "weights that the regularizer keeps"),
        ({"loss": {"_component_": "finch.objectives.TALR"}, "lr_scheduler": None}, 1, "weights"),
        ({"loss": {"_component_": "finch.objectives.EAFT"}}, 1, "weights"),
        ({"optimizer_in_bwd": True, "clip_grad_norm": None}, 2, "optimizer states"),
        ({"dtype": "bf16_stochastic", "compile": True}, 2, "optimizer states"),
        ({"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3}, "device": "auto"}, 2, "optimizer states"),
        ({"fsdp_cpu_offload": True}, 1, "optimizer states"),
        ({"model": SCALED_ROTARY}, 2, "rotary tables"),
        (TP, 4, "weights"),
        (QWEN3_TP, 2, "weights"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_kind_of_step_runs_on_fake_tensors(changes, ranks, part, estimate):
    step = estimate(ranks=ranks, **changes)
    assert step.between_steps[part] > 0
    assert 0 < step.device_peak <= step.peak == sum(step.memory.values())
    assert step.memory.get("temporary tensors", 0) < step.between_steps["weights"]  # none of DTensor's bookkeeping
    assert not torch.distributed.is_initialized()


def test_lora_has_states_of_adapters_only(estimate):
    model = {"_component_": f"{LLAMA2}.lora_llama2", **llama_args(**SIZE)}
    model |= {"lora_attn_modules": ["q_proj"], "lora_rank": 2, "lora_alpha": 4}
    step = estimate(ranks=2, model=model)
    assert step.trained == SIZE["num_layers"] * 2 * (64 + 64)
    assert step.between_steps["optimizer states"] == pytest.approx(4 * step.trained, rel=0.2)


def test_packed_rows_fill_the_context(estimate, make, equal_rows, monkeypatch):
    # Flex attention's, where there is CUDA.
    monkeypatch.setattr("torchtune.data._collate.packed_block_causal_mask", lambda seq_lens: pytest.fail("no backward"))
    dataset = {**make(rows=equal_rows)["dataset"], "packed": True}
    step = estimate(dataset=dataset, batch_size=1)
    assert (step.tokens, step.targets) == (256, 256 // ROWS.seq * ROWS.targets)


def test_a_component_that_reads_values_is_named(estimate, monkeypatch):
    monkeypatch.setattr(CrossEntropy, "weights", lambda _, losses, batch: losses.new_full((), float(losses.sum())))
    with pytest.raises(UserError, match=r"aten\._local_scalar_dense"):
        estimate()
    assert not torch.distributed.is_initialized()


def test_update_reads_and_writes_what_adamw_does(estimate):
    step = estimate(clip_grad_norm=None, lr_scheduler=None)
    assert step.moved_bytes["update"] == pytest.approx(
        (7 + 1) * 4 * step.parameters, rel=0.001
    )  # the norm reads gradients too
    longer = estimate(clip_grad_norm=None, lr_scheduler=None, rows=Rows(200, 8))
    assert longer.moved_bytes["update"] == pytest.approx(step.moved_bytes["update"], rel=0.001)
    assert longer.moved_bytes["forward"] > 5 * step.moved_bytes["forward"]


def test_rates_are_those_of_gpu_checks_file(tmp_path):
    lines = [
        ("matrix products of 1,360 tokens, float32, TFLOP/s", 50.0),
        ("matrix products of 1,360 tokens, bfloat16, TFLOP/s", 600.0),
    ]
    lines += [(COPY, 3000.0), (LAUNCH, 8.0), (COLLECTIVE, 600.0), ("all-reduce", None)]
    file = tmp_path / "gpu_check.json"
    file.write_text(json.dumps({"phases": [{"lines": [{"name": name, "seen": seen} for name, seen in lines]}]}))
    assert read_rates(str(file), "bfloat16") == Rates(600, 3000, 8, collective_us=600)
    file.write_text("[]")
    with pytest.raises(UserError, match=r"gpu_check.json is no gpu_check.json of `finch doctor --gpu`"):
        read_rates(str(file), "bfloat16")


def test_time_is_operations_and_bytes_over_their_rates():
    gather = Collective(ALL_GATHER, 4 * 10**9, 4, 3)
    calls = gather, Collective(ALL_REDUCE, 4, 4, 3), gather
    flops = {"forward": 10**12, "recomputation": 10**12, "backward": 2 * 10**12}
    step = StepEstimate(
        1, 1, 4, {}, 0, "forward", {}, calls, flops, {"forward": 100}, 1, 1, moved_bytes={"forward": 8 * 10**9}
    )
    rates = Rates(matmul_tflops=2, memory_gb_s=2, launch_us=5, bandwidth_gb_s=3, collective_us=100)
    seconds = rates.seconds(step)
    assert seconds["products"] == 2.0  # recomputation takes time, though it is not needed
    assert (seconds["memory"], seconds["host"]) == (4.0, 8e-4)
    assert seconds["network"] == pytest.approx(2.0)
    slow = replace(rates, node_bandwidth_gb_s=1)
    assert [slow.seconds(step, per_node)["network"] for per_node in (4, 2)] == pytest.approx([2.0, 6.0])
    assert step.needed_flops == 3 * 10**12
    assert step.summed_collectives() == [(ALL_GATHER, 2, 8 * 10**9, 6 * 10**9), (ALL_REDUCE, 1, 4, 6)]
    assert step.sent_bytes == 6 * 10**9 + 6


def test_candidates_keep_the_samples_of_a_step_and_save_memory(make, estimate, tmp_path):
    changes = {"batch_size": 2, "gradient_accumulation_steps": 2}
    _, cfg = read_job(write_config(tmp_path / "config", make(**changes)), [], is_here=False)
    found = candidates(cfg)
    assert found == [
        ("enable_activation_checkpointing=True",),
        ("batch_size=1", "gradient_accumulation_steps=4"),
        ("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused"),
        ("fsdp_cpu_offload=True",),
    ]
    peak = estimate(rows=Rows(100, 50), **changes).device_peak
    for overrides in found:
        recipe, cfg = read_job(write_config(tmp_path / "config", make(**changes)), overrides, is_here=False)
        assert estimate_step(recipe, cfg, ranks=1, rows=Rows(100, 50)).device_peak < peak, overrides
    cfg.enable_activation_checkpointing, cfg.batch_size = True, 1
    cfg.optimizer._component_ = "torch.optim.SGD"
    assert candidates(cfg) == []  # nothing that the config has
