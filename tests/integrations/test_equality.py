"""Losses and learning rates of every stack against a loop without finch, on one process and on two: docs/verification.md's table."""

from __future__ import annotations

import json

import pytest
from helpers.causal_lm import mean_loss
from helpers.ranks import on_ranks
from helpers.rows import write_lines
from helpers.runs import run_here, run_ranks
from helpers.stacks import (
    ETA_BASE,
    REPLAY,
    STACKS,
    differences,
    load,
    recipe_config,
    run_reference,
    run_replay_reference,
    run_sft_trainer,
    run_trainer,
)

from benchmarks.tiny_text import WORDS

ON_TWO_RANKS = """
    from helpers.stacks import STACKS, run_trainer
    data = Path({data!r})
    curves = {{name: run(data, folder / name) for name, run in STACKS.items()}}
    curves["resumed"] = run_trainer(data, folder / "Trainer", resume=str(folder / "Trainer" / "checkpoint-4"))
    curves["Trainer, FSDP2"] = run_trainer(data, folder / "fsdp", is_sharded=True, save_strategy="no")
    # Rows that the ranks cannot share evenly, and a loss that is the mean of their means: FINCH's is over tokens all the same.
    uneven = {{"init": "dataset", "num_rows": 57, "max_steps": 1, "save_strategy": "no", "average_tokens_across_devices": False}}
    curves["dataset"] = run_trainer(data, folder / "dataset", is_sharded=True, **uneven)
    for name, is_sharded in (("DDP", False), ("FSDP2", True)):
        run_trainer(data, folder / name, is_sharded=is_sharded, measured=folder / "rows.jsonl", save_strategy="no")
    curves["self-replay"] = run_trainer(data, folder / "replay", is_replayed=True, save_strategy="no")
    # Three rows in the four micro-batches of a step: one has none, and is a pass all the same.
    replayed = {{"is_replayed": True, "is_sharded": True, "share": 3 / 16, "save_strategy": "no"}}
    curves["self-replay, FSDP2"] = run_trainer(data, folder / "replay_fsdp", **replayed)
    # These come last: they change Accelerate's PartialState, which lasts as long as the process.
    run_trainer(data, folder / "measured", fsdp=True, measured=folder / "rows.jsonl", save_strategy="no")
    curves["self-replay, fsdp=True"] = run_trainer(data, folder / "accelerate", fsdp=True, is_replayed=True)
    checkpoint = str(folder / "accelerate" / "checkpoint-4")
    curves["resumed, fsdp=True"] = run_trainer(data, folder / "accelerate", checkpoint, fsdp=True, is_replayed=True)
    tell(curves)
"""


def assert_equal(
    name: str, curves: tuple[list[float], list[float]], reference: tuple[list[float], list[float]]
) -> None:
    loss, rate = differences(curves, reference)
    print(f"{name}: loss {loss:.1e}, learning rate {rate:.1e}")
    assert len(curves[0]) == 8
    assert loss < 1e-5
    assert rate < 1e-5


@pytest.mark.parametrize("name", STACKS)
def test_stack_equals_plain_python_on_one_process(name, shared_data, tmp_path):
    assert_equal(name, STACKS[name](shared_data, tmp_path), run_reference(shared_data))


@pytest.mark.slow
def test_self_replay_is_the_same_in_every_loop(shared_data, tmp_path):
    """The same answers and the same steps: a plain loop, the Trainer, TRL's, the recipe; the plain run differs."""
    reference = run_replay_reference(shared_data)
    assert differences(reference, run_reference(shared_data))[0] > 1e-3
    run = run_here(tmp_path, {**recipe_config(shared_data, tmp_path, 1), "self_replay": REPLAY})
    assert run.returncode == 0, run.output[-3000:]
    assert_equal("recipe with self-replay", (run.column("loss"), run.column("lr")), reference)
    broken = run_trainer(shared_data, tmp_path / "trainer", is_replayed=True)
    assert_equal("Trainer with self-replay", broken, reference)
    checkpoint = str(tmp_path / "trainer" / "checkpoint-4")
    resumed = run_trainer(shared_data, tmp_path / "trainer", resume=checkpoint, is_replayed=True)
    assert resumed == broken
    sft = run_sft_trainer(shared_data, tmp_path / "sft", is_replayed=True)
    assert_equal("SFTTrainer with self-replay", sft, reference)


