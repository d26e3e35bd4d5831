"""self_replay, probes and the forgetting budget inside TorchTitan, against finch's recipe on the config that the run has left."""

import pytest

STEP = ("loss", "lr", "grad_norm", "replay_kl", "num_replayed")


def evaluations(run) -> dict[int, dict[str, float]]:
    """The probes' values, by step."""
    return {
        line["step"]: {name: value for name, value in line.items() if name.startswith("probe/")}
        for line in run.lines()
        if any(name.startswith("probe/") for name in line)
    }


@pytest.mark.parametrize("layout", ["one rank", "fsdp", "tensor parallel"])
def test_run_equals_the_recipes(one_rank, two_ranks, recipe_runs, layout):
    expected = recipe_runs["preserving"]
    names = {"fsdp": "preserving", "tensor parallel": "tensor_preserving"}
    run = one_rank["preserving"] if layout == "one rank" else two_ranks[names[layout]]
    for name in STEP:
        assert run.column(name) == pytest.approx(expected.column(name), rel=1e-5, abs=1e-5), name
    found, values = evaluations(run), evaluations(expected)
    assert list(found) == list(values) == [0, 3, 6, 8]
    for step, line in values.items():
        assert found[step] == pytest.approx(line, rel=1e-5, abs=1e-5)
    assert values[8]["probe/own/kl"] > 0.1
    assert {"probe/stories/loss", "probe/choices/accuracy"} <= values[0].keys()


def test_resume_continues_bit_for_bit(one_rank):
    straight, resumed = one_rank["preserving"], one_rank["preserved"]
    for name in STEP:
        assert resumed.column(name) == straight.column(name), name
    assert evaluations(resumed) == evaluations(straight)
    assert (resumed.folder / "self_replay.safetensors").is_file()


def test_budget_ends_the_run_with_its_last_model_and_the_one_inside(one_rank):
    run = one_rank["stopping"]
    kls = {step: line["probe/own/kl"] for step, line in evaluations(run).items()}
    *inside, last = kls
    assert run.column("step")[-1] == last < 12
    assert all(kls[step] <= 0.7 for step in inside)
    assert kls[last] > 0.7
    assert (run.folder / "epoch_0").resolve() == run.folder / f"checkpoint/step-{last}"
    kept = run.folder / "within_budget"
    assert kept.resolve() == run.folder / f"within_budget_step_{inside[-1]}"
    assert (kept / "config.json").is_file()
    assert f"is outside 0.7; {kept} is within_budget_step_{inside[-1]}" in run.output
