"""What a step launches, moves and sends on GPUs: budgets, so that no kernel and no collective per layer comes in unseen. Counted on fake
tensors, where nothing is computed; reading a value on the host raises there."""

import pytest

from finch.cli.early_checks import read_job
from finch.plan.estimate.fake_step import StepEstimate, estimate_step
from finch.plan.estimate.formula import Rows

QWEN3, LLAMA3 = "qwen3/4B_finch", "llama3/8B_finch"
HEADS = {"num_heads": 32, "num_kv_heads": 8, "max_seq_len": 256}
SIZES = {
    QWEN3: {
        "vocab_size": 151_936,
        "embed_dim": 2560,
        "intermediate_dim": 9728,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    LLAMA3: {"vocab_size": 128_256, "embed_dim": 4096, "intermediate_dim": 14_336},
}
MODELS = {QWEN3: "finch.models.qwen3.qwen3", LLAMA3: "torchtune.models.llama3.llama3"}
LAYERS = {QWEN3: 36, LLAMA3: 32}


def step(config: str, layers: int, *overrides: str, ranks: int = 1) -> StepEstimate:
    """Of rows of TOFU's mean lengths, with the config's model of fewer layers."""
    sizes = {**HEADS, **SIZES[config], "num_layers": layers}
    changes = [f"model={MODELS[config]}", *(f"model.{key}={value}" for key, value in sizes.items()), *overrides]
    recipe, cfg = read_job(config, changes, is_here=False)
    return estimate_step(recipe, cfg, ranks=ranks, rows=Rows(85, 37))


@pytest.mark.parametrize(
    ("config", "per_layer", "of_step", "gigabytes"), [(QWEN3, 64, 2_450, 166), (LLAMA3, 54, 1_870, 267)]
)
def test_step_launches_and_moves(config: str, per_layer: int, of_step: int, gigabytes: int) -> None:
    """Raise these numbers with a reason only; each operator of a layer is 36 launches of a step, and as many with each micro-batch."""
    one, two = (step(config, layers) for layers in (1, 2))
    launches = [sum(each.launches.values()) for each in (one, two)]
    moved = [sum(each.moved_bytes.values()) for each in (one, two)]
    assert launches[1] - launches[0] <= per_layer
    assert launches[0] + (LAYERS[config] - 1) * (launches[1] - launches[0]) <= of_step
    assert moved[0] + (LAYERS[config] - 1) * (moved[1] - moved[0]) <= gigabytes * 1e9


def test_ranks_gather_and_reduce_a_layer_once() -> None:
    """As the header's command for 8 GPUs has it: no more calls, and no more bytes than those of the bf16 weights."""
    changes = ["batch_size=2", "fsdp_reshard_after_forward=False", "fsdp_layers_per_group=1"]
    one, two = (step(QWEN3, layers, *changes, ranks=8) for layers in (1, 2))
    assert len(two.collectives) - len(one.collectives) == 2
    weights = 2 * (two.parameters - one.parameters)
    assert two.sent_bytes - one.sent_bytes == pytest.approx(2 * weights * 7 / 8, rel=1e-3)
    assert sum(two.launches.values()) - sum(one.launches.values()) <= 80


def test_layers_of_a_group_are_gathered_together() -> None:
    """Of 101 M parameters each, in bf16: four of them fill a group."""
    calls = [
        len(step(QWEN3, layers, "batch_size=2", *changes, ranks=8).collectives)
        for layers, changes in ((1, []), (4, []), (5, []), (5, ["fsdp_layers_per_group=2"]))
    ]
    assert [each - calls[0] for each in calls] == [0, 0, 3, 6]  # two gathers and a reduction for each more


def test_padded_and_checkpointed_steps_launch_more() -> None:
    """What the count is for: the same rows in four micro-batches with checkpointing launch almost four times as much."""
    changes = ["batch_size=4", "gradient_accumulation_steps=4", "enable_activation_checkpointing=True"]
    four, one = (sum(each.launches.values()) for each in (step(QWEN3, 2, *changes), step(QWEN3, 2)))
    assert four > 3.5 * one