@pytest.fixture
def measured(tmp_path):
    """Prompts of two skills."""
    rows = [{"prompt": f"Who has {word}?", "skill": "a" if index < 9 else "b"} for index, word in enumerate(WORDS[:12])]
    write_lines(tmp_path / "rows.jsonl", *rows)
    return tmp_path / "rows.jsonl"


@pytest.mark.slow
def test_forgetting_is_the_same_in_the_trainers_and_the_recipe(shared_data, tmp_path, measured):
    own = {"kind": "self", "data_files": str(measured), "max_new_tokens": 6}
    config = recipe_config(shared_data, tmp_path, 1) | {"probes": {"own": own}, "probes_every_n_steps": 4}
    run = run_here(tmp_path, config)
    assert run.returncode == 0, run.output[-3000:]
    expected = [line for line in run.lines() if "probe/own/kl" in line]
    for name, start in (("trainer", run_trainer), ("sft", run_sft_trainer)):
        curves = start(shared_data, tmp_path / name, measured=measured)
        assert_equal(name, curves, run_reference(shared_data))
        *lines, last = json.loads((tmp_path / name / "forgetting.json").read_text())
        assert [line["step"] for line in lines] == [line["step"] for line in expected] == [0, 4, 8]
        assert lines[0]["forgetting/kl"] == 0
        for line, other in zip(lines, expected, strict=True):
            for key in ("kl", "kl/a", "kl/b", "kl_low", "kl_high"):
                assert line[f"forgetting/{key}"] == pytest.approx(other[f"probe/own/{key}"], abs=1e-5), (name, key)
        assert last.keys() == {"kl", "kl_low", "kl_high", "kl/a", "kl_low/a", "kl_high/a", "kl/b"}
    resumed = run_trainer(
        shared_data, tmp_path / "trainer", str(tmp_path / "trainer" / "checkpoint-4"), measured=measured
    )
    assert_equal("resumed", resumed, run_reference(shared_data))
    again = json.loads((tmp_path / "trainer" / "forgetting.json").read_text())
    assert again[-1]["kl"] == pytest.approx(expected[-1]["probe/own/kl"], abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_recipe_equals_plain_python(ranks, shared_data, tmp_path):
    config = recipe_config(shared_data, tmp_path, ranks)
    run = run_here(tmp_path, config) if ranks == 1 else run_ranks(ranks, tmp_path, config)
    assert run.returncode == 0, run.output[-3000:]
    name = f"finch_full_finetune on {ranks} rank(s)"
    assert_equal(name, (run.column("loss"), run.column("lr")), run_reference(shared_data))


@pytest.mark.slow
def test_stacks_equal_plain_python_on_two_ranks(shared_data, tmp_path, measured):
    one, other = on_ranks(2, ON_TWO_RANKS.format(data=str(shared_data)), tmp_path)
    assert {name: curves[1] for name, curves in one.items()} == {name: curves[1] for name, curves in other.items()}
    assert one.pop("resumed") == one["Trainer"]
    run_trainer(shared_data, tmp_path / "one", measured=measured, save_strategy="no")
    names = ("one", "DDP", "FSDP2", "measured")
    alone, *others = (json.loads((tmp_path / name / "forgetting.json").read_text()) for name in names)
    for lines in others:
        for line, expected in zip(lines, alone, strict=True):
            assert line == pytest.approx(expected, abs=1e-5)
    assert one["resumed, fsdp=True"] == one["self-replay, fsdp=True"]
    replayed = {"self-replay": 4, "self-replay, FSDP2": 3, "self-replay, fsdp=True": 4, "resumed, fsdp=True": 4}
    for name, number in replayed.items():
        assert_equal(f"{name} on two ranks", one.pop(name), run_replay_reference(shared_data, number))
    model, rows = load(shared_data)
    losses, _ = run_reference(shared_data)
    ema = 0.9 * mean_loss(model, rows[:57]) + 0.1 * losses[0]
    assert one.pop("dataset")[1] == pytest.approx([ETA_BASE / ema**0.5], rel=1e-6)
    plain, shares = run_reference(shared_data), run_reference(shared_data, num_shares=2)
    for name, curves in one.items():
        assert_equal(f"{name} on two ranks", curves, shares if name == "Lightning" else plain)
