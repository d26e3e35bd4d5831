"""The KL penalty on the recipes: nothing at strength 0 and at the first step, the same with every way to save memory; meshes: test_layouts.py."""

import pytest
from helpers.runs import LORA, LORA_MODEL, assert_same_weights, finished, relative_l2, weights

KL = "kl_penalty=finch.regularization.KL"
COLUMNS = ("loss", "ema_loss", "lr", "grad_norm", "kl")


@pytest.fixture
def config(tiny):
    """41 rows, 8 per step."""
    return tiny(batch_size=8)


def test_kl_strength_zero_is_sft_bitwise(config, tmp_path):
    sft = finished(tmp_path / "sft", config, "method=sft")
    zero = finished(tmp_path / "zero", config, "method=kl", "kl_penalty.strength=0")
    some = finished(tmp_path / "some", config, "method=kl")
    assert zero.columns("loss", "grad_norm", "lr") == sft.columns("loss", "grad_norm", "lr")
    assert_same_weights(zero.folder / "epoch_0", sft.folder / "epoch_0")
    assert zero.column("kl")[0] == 0
    assert min(zero.column("kl")[1:]) > 0
    # The first step's divergence and its gradient are 0; then they are not.
    assert some.column("kl")[0] == 0
    assert some.column("grad_norm")[0] == sft.column("grad_norm")[0]
    assert some.column("loss")[:2] == sft.column("loss")[:2]
    assert some.column("kl")[1] == zero.column("kl")[1]
    assert some.column("grad_norm")[1] != sft.column("grad_norm")[1]


def test_kl_penalty_with_optimizer_in_bwd_is_bitwise(config, tmp_path):
    config = {key: value for key, value in config.items() if key != "clip_grad_norm"}
    plain = finished(tmp_path / "plain", config, KL)
    fused = finished(tmp_path / "fused", config, KL, "optimizer_in_bwd=True")
    assert fused.columns("loss", "lr", "kl") == plain.columns("loss", "lr", "kl")
    assert_same_weights(fused.folder / "epoch_0", plain.folder / "epoch_0")


def test_kl_penalty_of_packed_rows(config, tmp_path):
    """The second step's divergence, after a first step over all rows."""
    found = {}
    for packed, batch in ((False, 20), (True, 3)):
        dataset = {**config["dataset"], "split": "train[:20]", "packed": packed}
        run = finished(tmp_path / str(packed), {**config, "dataset": dataset, "epochs": 2}, KL, f"batch_size={batch}")
        found[packed] = run.column("kl")
    assert found[True] == pytest.approx(found[False], rel=1e-5)
    assert found[True][1] > 1e-4


def test_kl_penalty_cached_with_all_tokens_is_the_online_one(config, tmp_path):
    """With fewer it is a lower bound; the file is read again where it fits."""
    alone = finished(tmp_path / "alone", config, KL, "kl_penalty.strength=2", "dtype=fp64")
    changes = [KL, "kl_penalty.strength=2", "kl_penalty.reference=cached", "dtype=fp64"]
    size = f"kl_penalty.top_k={config['model']['vocab_size']}"
    every = finished(tmp_path, config, *changes, size)
    for column in COLUMNS:
        assert every.column(column) == pytest.approx(alone.column(column), rel=1e-9, abs=1e-12), column
    assert relative_l2(weights(every.folder / "epoch_0"), weights(alone.folder / "epoch_0")) < 1e-12
    columns = every.columns(*COLUMNS)
    again = finished(tmp_path, config, *changes, size, "overwrite=True")
    assert "the pretrained model's most likely tokens are read from" in again.output
    assert again.columns(*COLUMNS) == columns
    few = finished(tmp_path, config, *changes, "kl_penalty.top_k=3", "overwrite=True")
    assert f"pretrained model's 3 most likely tokens at {sum(few.column('num_target_tokens')):,} target" in few.output
    assert 0 < few.column("kl")[1] < columns["kl"][1]


def test_kl_penalty_of_a_mixture_with_cached_tokens(config, tmp_path):
    """Rows that are drawn twice, and rows that are never drawn."""
    data = config["dataset"]
    mixture = [{**data, "split": "train[:30]", "weight": 0.2}, {**data, "split": "train[30:]", "weight": 0.8}]
    found = {}
    for reference in ("online", "cached"):
        changes = [KL, f"kl_penalty.reference={reference}", "dtype=fp64"]
        if reference == "cached":
            changes.append(f"kl_penalty.top_k={config['model']['vocab_size']}")
        found[reference] = finished(tmp_path / reference, {**config, "dataset": mixture}, *changes).column("kl")
    assert found["cached"] == pytest.approx(found["online"], rel=1e-9, abs=1e-12)
    assert found["online"][1] > 1e-4


def test_kl_penalty_with_lora_has_no_second_model(config, tmp_path):
    """The decoder without its adapters is the reference."""
    changes = ["method=finch+asft", "optimizer.lr=2e-2", "lr_scheduler.eta_max=5e-2", "epochs=2"]
    run = finished(tmp_path, {**config, "model": LORA_MODEL}, *changes, recipe=LORA)
    assert "the model without its adapters" in run.output
    assert run.column("kl")[0] == 0
    assert run.column("kl")[-1] > 1e-3


def test_kl_penalty_of_compiled_and_mixed_precision_models(config, monkeypatch, tmp_path):
    """Both models see the same kernels and the same rounding: the first divergence is 0."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # a test machine may lack a C++ compiler
    for change in ("compile=True", "dtype=bf16_mixed", "fsdp_cpu_offload=True"):
        replay = (
            "self_replay.rows=4",
            "self_replay.max_new_tokens=6",
        )  # its distributions are of another batch, rounded otherwise
        run = finished(tmp_path / change, config, KL, *replay, change, "max_steps_per_epoch=2")
        assert run.column("kl")[0] == pytest.approx(0, abs=1e-9), change
        assert run.column("kl")[1] > 1e-4, change
        assert run.column("replay_kl")[0] == pytest.approx(0, abs=1e-3 if "bf16" in change else 1e-6), change
        assert run.column("replay_kl")[1] > 2 * abs(run.column("replay_kl")[0]), change
