"""The KL penalty on the recipes: nothing at strength 0 and at the first step, the same with every way to save memory; meshes: test_layouts.py."""

import pytest
import torch
from helpers.runs import LORA, llama_args, make_config, relative_l2, run_here, weights

KL = "kl_penalty=finch.regularization.KL"
COLUMNS = ("loss", "ema_loss", "lr", "grad_norm", "kl")


@pytest.fixture(scope="module")
def config(base_folder, rows_file, tmp_path_factory):
    """41 rows, 8 per step."""
    folder = tmp_path_factory.mktemp("kl")
    return make_config(base_folder, rows_file, folder / "run", batch_size=8)


@pytest.fixture(scope="module")
def alone(config, trained):
    """In float64."""
    return trained(config, KL, "kl_penalty.strength=2", "dtype=fp64")


def finished(folder, config, *overrides, **options):
    run = run_here(folder, {**config, "output_dir": str(folder / "run")}, *overrides, **options)
    assert run.returncode == 0, run.output[-3000:]
    return run


def assert_same_weights(run, other):
    one, two = weights(run.folder / "epoch_0"), weights(other.folder / "epoch_0")
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_kl_strength_zero_is_sft_bitwise(config, tmp_path):
    sft = finished(tmp_path / "sft", config, "method=sft")
    zero = finished(tmp_path / "zero", config, "method=kl", "kl_penalty.strength=0")
    some = finished(tmp_path / "some", config, "method=kl")
    for column in ("loss", "grad_norm", "lr"):
        assert zero.column(column) == sft.column(column)
    assert_same_weights(zero, sft)
    assert zero.column("kl")[0] == 0
    assert min(zero.column("kl")[1:]) > 0
    # The first step's divergence and its gradient are 0; then they are not.
    assert some.column("kl")[0] == 0
    assert some.column("grad_norm")[0] == sft.column("grad_norm")[0]
    assert some.column("loss")[:2] == sft.column("loss")[:2]
    assert some.column("kl")[1] == zero.column("kl")[1]
    assert some.column("grad_norm")[1] != sft.column("grad_norm")[1]


def test_kl_penalty_keeps_the_model_near(alone, config, tmp_path):
    free = finished(tmp_path, config, KL, "kl_penalty.strength=0", "dtype=fp64")
    assert alone.column("kl")[-1] < 0.7 * free.column("kl")[-1]


def test_kl_penalty_with_optimizer_in_bwd_is_bitwise(config, tmp_path):
    config = {key: value for key, value in config.items() if key != "clip_grad_norm"}
    plain = finished(tmp_path / "plain", config, KL)
    fused = finished(tmp_path / "fused", config, KL, "optimizer_in_bwd=True")
    for column in ("loss", "lr", "kl"):
        assert fused.column(column) == plain.column(column)
    assert_same_weights(fused, plain)


def test_kl_penalty_of_packed_rows(config, tmp_path):
    """The second step's divergence, after a first step over all rows."""
    found = {}
    for packed, batch in ((False, 20), (True, 3)):
        dataset = {**config["dataset"], "split": "train[:20]", "packed": packed}
        run = finished(tmp_path / str(packed), {**config, "dataset": dataset, "epochs": 2}, KL, f"batch_size={batch}")
        found[packed] = run.column("kl")
    assert found[True] == pytest.approx(found[False], rel=1e-5)
    assert found[True][1] > 1e-4


def test_kl_penalty_cached_with_all_tokens_is_the_online_one(alone, config, tmp_path):
    """With fewer it is a lower bound; the file is read again where it fits."""
    changes = [KL, "kl_penalty.strength=2", "kl_penalty.reference=cached", "dtype=fp64"]
    size = f"kl_penalty.top_k={config['model']['vocab_size']}"
    every = finished(tmp_path, config, *changes, size)
    for column in COLUMNS:
        assert every.column(column) == pytest.approx(alone.column(column), rel=1e-9, abs=1e-12), column
    assert relative_l2(weights(every.folder / "epoch_0"), weights(alone.folder / "epoch_0")) < 1e-12
    columns = {column: every.column(column) for column in COLUMNS}
    again = finished(tmp_path, config, *changes, size, "overwrite=True")
    assert "the pretrained model's most likely tokens are read from" in again.output
    assert {column: again.column(column) for column in COLUMNS} == columns
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
    lora = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4, "lora_alpha": 8}
    config = {**config, "model": {"_component_": "torchtune.models.llama2.lora_llama2", **llama_args(), **lora}}
    changes = ["method=finch+asft", "optimizer.lr=2e-2", "lr_scheduler.eta_max=5e-2", "epochs=2"]
    run = finished(tmp_path, config, *changes, recipe=LORA)
    assert "the model without its adapters" in run.output
    assert run.column("kl")[0] == 0
    assert run.column("kl")[-1] > 1e-3


def test_kl_penalty_of_compiled_and_mixed_precision_models(config, monkeypatch, tmp_path):
    """Both models see the same kernels and the same rounding: the first divergence is 0."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # a test machine may lack a C++ compiler
    for name, change in {
        "compiled": "compile=True",
        "mixed": "dtype=bf16_mixed",
        "offloaded": "fsdp_cpu_offload=True",
    }.items():
        run = finished(tmp_path / name, config, KL, change, "max_steps_per_epoch=2")
        assert run.column("kl")[0] == pytest.approx(0, abs=1e-9), name
        assert run.column("kl")[1] > 1e-4, name
