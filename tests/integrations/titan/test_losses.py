"""``init: dataset`` inside TorchTitan: the pass before the first step, and where its result is kept."""

import json

import pytest


def test_mean_loss_is_kept_under_a_fingerprint(one_rank):
    run = one_rank["cached"]
    file = run.folder / "initial_loss.json"
    assert (
        run.output.count(f"nats, from {file}") == 1
    )  # of three starts: the first, "straight", computes it, the third has other rows
    assert json.loads(file.read_text())["mean_loss"] > 0


def test_mean_loss_is_the_same_on_every_layout(one_rank, two_ranks):
    expected = json.loads((one_rank["straight"].folder / "initial_loss.json").read_text())["mean_loss"]
    for name in ("fsdp", "hsdp", "tensor"):
        found = json.loads((two_ranks[name].folder / "initial_loss.json").read_text())["mean_loss"]
        assert found == pytest.approx(expected, rel=1e-6), name


def test_identity_is_the_same_in_another_process(titan_configs):
    from finch.integrations.titan.losses import identity_of

    identity = identity_of(titan_configs.finch())
    assert " at 0x" not in json.dumps(identity)  # an address would never be found again
    assert {file.rpartition("/")[2] for file, *_ in identity["files"]} >= {"model.safetensors", "full.jsonl"}
    config = titan_configs.finch()
    config.checkpoint.initial_load_in_hf = False
    assert identity_of(config) is None
