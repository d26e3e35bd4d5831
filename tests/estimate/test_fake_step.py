"""A step on fake tensors against a real one: memory, collectives, operations."""

import json

import pytest
from helpers.measured_memory import measure_step
from helpers.runs import make_config, write_config

from benchmarks.tiny_job import llama_args, make_base
from finch.cli.early_checks import read_job
from finch.estimate.fake_step import estimate_step
from finch.estimate.rows import Rows, num_tokens

SIZE = {
    "num_layers": 6,
    "embed_dim": 256,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_dim": 768,
    "max_seq_len": 512,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_base(folder, 0.02, **SIZE)
    return folder


@pytest.fixture(scope="module")
def equal_rows(tmp_path_factory):
    """16 rows of one length without a common prefix."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    words = ["a", "b", "c", "d", "e", "f", "g", "h"] * 2
    rows = ({"question": f"{word} {'a ' * 60}", "answer": f"{'b ' * 50}"} for word in words)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def estimate(folder, config, *overrides, ranks=1, rows=None):
    recipe, cfg = read_job(write_config(folder / "config", config), overrides)
    return estimate_step(recipe, cfg, ranks=ranks, rows=rows or Rows())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"enable_activation_checkpointing": True},
        {"optimizer": {"_component_": "torch.optim.SGD", "lr": 1e-4}},
        {"dtype": "bf16_mixed"},
        {"padding_free": False},
    ],
)
def test_peak_is_within_a_tenth_of_the_allocators(changes, base, equal_rows, tmp_path, monkeypatch):
    model = {"_component_": "torchtune.models.llama2.llama2", **llama_args(**SIZE)}
    config = make_config(base, equal_rows, tmp_path / "run", model=model, shuffle=False, **changes)
    config["tokenizer"]["max_seq_len"] = 512
    before, peak, batches = measure_step(monkeypatch, tmp_path, config)
    shapes = {(batch["tokens"].shape, len(batch["targets"])) for batch in batches}
    ((_, seq), targets) = shapes.pop()
    assert not shapes
    config["output_dir"] = str(tmp_path / "other")
    step = estimate(tmp_path, config, rows=Rows(seq, targets // 4))
    print(
        changes,
        seq,
        targets,
        num_tokens(batches[0]),
        step.tokens,
        sum(step.between_steps.values()) / before,
        step.peak / peak,
        peak,
        step.memory,
        step.peak_phase,
    )
    assert sum(step.between_steps.values()) == pytest.approx(before, rel=0.01)
    assert step.peak == pytest.approx(peak, rel=0.1)
