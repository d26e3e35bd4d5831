"""What a step launches on a GPU: a budget, so that no kernel per layer comes in unseen. Counted on fake tensors, where nothing is computed."""

import pytest

from finch.cli.early_checks import read_job
from finch.estimate.fake_step import estimate_step
from finch.estimate.formula import Rows

CONFIGS = {
    "qwen3/4B_finch": (36, ["model=finch.models.qwen3.qwen3", "model.head_dim=128", "model.tie_word_embeddings=True"]),
    "llama3/8B_finch": (32, ["model=torchtune.models.llama3.llama3"]),
}
SIZES = {"vocab_size": 151_936, "num_heads": 32, "num_kv_heads": 8, "embed_dim": 256, "intermediate_dim": 512}
AT_ONCE = ["batch_size=16", "gradient_accumulation_steps=1", "device=cuda", "enable_activation_checkpointing=False"]


def launches(config: str, layers: int, *overrides: str) -> int:
    """Of a step of 16 rows of TOFU's mean lengths, with the config's number of operators a layer and narrow ones."""
    sizes = {**SIZES, "num_layers": layers, "max_seq_len": 256}
    changes = [*CONFIGS[config][1], *(f"model.{key}={value}" for key, value in sizes.items()), *AT_ONCE, *overrides]
    recipe, cfg = read_job(config, changes)
    return sum(estimate_step(recipe, cfg, ranks=1, rows=Rows(85, 37)).launches.values())


@pytest.mark.parametrize(
    ("config", "per_layer", "of_step"), [("qwen3/4B_finch", 88, 3_285), ("llama3/8B_finch", 68, 2_293)]
)
def test_step_launches(config: str, per_layer: int, of_step: int) -> None:
    """Raise these numbers with a reason only; each operator of a layer is 36 launches of a step, and as many with each micro-batch."""
    one, two = (launches(config, layers) for layers in (1, 2))
    assert two - one <= per_layer
    assert one + (CONFIGS[config][0] - 1) * (two - one) <= of_step


def test_padded_and_checkpointed_steps_launch_more() -> None:
    """What the count is for: the same rows in four micro-batches with checkpointing launch almost four times as much."""
    changes = ["batch_size=4", "gradient_accumulation_steps=4", "enable_activation_checkpointing=True"]
    assert launches("qwen3/4B_finch", 2, *changes) > 3.5 * launches("qwen3/4B_finch", 2)
